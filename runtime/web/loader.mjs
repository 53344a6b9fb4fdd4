// From the files of an export to a model in memory. Weights are verified by their digests, and kept in the browser's own file system.

import { Decoder } from './decoder.mjs';

const TRIES = 3;   // of a file that arrives damaged

// A module that an engine accepts if it has the feature: one function that uses one instruction of it.
const PROBES = {
  'simd128': [253, 15],              // i8x16.splat
  'relaxed-simd': [253, 128, 2],     // i8x16.relaxed_swizzle
};

function supports(feature) {
  const opcode = PROBES[feature];
  if (opcode === undefined) return true;   // in every engine that has simd128
  const operands = feature === 'simd128' ? [65, 0] : [65, 0, 253, 15, 65, 0, 253, 15];
  const body = [0, ...operands, ...opcode, 26, 11];
  return WebAssembly.validate(new Uint8Array([
    0, 97, 115, 109, 1, 0, 0, 0, 1, 4, 1, 96, 0, 0, 3, 2, 1, 0, 10, body.length + 2, 1, body.length, ...body,
  ]));
}

/** The first level whose features this engine has. */
export function bestLevel(levels) {
  const level = levels.find(({ features }) => features.every(supports));
  if (level === undefined) throw new Error('this engine has no WebAssembly SIMD; take a newer browser');
  return level;
}

/** `read(file)` gives a file's bytes. `onProgress` is told how many bytes of how many are there. */
export async function loadModel({ read, target, kept = null, onProgress = () => {} }) {
  const { model, levels } = JSON.parse(new TextDecoder().decode(await read('program.json')));
  const level = target === undefined ? bestLevel(levels) : levels.find((known) => known.target === target);
  if (level === undefined) throw new Error(`this export has no level ${target}; it has ${levels.map((known) => known.target).join(', ')}`);
  const module = await WebAssembly.compile(await read(level.module));
  const decoder = await Decoder.load(level.program, module, model);
  const { weights } = decoder, total = weights.length;
  let loaded = 0;
  for (const shard of level.shards) {
    weights.set(await verified(shard, read, kept), shard.begin);
    onProgress(loaded += shard.num_bytes, total);
  }
  return { decoder, model, level };
}

/** A shard whose digest is right: what is kept if it is sound, else fetched, again if it came damaged. */
async function verified(shard, read, kept) {
  const before = await kept?.read(shard.file);
  if (before && await isSound(before, shard)) return before;
  for (let tries = 1; ; tries++) {
    const bytes = await read(shard.file);
    if (await isSound(bytes, shard)) {
      await kept?.write(shard.file, bytes);
      return bytes;
    }
    if (tries === TRIES) throw new Error(`${shard.file} is damaged: its SHA-256 is not ${shard.sha256}, in ${TRIES} downloads; export the model again`);
  }
}

async function isSound(bytes, { num_bytes: expected, sha256 }) {
  if (bytes.length !== expected) return false;
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, '0')).join('') === sha256;
}

/** Files beside a page. */
export const fetched = (base) => async (file) => {
  const answer = await fetch(new URL(file, base));
  if (!answer.ok) throw new Error(`${file}: the server answers ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
};

/** The browser's file system for this origin; null where there is none, as on pages without https. */
export async function browserFiles(folder) {
  if (!globalThis.navigator?.storage?.getDirectory) return null;
  try {
    const root = await navigator.storage.getDirectory(), place = await root.getDirectoryHandle(folder, { create: true });
    return {
      async read(file) {
        try {
          return new Uint8Array(await (await (await place.getFileHandle(file)).getFile()).arrayBuffer());
        } catch { return null; }
      },
      async write(file, bytes) {
        try {
          const sink = await (await place.getFileHandle(file, { create: true })).createWritable();
          await sink.write(bytes);
          await sink.close();
        } catch { /* no room: the next visit fetches it again */ }
      },
    };
  } catch { return null; }
}
