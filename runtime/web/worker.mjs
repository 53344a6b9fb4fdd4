// Run the engine in a worker. The message {id, method: 'load', ...} loads the model, {id, method, body} starts a request, {id, abort} ends it.
// Answers are {id, event}, {id, progress}, {id, done, result}, {id, error}.

import { Engine } from './engine.mjs';
import { browserFiles, fetched } from './loader.mjs';

const running = new Map();
let engine;

const told = (error) => ({ name: error.name, message: error.message, param: error.param, code: error.code });

async function load({ id, base, name, target, threads, headers }) {
  const onProgress = (loaded, total) => postMessage({ id, event: { loaded, total } });
  const onDamage = (damaged) => postMessage({ id, event: { damaged } }), onSize = (size) => postMessage({ id, event: { size } });
  engine = await Engine.load({ ...fetched(base, headers), target, threads, kept: await browserFiles(name, base), onProgress, onDamage, onSize });
  return { model: engine.model, target: engine.level.target, threads: engine.threads };
}

/** Run a request, and send each of its events to the page. */
async function run({ id, method, body }) {
  const abort = new AbortController();
  running.set(id, abort);
  try {
    const onProgress = (progress) => postMessage({ id, progress });
    for await (const event of engine.run(method, body, abort.signal, onProgress)) postMessage({ id, event });
  } finally {
    running.delete(id);
  }
}

onmessage = async ({ data }) => {
  const { id } = data;
  if (data.abort) return running.get(id)?.abort();
  try {
    postMessage({ id, done: true, result: data.method === 'load' ? await load(data) : await run(data) });
  } catch (error) {
    postMessage({ id, error: told(error) });
  }
};
