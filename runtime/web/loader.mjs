// Load the files of an export as a model in memory. Weights are verified by their digests and kept in the browser's own file system.

import { Decoder } from './decoder.mjs';
import { Encoder } from './encoder.mjs';
import { Listener } from './listener.mjs';
import { Seer } from './seer.mjs';
import { MOST_THREADS, canShare, usualThreads } from './team.mjs';

const TRIES = 3;   // maximum number of downloads of a file that arrives damaged or makes no progress
const SHARED = 3;  // flags of a memory that has a maximum and is shared between threads
const NOTHING = new Uint8Array(0);
const NETWORKS = { generator: Decoder, embedder: Decoder, encoder: Encoder, transcriber: Listener };

// One instruction of each feature. An engine that has the feature accepts a module whose only function uses it.
const PROBES = {
  'simd128': [253, 15],              // i8x16.splat
  'relaxed-simd': [253, 128, 2],     // i8x16.relaxed_swizzle
};

/** Return whether this engine has a feature of WebAssembly. */
function supports(feature) {
  const opcode = PROBES[feature];
  if (opcode === undefined) return true;   // every engine with simd128 has all other features
  const operands = feature === 'simd128' ? [65, 0] : [65, 0, 253, 15, 65, 0, 253, 15];
  const body = [0, ...operands, ...opcode, 26, 11];
  return WebAssembly.validate(new Uint8Array([
    0, 97, 115, 109, 1, 0, 0, 0, 1, 4, 1, 96, 0, 0, 3, 2, 1, 0, 10, body.length + 2, 1, body.length, ...body,
  ]));
}

/** Return the first level whose features this engine has. Throw an error if there is none. */
export function bestLevel(levels) {
  const level = levels.find(({ features }) => features.every(supports));
  if (level === undefined) throw new Error('this engine has no WebAssembly SIMD; take a newer browser');
  return level;
}

/**
 * Load the model. `read(file)` returns a file's bytes. `pieces(file, begin)` yields the bytes from `begin` on as they arrive, as {at, bytes}.
 * `kept` has the files of earlier visits. With several `threads` the module is linked to shared memory. `onProgress(loaded, total)` reports
 * bytes, `onDamage(file)` each file that was stored or arrived damaged and is fetched again. Before any weight is fetched, `onSize({memory,
 * weights})` states the bytes that the model takes in memory, and those of its weights. Throw an error if the page or the browser cannot
 * run the model with these settings, or if a file cannot be fetched.
 */
export async function loadModel({ read, pieces = whole(read), target, threads = usualThreads(), kept = null, onProgress = () => {}, onDamage = () => {}, onSize = () => {} }) {
  if (!globalThis.crypto?.subtle) throw new Error('this browser can verify files only on secure pages; open the page over https or on localhost');
  const { model, levels } = JSON.parse(new TextDecoder().decode(await read('program.json')));
  const level = target === undefined ? bestLevel(levels) : levels.find((known) => known.target === target);
  if (level === undefined) throw new Error(`this export has no level ${target}; it has ${levels.map((known) => known.target).join(', ')}`);
  if (!Number.isInteger(threads) || threads < 1 || threads > MOST_THREADS) throw new RangeError(`threads is ${threads}; expected 1 to ${MOST_THREADS}`);
  if (threads > 1 && !canShare()) throw new Error(`threads is ${threads}; expected 1, since this page is not isolated from other origins: serve it with the headers COOP and COEP`);
  const binary = await read(level.module);
  if (threads > 1) binary[level.memory_flags] = SHARED;
  const module = await WebAssembly.compile(binary);
  const network = await (model.vision === null ? NETWORKS[model.kind] : Seer).load(level.program, module, model, threads);
  const { weights } = network.program, total = weights.length;
  onSize({ memory: network.program.bytes.length, weights: total });
  await kept?.keepOnly?.(level.shards.map(({ file }) => file));
  let loaded = 0;
  for (const shard of level.shards) {
    const arrived = (bytes) => onProgress(loaded + bytes, total);
    weights.set(await verified(shard, { pieces, kept, arrived, onDamage }), shard.begin);
    onProgress(loaded += shard.num_bytes, total);
  }
  return { network, model, level, threads };
}

/**
 * Return the verified bytes of a shard: the stored bytes if their digest is right, else downloaded bytes. An interrupted download is
 * continued. Throw an error if the server refuses, or if TRIES downloads in a row arrive damaged or bring no further bytes.
 */
async function verified(shard, { pieces, kept, arrived, onDamage }) {
  let known = (await kept?.read(shard.file)) ?? NOTHING;
  if (await isSound(known, shard)) return known;
  if (known.length >= shard.num_bytes) {
    onDamage(shard.file);
    known = NOTHING;
  }
  for (let tries = 1; ; tries++) {
    const { bytes, failure } = await downloaded(shard, known, { pieces, kept, arrived });
    if (await isSound(bytes, shard)) return bytes;
    if (failure && bytes.length > known.length) tries = 0;
    else if (failure && (tries === TRIES || failure.code)) throw failure;
    else if (tries === TRIES) throw new Error(`${shard.file} is damaged: its SHA-256 is not ${shard.sha256}, in ${TRIES} downloads; export the model again`);
    if (!failure) onDamage(shard.file);
    known = failure ? bytes : NOTHING;
  }
}

/** Request the bytes of a shard that follow the known ones. Return all bytes received so far, and the failure if the request ended too early. */
async function downloaded({ file, num_bytes: most }, known, { pieces, kept, arrived }) {
  const all = new Uint8Array(most), sink = await kept?.open(file);
  let end = known.length, failure;
  all.set(known);
  try {
    for await (const { at, bytes } of pieces(file, known.length)) {
      end = at + bytes.length;
      if (end > most) break;   // too long: the digest will be wrong
      all.set(bytes, at);
      sink?.write(bytes, at);
      arrived(end);
    }
    if (end < most) failure = new Error(`${file}: ${end} of ${most} bytes arrived; check the connection and load again`);
  } catch (error) { failure = error; } finally { sink?.close(Math.min(end, most)); }
  return { bytes: all.subarray(0, end), failure };
}

/** Return whether bytes have the size and the digest of a shard. */
async function isSound(bytes, { num_bytes: expected, sha256 }) {
  if (bytes.length !== expected) return false;
  const digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  return [...digest].map((byte) => byte.toString(16).padStart(2, '0')).join('') === sha256;
}

const whole = (read) => async function* (file) { yield { at: 0, bytes: await read(file) }; };

/**
 * Return the functions `read` and `pieces` for `loadModel` that request files below an address. `headers` go with each request. The
 * functions throw an error with the status as its `code` if the server refuses.
 */
export function fetched(base, headers = {}) {
  const answerTo = async (file, more = {}) => {
    const answer = await fetch(new URL(file, base), { headers: { ...headers, ...more } });
    if (answer.ok) return answer;
    const said = (await answer.json().catch(() => ({}))).error?.message;
    throw Object.assign(new Error(`${file}: ${said ?? `the server answers ${answer.status}`}`), { code: answer.status });
  };
  return {
    read: async (file) => new Uint8Array(await (await answerTo(file)).arrayBuffer()),
    async *pieces(file, begin) {
      const answer = await answerTo(file, begin > 0 ? { range: `bytes=${begin}-` } : {}), reader = answer.body.getReader();
      let at = answer.status === 206 ? begin : 0;   // a server without range support sends the whole file
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        yield { at, bytes: part.value };
        at += part.value.length;
      }
    },
  };
}

const LIST = 'pages.json';   // the shards that each page of this origin needs, by its address

/**
 * Open a folder in the browser's file system for this origin; null if there is none. A file may hold only the beginning of a download. `page` is
 * the address of the export.
 */
export async function browserFiles(folder, page) {
  if (!globalThis.navigator?.storage?.getDirectory) return null;
  try {
    const root = await navigator.storage.getDirectory(), place = await root.getDirectoryHandle(folder, { create: true });
    return {
      async read(file) {
        try {
          return new Uint8Array(await (await (await place.getFileHandle(file)).getFile()).arrayBuffer());
        } catch { return null; }
      },
      /** Open a file to write pieces in place, so that they survive closing the page; null if another page is writing it. */
      async open(file) {
        try {
          return new Sink(await (await place.getFileHandle(file, { create: true })).createSyncAccessHandle());
        } catch { return null; }
      },
      /** Remember which shards the page needs, and remove those that no page needs: weights of earlier exports would fill the storage. */
      async keepOnly(files) {
        try {
          const listed = await this.read(LIST);
          let known = {};   // null: the list is damaged, so that nobody knows what other pages need
          if (listed !== null) try { known = JSON.parse(new TextDecoder().decode(listed)); } catch { known = null; }
          const pages = { ...known, [page]: files }, needed = new Set(Object.values(pages).flat()), old = [];
          if (known !== null) for await (const file of place.keys()) if (file.startsWith('weights-') && !needed.has(file)) old.push(file);
          for (const file of old) await place.removeEntry(file).catch(() => {});   // another page writes it
          const bytes = new TextEncoder().encode(JSON.stringify(pages)), sink = await this.open(LIST);
          sink?.write(bytes, 0);
          sink?.close(bytes.length);
        } catch { /* the storage is full */ }
      },
    };
  } catch { return null; }
}

/** Writes a file in place until the storage is full. The next visit then finds the beginning, and downloads the rest. */
class Sink {
  #end = Infinity;   // where the first piece begins that was not stored

  constructor(handle) { this.handle = handle; }

  /** Store bytes at an offset of the file. After the first piece that does not fit, nothing more is stored. */
  write(bytes, at) {
    if (this.#end < Infinity) return;
    try {
      if (this.handle.write(bytes, { at }) === bytes.length) return;
    } catch { /* the storage is full */ }
    this.#end = at;
  }

  /** Close the file and cut off what follows its first `length` bytes, or what could not be stored. */
  close(length) {
    try {
      this.handle.truncate(Math.min(length, this.#end, this.handle.getSize()));
    } finally { this.handle.close(); }
  }
}
