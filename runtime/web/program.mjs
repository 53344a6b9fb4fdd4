// A flat program in memory: its functions are called with tensors and replay their records.
// runtime/flat_program.py describes records and the steps of a call.

import { CONTROL_BYTES, Team } from './team.mjs';

export const BYTES = { f32: 4, f16: 2, bf16: 2, e4m3: 1, i8: 1, i16: 2, i32: 4, i64: 8, u8: 1, u32: 4, bool: 1 };
const ARENA = 0, WEIGHTS = 1, INPUT = 2;   // the values of FlatBase in runtime/flat_program.py
const PAGE = 65536, ALIGNMENT = 64, POINTER = 4, WORD = 8, MOST_BYTES = 4 * 2 ** 30;
const STACK_SPARE = 65536;                 // stack bytes for registers that an engine spills, beyond the local buffers of kernels

export const align = (bytes) => Math.ceil(bytes / ALIGNMENT) * ALIGNMENT;
export const sizeOf = (dtype, shape) => shape.reduce((total, extent) => total * extent, BYTES[dtype]);

/** Assigns addresses in the linear memory of a module. Addresses only grow: no memory is given back. */
class Layout {
  constructor(begin) { this.top = align(begin); }
  take(bytes) {
    const begin = this.top;
    this.top = align(begin + bytes);
    if (this.top > MOST_BYTES) throw new RangeError(`the model needs ${this.top} bytes of memory, but WebAssembly addresses ${MOST_BYTES}; export fewer pages or smaller weights`);
    return begin;
  }
}

/** A compiled module with its memory: weights, arena, heaps, and the inputs that callers allocate. */
export class Program {
  /**
   * Lay out the memory of a program, instantiate its module, and start the threads of its team if there are several. The weights are still
   * zero. `extraBytes`: number of bytes that the caller will allocate with `take` for inputs. `module`: a compiled WebAssembly.Module; for
   * several threads it must import a shared memory.
   */
  static async load(description, module, extraBytes, threads = 1) {
    const program = new Program(), isShared = threads > 1;
    program.description = description;
    const probe = memoryOf(1, isShared);
    const stackPointer = new WebAssembly.Global({ value: 'i32', mutable: true }, 0);
    const begin = await heapBase(module, probe);
    const layout = program.layout = new Layout(begin);
    const stackBytes = description.stack_bytes + STACK_SPARE;
    const [stack, ...stacks] = Array.from({ length: threads }, () => layout.take(stackBytes) + align(stackBytes));
    stackPointer.value = stack;
    const controlAt = layout.take(CONTROL_BYTES);
    program.buffersAt = layout.take(description.most_buffers * POINTER);
    program.dimsAt = layout.take(description.most_dims * WORD);
    program.heaps = {};
    for (const [name, f] of Object.entries(description.functions)) program.heaps[name] = layout.take((f.slots.length + f.literals.length) * WORD);
    program.weightsAt = layout.take(description.weights_bytes);
    program.arenaAt = layout.take(description.arena_bytes);
    const end = layout.top + extraBytes + ALIGNMENT;
    const memory = program.memory = memoryOf(Math.ceil(end / PAGE), isShared);
    program.exports = (await WebAssembly.instantiate(module, { env: { memory: program.memory, __stack_pointer: stackPointer } })).exports;
    const { buffer } = program.memory;
    program.bytes = new Uint8Array(buffer);
    program.addresses = new Uint32Array(buffer);
    program.words = new BigInt64Array(buffer);
    program.functions = {};
    const names = [...new Set(Object.values(description.functions).flatMap((f) => f.records.map((record) => record.body)))];
    for (const [name, f] of Object.entries(description.functions)) program.functions[name] = program.#prepared(f, program.heaps[name], names);
    const { buffersAt, dimsAt } = program;
    program.team = isShared ? await Team.start({ module, memory, controlAt, buffersAt, dimsAt, stacks, names }) : null;
    return program;
  }

  get weights() { return this.bytes.subarray(this.weightsAt, this.weightsAt + this.description.weights_bytes); }

  take(bytes) { return this.layout.take(bytes); }

  /** Allocate a tensor for an input of the caller. */
  tensor(dtype, shape) { return { dtype, shape, at: this.take(sizeOf(dtype, shape)) }; }

  /** Return a view of a tensor's elements. It stays valid, because memory does not grow. */
  view(tensor, Type) {
    return new Type(this.memory.buffer, tensor.at, sizeOf(tensor.dtype, tensor.shape) / Type.BYTES_PER_ELEMENT);
  }

  /** Write the literals of a function to its heap. Return the function with the addresses and exports that its calls need. */
  #prepared(f, heapAt, names) {
    const heap = heapAt / WORD;
    f.literals.forEach((literal, i) => { this.words[heap + f.slots.length + i] = BigInt(literal); });
    const fixed = [this.arenaAt + f.arena_begin, this.weightsAt];
    const records = f.records.map((record) => ({
      body: this.#exported(record.body),
      number: names.indexOf(record.body),
      grid: this.#exported(record.grid),
      buffers: record.buffers.map(([base, slot]) => ({ base: base < INPUT ? fixed[base] : 0, input: base < INPUT ? -1 : base - INPUT, slot: heap + slot })),
      dims: record.dims.map((slot) => heap + slot),
    }));
    return { f, heap, heapAt, records, derive: f.derive === null ? null : this.#exported(f.derive) };
  }

  #exported(symbol) {
    const found = this.exports[symbol];
    if (found === undefined) throw new Error(`the module has no function ${symbol}; program.json and the .wasm file are from different exports`);
    return found;
  }

  /** Call a function. Its outputs stay in the arena until the next call of this function. Throw TypeError or RangeError if the inputs do not fit. */
  call(name, inputs) {
    const { f, heap, heapAt, records, derive } = this.functions[name];
    this.#match(f, heap, heapAt, derive, inputs);
    const { words, addresses, buffersAt, dimsAt, team } = this, buffers = buffersAt / POINTER, dims = dimsAt / WORD;
    for (const record of records) {
      for (let i = 0; i < record.buffers.length; i++) {
        const { base, input, slot } = record.buffers[i];
        addresses[buffers + i] = (input < 0 ? base : inputs[input].at) + Number(words[slot]);
      }
      for (let i = 0; i < record.dims.length; i++) words[dims + i] = words[record.dims[i]];
      const iterations = record.grid(dimsAt);
      if (team !== null && iterations > 1n) team.run(record.body, record.number, Number(iterations), buffersAt, dimsAt);
      else if (iterations > 0n) record.body(buffersAt, dimsAt, 0n, iterations);
    }
    return f.outputs.map(({ dtype, shape, offset }) => ({
      dtype,
      shape: shape.map((slot) => Number(words[heap + slot])),
      at: this.arenaAt + f.arena_begin + Number(words[heap + offset]),
    }));
  }

  /**
   * Fill the heap of a call, and check inputs, checks and bounds: steps 1 to 3 of runtime/flat_program.py. Throw TypeError if an input has
   * another type or shape, and RangeError if a value is outside its bounds or cannot be computed.
   */
  #match(f, heap, heapAt, derive, inputs) {
    const { words } = this, slot = (number) => words[heap + number];
    if (inputs.length !== f.inputs.length) throw new TypeError(`${f.name} takes ${f.inputs.length} inputs, got ${inputs.length}`);
    for (const { slot: number, input, axis } of f.definitions) words[heap + number] = BigInt(inputs[input].shape[axis]);
    const status = derive === null ? 0n : derive(heapAt);
    if (status !== 0n) throw new RangeError(`${f.name}: ${f.slots[Number(status > 0n ? status : -status) - 1]} overflows or divides by zero for these inputs`);
    f.inputs.forEach(({ name, dtype, shape }, i) => {
      const given = inputs[i];
      if (given.dtype !== dtype || given.shape.length !== shape.length || shape.some((number, axis) => slot(number) !== BigInt(given.shape[axis]))) {
        throw new TypeError(`${f.name}: input ${name} is ${given.dtype}[${given.shape}], expected ${dtype}[${shape.map(slot)}]`);
      }
    });
    for (const { place, found, expected } of f.checks) {
      if (slot(found) !== slot(expected)) throw new RangeError(`${f.name}: ${place} needs ${f.slots[expected]} to be ${f.slots[found]}; they are ${slot(expected)} and ${slot(found)}`);
    }
    for (const { name, slot: number, lower, upper, multiple_of: step } of f.bounds) {
      const value = slot(number);
      if (value < BigInt(lower) || (upper >= 0 && value > slot(upper)) || value % BigInt(step) !== 0n) {
        throw new RangeError(`${f.name}: ${name} is ${value}, expected ${lower} to ${upper < 0 ? 'any' : slot(upper)}${step > 1 ? `, a multiple of ${step}` : ''}`);
      }
    }
  }
}

/** Allocate a memory. Shared memory has to declare a maximum. Throw RangeError if the browser refuses. */
function memoryOf(pages, shared) {
  try {
    return new WebAssembly.Memory({ initial: pages, maximum: pages, shared });
  } catch (error) {
    throw new RangeError(`the model takes ${Math.ceil(pages * PAGE / 2 ** 20)} MiB of memory, and this browser does not give it (${error.message}): close other pages, or export fewer tokens with --max-context`);
  }
}

/** Return the first address after a module's data, which only an instance exports. */
async function heapBase(module, memory) {
  const imports = { env: { memory, __stack_pointer: new WebAssembly.Global({ value: 'i32', mutable: true }, 0) } };
  return (await WebAssembly.instantiate(module, imports)).exports.__heap_base.value;
}
