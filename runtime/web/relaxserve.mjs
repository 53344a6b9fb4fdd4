// A client in OpenAI's shape for a model that runs in this browser:
//
//   const client = await RelaxServe.load({ base: new URL('./', import.meta.url), onProgress: (loaded, total) => ... });
//   const answer = await client.chat.completions.create({ messages: [{ role: 'user', content: 'Hello' }] });
//   for await (const chunk of await client.chat.completions.create({ messages, stream: true }, { signal })) ...
//   const seen = [{ type: 'image_url', image_url: { url: file } }, { type: 'text', text: 'What is it?' }];   // a Blob, an ImageData or a data: URL
//   const { text } = await client.audio.transcriptions.create({ file });   // a Blob, for instance of an <input type="file">
//
// The model runs in a worker, so that the page stays responsive. In Node, which lacks such workers, `RelaxServe.of(engine)` runs it in the calling thread.

import { scriptUrl } from './script.mjs';
import { samplesOf } from './sound.mjs';

export class RelaxServe {
  /**
   * Load the model in a worker, and return a client for it. If the load fails, end the worker and throw the error. `headers` go with each
   * request for a file of the model, for instance a header with an API key. loader.mjs describes `onProgress`, `onDamage` and `onSize` of a
   * load, engine.mjs `onProgress` of a request.
   */
  static async load({ base = new URL('./', import.meta.url), name = 'relaxserve', target, threads, headers, onProgress = () => {}, onDamage = () => {}, onSize = () => {} } = {}) {
    const worker = new Worker(scriptUrl('./worker.mjs', import.meta.url), { type: 'module' });
    const remote = new Remote(worker);
    const told = ({ loaded, total, damaged, size }) => {
      if (size !== undefined) onSize(size);
      else if (damaged !== undefined) onDamage(damaged);
      else onProgress(loaded, total);
    };
    try {
      const chosen = await remote.call({ method: 'load', base: String(base), name, target, threads, headers }, told);
      return new RelaxServe((method, body, options) => remote.stream({ method, body }, options), chosen, () => worker.terminate());
    } catch (error) {
      worker.terminate();   // it may hold the memory of the model
      throw error;
    }
  }

  /** Return a client of an engine in this thread. */
  static of(engine) {
    const run = (method, body, { signal, onProgress }) => engine.run(method, body, signal ?? new AbortController().signal, onProgress);
    return new RelaxServe(run, { model: engine.model, target: engine.level.target, threads: engine.threads }, () => engine.close());
  }

  /**
   * `run(method, body, options)` returns the events of a request. `close` ends what runs the model. The functions `create` return all
   * events if the body asks for a stream, otherwise the last event, which is the whole answer.
   */
  constructor(run, { model, target, threads }, close) {
    const create = (method) => async (body, options = {}) => {
      const events = run(method, body, options);
      if (body.stream) return events;
      let last;
      for await (const event of events) last = event;
      return last;
    };
    Object.assign(this, { model, target, threads, close });
    this.chat = { completions: { create: create('chat.completions') } };
    this.completions = { create: create('completions') };
    this.embeddings = { create: create('embeddings') };
    const hearing = (method) => async ({ file, ...body }, options) => create(method)({ ...body, file: await samplesOf(file) }, options);
    this.audio = { transcriptions: { create: hearing('audio.transcriptions') }, translations: { create: hearing('audio.translations') } };
  }
}

/** The worker that runs the model. Each call or stream has a number, by which answers find their way back. */
class Remote {
  #next = 0;
  #waiting = new Map();

  constructor(worker) {
    this.worker = worker;
    worker.onmessage = ({ data }) => this.#waiting.get(data.id)?.(data);
    worker.onerror = (failure) => {
      for (const tell of this.#waiting.values()) tell({ error: { name: 'Error', message: failure.message || 'the worker has ended' } });
    };
  }

  /** Send a message, pass each event to `onEvent`, and return the result. */
  call(message, onEvent) {
    const id = this.#next++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, ({ event, done, result, error }) => {
        if (event !== undefined) return onEvent(event);
        this.#waiting.delete(id);
        if (done) resolve(result);
        else reject(thrown(error));
      });
      this.worker.postMessage({ ...message, id });
    });
  }

  /** Send a message and yield its events. Aborting the signal, or leaving the loop, ends the request. */
  async *stream(message, { signal, onProgress = () => {} }) {
    signal?.throwIfAborted();
    const id = this.#next++, arrived = [];
    let wake = () => {};
    this.#waiting.set(id, (data) => {
      if (data.progress !== undefined) return onProgress(data.progress);
      arrived.push(data);
      wake();
    });
    const abort = () => this.worker.postMessage({ id, abort: true });
    signal?.addEventListener('abort', abort, { once: true });
    this.worker.postMessage({ ...message, id });
    let ended = false;
    try {
      while (!ended) {
        if (arrived.length === 0) await new Promise((resolve) => { wake = resolve; });
        const { event, error, done } = arrived.shift() ?? {};
        ended = Boolean(done || error);
        if (error) throw thrown(error);
        if (event !== undefined) yield event;
      }
    } finally {
      if (!ended) abort();   // the caller left its loop
      signal?.removeEventListener('abort', abort);
      this.#waiting.delete(id);
    }
  }
}

const thrown = ({ name, message, param, code }) => Object.assign(new Error(message), { name, param, code });
