// Requests to answers: one at a time, token by token, in OpenAI's shapes.

import { loadModel } from './loader.mjs';
import { parsed, RequestError } from './request.mjs';
import { Detokenizer, TextCodec } from './text.mjs';

const nextTurn = () => new Promise((resolve) => {   // lets an abort in; a timer would wait for milliseconds
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); resolve(); };
  port2.postMessage(0);
});

export class Engine {
  static async load(options) {
    const engine = new Engine(), { decoder, model, level } = await loadModel(options);
    Object.assign(engine, { decoder, model, level, codec: await TextCodec.load(model, options.read), tokens: [], running: Promise.resolve() });
    return engine;
  }

  /** Methods that a client may name, each an async generator of events: chunks, and last the whole answer. */
  get methods() {
    return { 'chat.completions': (body, signal) => this.#chat(body, signal), completions: (body, signal) => this.#completion(body, signal), embeddings: (body) => this.#embeddings(body) };
  }

  /** Requests wait for each other: one sequence is in memory. */
  async *run(method, body, signal) {
    const before = this.running;
    let done;
    this.running = new Promise((resolve) => { done = resolve; });
    try {
      await before;
      signal.throwIfAborted();
      yield* this.methods[method](body, signal);
    } finally {
      done();
    }
  }

  async *#chat(body, signal) {
    if (!Array.isArray(body.messages) || body.messages.length === 0) throw new RequestError('messages', 'messages has to be a list with at least one message');
    const asked = parsed(body, this.model), prompt = this.codec.encode(this.codec.prompt(body.messages));
    const head = { id: `chatcmpl-${crypto.randomUUID()}`, created: Math.floor(Date.now() / 1000), model: this.model.name };
    const chunk = (delta, reason = null, logprobs = null) => ({ ...head, object: 'chat.completion.chunk', choices: [{ index: 0, delta, finish_reason: reason, logprobs }] });
    const answer = { content: '', tokens: [] };
    if (asked.stream) yield chunk({ role: 'assistant', content: '' });
    for await (const { text, token, logprob, reason } of this.#generate(prompt, asked, signal)) {
      answer.content += text;
      if (token !== undefined) answer.tokens.push(logprob === null ? token : this.#named(token, logprob));
      const logprobs = logprob ? { content: [this.#named(token, logprob)] } : null;
      if (reason) answer.reason = reason;
      if (asked.stream && (text !== '' || logprobs)) yield chunk({ content: text }, null, logprobs);
    }
    const usage = { prompt_tokens: prompt.length, completion_tokens: answer.tokens.length, total_tokens: prompt.length + answer.tokens.length };
    if (asked.stream) {
      yield chunk({}, answer.reason);
      if (asked.usage) yield { ...head, object: 'chat.completion.chunk', choices: [], usage };
      return;
    }
    const logprobs = asked.sampling.logprobs < 0 ? null : { content: answer.tokens };
    const message = { role: 'assistant', content: answer.content };
    yield { ...head, object: 'chat.completion', choices: [{ index: 0, message, finish_reason: answer.reason, logprobs }], usage };
  }

  async *#completion(body, signal) {
    if (typeof body.prompt !== 'string') throw new RequestError('prompt', 'prompt has to be a string');
    const asked = parsed(body, this.model), prompt = this.codec.encode(body.prompt, { special: true });
    const head = { id: `cmpl-${crypto.randomUUID()}`, object: 'text_completion', created: Math.floor(Date.now() / 1000), model: this.model.name };
    let whole = '', count = 0, last = null;
    for await (const { text, token, reason } of this.#generate(prompt, asked, signal)) {
      whole += text;
      count += token !== undefined;
      last = reason ?? last;
      if (asked.stream && text !== '') yield { ...head, choices: [{ index: 0, text, finish_reason: null, logprobs: null }] };
    }
    const usage = { prompt_tokens: prompt.length, completion_tokens: count, total_tokens: prompt.length + count };
    yield { ...head, choices: [{ index: 0, text: asked.stream ? '' : whole, finish_reason: last, logprobs: null }], ...(asked.stream ? {} : { usage }) };
  }

  /** The hidden state of each text's last token, of length 1. */
  async *#embeddings(body) {
    const inputs = [body.input].flat();
    if (inputs.length === 0 || inputs.some((text) => typeof text !== 'string')) throw new RequestError('input', 'input has to be a text or a list of texts');
    const data = [];
    let total = 0;
    for (const [index, text] of inputs.entries()) {
      const tokens = this.codec.encode(text, { special: true });
      if (tokens.length === 0) throw new RequestError('input', `input ${index} is empty`);
      total += tokens.length;
      this.decoder.reset();
      this.tokens = [];
      const hidden = this.decoder.append(tokens, { wants: 'hidden' });
      const length = Math.hypot(...hidden);
      data.push({ object: 'embedding', index, embedding: Array.from(hidden, (x) => x / length) });
      await nextTurn();
    }
    yield { object: 'list', model: this.model.name, data, usage: { prompt_tokens: total, total_tokens: total } };
  }

  async *#generate(prompt, { sampling, stops, maxTokens }, signal) {
    const { decoder, model } = this, room = model.max_context - prompt.length;
    if (room < 1) throw new RequestError('messages', `the prompt has ${prompt.length} tokens; this export holds ${model.max_context}, answer included`);
    const seen = new Map(prompt.map((token) => [token, 0])), text = new Detokenizer(this.codec.pieces, stops);
    const kept = this.#shared(prompt);
    decoder.rewind(kept);
    this.tokens = this.tokens.slice(0, kept);
    let next = prompt.slice(kept);
    for (let count = 1; ; count++) {
      decoder.append(next);
      this.tokens.push(...next);
      const { token, logprob } = decoder.draw(sampling, seen);
      seen.set(token, (seen.get(token) ?? 0) + 1);
      const isEnd = model.eos_ids.includes(token), certain = isEnd ? '' : text.push(token);
      const reason = isEnd || text.stopped ? 'stop' : count >= Math.min(maxTokens, room) ? 'length' : undefined;
      yield { text: certain + (reason && !text.stopped ? text.finish() : ''), token, logprob, reason };
      if (reason) return;
      next = [token];
      await nextTurn();
      signal.throwIfAborted();
    }
  }

  /** How many tokens of the last sequence a prompt begins with; at least one is left to compute. */
  #shared(prompt) {
    let length = 0;
    while (length < prompt.length - 1 && this.tokens[length] === prompt[length]) length++;
    return length;
  }

  #named(token, { logprob, top }) {
    const named = (id, value) => ({ token: new TextDecoder().decode(this.codec.pieces[id]), bytes: [...this.codec.pieces[id]], logprob: value });
    return { ...named(token, logprob), top_logprobs: top.map((other) => named(other.token, other.logprob)) };
  }
}
