// Threads that run the records of a program together, as the native loop does (runtime/device/cpu/team.ll). A record is cut into chunks of
// neighbouring iterations, and a free thread claims the next chunk. The result of a chunk does not depend on the thread that runs it.
//
// Control words are in the memory that all threads share. A thread claims a chunk by incrementing `state`. The state also contains the number
// of the record, so a helper that comes late cannot claim a chunk of a record that has ended. While the leader writes the words of a record,
// the chunk number is the largest one, which no record has: otherwise a helper could claim a chunk of the old record by the new words.

import { scriptUrl } from './script.mjs';

export const CONTROL_BYTES = 32;
const STATE = 0, CHUNKS = 1, BODY = 2, ITERATIONS = 3, FINISHED = 4, SLEEPERS = 5, LEADER_SLEEPS = 6;
const CHUNK_BITS = 8, CHUNK_MASK = 255, MOST_RECORDS = 2 ** 23;   // a state has 32 bits
const SHARES = 8;        // chunks per thread: a thread that loses its core delays only one of them
const SPINS = 4000;      // polls of a word before a thread sleeps, which take some microseconds
const NAP_MS = 5;        // limit of the leader's sleep, in case it misses that a helper has finished

export const MOST_THREADS = 16;   // keeps chunk numbers within 8 bits

const inNode = () => typeof process === 'object' && Boolean(process.versions?.node);

/** Return whether threads can share memory here: in Node, and on pages that are isolated from other origins. */
export const canShare = () => typeof SharedArrayBuffer === 'function' && (inNode() || globalThis.crossOriginIsolated === true);

/** Return the default number of threads of a model. With more than four logical cores, use half, since two of them often share the multipliers. */
export function usualThreads() {
  const cores = globalThis.navigator?.hardwareConcurrency ?? 1;
  return canShare() ? Math.min(cores <= 4 ? cores : Math.ceil(cores / 2), MOST_THREADS) : 1;
}

/** The threads of a program: this one, which leads, and helpers in workers. */
export class Team {
  /** `stacks`: the end of each helper's stack. `names`: the functions that records call, in the order of their numbers. */
  static async start({ module, memory, controlAt, buffersAt, dimsAt, stacks, names }) {
    const team = new Team();
    team.words = new Int32Array(memory.buffer, controlAt, CONTROL_BYTES / 4);
    team.numThreads = 1 + stacks.length;
    team.opened = 0;
    team.helpers = await Promise.all(stacks.map((stack) => started({ module, memory, controlAt, buffersAt, dimsAt, stack, names })));
    return team;
  }

  /** Run all iterations of one record, whose buffers and dimensions are in memory. */
  run(body, number, iterations, buffersAt, dimsAt) {
    const { words } = this, chunks = Math.min(iterations, SHARES * this.numThreads);
    if (chunks <= 1) return body(buffersAt, dimsAt, 0n, BigInt(iterations));
    this.opened = (this.opened + 1) % MOST_RECORDS;
    Atomics.store(words, STATE, this.opened << CHUNK_BITS | CHUNK_MASK);
    Atomics.store(words, CHUNKS, chunks);
    Atomics.store(words, BODY, number);
    Atomics.store(words, ITERATIONS, iterations);
    Atomics.store(words, FINISHED, 0);
    Atomics.store(words, STATE, this.opened << CHUNK_BITS);
    if (Atomics.load(words, SLEEPERS) > 0) Atomics.notify(words, STATE);
    const done = claimed(words, () => body, buffersAt, dimsAt);
    for (let spins = 0, finished = Atomics.add(words, FINISHED, done) + done; finished < chunks; finished = Atomics.load(words, FINISHED)) {
      if (++spins < SPINS) continue;
      Atomics.store(words, LEADER_SLEEPS, 1);
      Atomics.wait(words, FINISHED, finished, NAP_MS);
      Atomics.store(words, LEADER_SLEEPS, 0);
    }
  }

  /** End the helpers. */
  close() { for (const helper of this.helpers) helper.terminate(); }
}

/** Run chunks of the open record until none is left. Return how many this thread ran. */
function claimed(words, bodyOf, buffersAt, dimsAt) {
  for (let count = 0; ;) {
    const state = Atomics.load(words, STATE), chunk = state & CHUNK_MASK;
    const chunks = Atomics.load(words, CHUNKS), number = Atomics.load(words, BODY), iterations = Atomics.load(words, ITERATIONS);
    if (chunk >= chunks) return count;
    if (Atomics.compareExchange(words, STATE, state, state + 1) !== state) continue;
    const begin = Math.floor(iterations * chunk / chunks), end = Math.floor(iterations * (chunk + 1) / chunks);
    bodyOf(number)(buffersAt, dimsAt, BigInt(begin), BigInt(end));
    count++;
  }
}

/** Return the endless loop of a helper, which sleeps while no record is open. The loop ends with its worker. */
export function help({ module, memory, controlAt, buffersAt, dimsAt, stack, names }) {
  const words = new Int32Array(memory.buffer, controlAt, CONTROL_BYTES / 4);
  const stackPointer = new WebAssembly.Global({ value: 'i32', mutable: true }, stack);
  const { exports } = new WebAssembly.Instance(module, { env: { memory, __stack_pointer: stackPointer } });
  const bodies = names.map((name) => exports[name]), bodyOf = (number) => bodies[number];
  return () => {
    for (;;) {
      const done = claimed(words, bodyOf, buffersAt, dimsAt);
      if (done > 0) {
        Atomics.add(words, FINISHED, done);
        if (Atomics.load(words, LEADER_SLEEPS) === 1) Atomics.notify(words, FINISHED);
      }
      const state = Atomics.load(words, STATE);
      let spins = 0;
      while (spins < SPINS && Atomics.load(words, STATE) === state) spins++;
      if (spins < SPINS) continue;
      Atomics.add(words, SLEEPERS, 1);
      Atomics.wait(words, STATE, state);
      Atomics.sub(words, SLEEPERS, 1);
    }
  };
}

/** Start a worker, and return it when it has its module instance and waits for records. */
async function started(shared) {
  if (inNode()) {
    const { Worker: Thread } = await import('node:worker_threads'), helper = new Thread(new URL('./helper.mjs', import.meta.url), { execArgv: [] });
    await new Promise((resolve, reject) => {
      helper.once('message', resolve);
      helper.once('error', reject);
      helper.postMessage(shared);
    });
    helper.removeAllListeners('message');
    helper.unref();
    return helper;
  }
  const helper = new Worker(scriptUrl('./helper.mjs', import.meta.url), { type: 'module' });
  await new Promise((resolve, reject) => {
    helper.onmessage = resolve;
    helper.onerror = (failure) => reject(new Error(failure.message || 'a thread cannot be started'));
    helper.postMessage(shared);
  });
  return helper;
}
