// node node.mjs RUNTIME: read messages from stdin, one per line, {open: name, folder, threads, target} or {run: name, times}, and answer each.
//
// A folder holds an export for browsers, where a run decodes one token after CONTEXT others, or a program without a model (kernel.json),
// where a run calls its only function.
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const CONTEXT = 128, HALF = 0.5, SHARED = 3;
const runtime = (file) => import(pathToFileURL(join(process.argv[2], file)));
const { loadModel } = await runtime('loader.mjs');
const { Program, align, sizeOf } = await runtime('program.mjs');
const runs = {};

async function kernel(folder, threads) {
  const { program: flat, entry, shapes, memory_flags: flags } = JSON.parse(await readFile(join(folder, 'kernel.json'), 'utf8'));
  const binary = new Uint8Array(await readFile(join(folder, 'kernel.wasm')));
  if (threads > 1) binary[flags] = SHARED;
  const { inputs } = flat.functions[entry], bytes = inputs.reduce((total, { dtype }, i) => total + align(sizeOf(dtype, shapes[i])), 0);
  const program = await Program.load(flat, await WebAssembly.compile(binary), bytes, threads);
  program.weights.set(await readFile(join(folder, 'weights.bin')));
  const arrays = inputs.map(({ dtype }, i) => program.tensor(dtype, shapes[i]));
  for (const array of arrays) if (array.dtype === 'f32') program.view(array, Float32Array).fill(HALF);
  return () => program.call(entry, arrays);
}

async function decoding(folder, target, threads) {
  const read = async (file) => new Uint8Array(await readFile(join(folder, file)));
  const { network, model } = await loadModel({ read, target, threads });
  network.append(Array.from({ length: CONTEXT }, (_, i) => i % model.vocab_size));
  return () => {
    network.rewind(CONTEXT - 1);
    network.append([1]);
  };
}

for await (const line of createInterface({ input: process.stdin })) {
  const { open: name, run, times, folder, threads, target } = JSON.parse(line);
  let answer = {};
  try {
    if (run !== undefined) for (let i = 0; i < times; i++) runs[run]();
    else runs[name] = await (existsSync(join(folder, 'kernel.json')) ? kernel(folder, threads) : decoding(folder, target, threads));
  } catch (error) { answer = { error: error.stack }; }
  console.log(JSON.stringify(answer));
}
