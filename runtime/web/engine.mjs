// Answer requests one at a time, token by token, in the shapes of OpenAI's API.

import { loadModel } from './loader.mjs';
import { parsed, parsedAudio, parsedEmbedding, RequestError } from './request.mjs';
import { Sight } from './sight.mjs';
import { Recording } from './sound.mjs';
import { Detokenizer, TextCodec } from './text.mjs';
import { areOpen, ThoughtSplitter } from './thoughts.mjs';
import { ToolParser } from './tools.mjs';
import { Transcription, subtitles } from './transcribe.mjs';

const COMPLETED = 16;   // tokens of a completion whose request names no number: the API's default

const nextTurn = () => new Promise((resolve) => {   // lets an abort message arrive; a timer would wait for milliseconds
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => { port1.close(); resolve(); };
  port2.postMessage(0);
});

/** Return a function that lets an abort message arrive and then throws. */
const pauses = (signal) => async () => {
  await nextTurn();
  signal.throwIfAborted();
};

/** Wait for a promise. Throw the signal's reason as soon as the signal is aborted. */
async function unlessAborted(promise, signal) {
  let abort;
  const aborted = new Promise((_, reject) => { abort = () => reject(signal.reason); });
  signal.addEventListener('abort', abort, { once: true });
  try {
    signal.throwIfAborted();
    await Promise.race([promise, aborted]);
  } finally {
    signal.removeEventListener('abort', abort);
  }
}

/** A model and the requests to it. `tokens` are those of the sequence in memory. */
export class Engine {
  /** Load the model: loader.mjs describes the options. */
  static async load(options) {
    const engine = new Engine(), { network, model, level, threads } = await loadModel(options);
    Object.assign(engine, { network, model, level, threads, codec: await TextCodec.load(model, options.read), tokens: [], running: Promise.resolve() });
    engine.sight = model.vision === null ? null : new Sight(model);
    return engine;
  }

  /** End the threads. */
  close() { this.network.program.team?.close(); }

  /** The methods that a client may call. Each is an async generator of events: chunks if the body asks for a stream, else the whole answer. */
  get methods() {
    return {
      'chat.completions': (body, signal) => this.#chat(body, signal),
      completions: (body, signal) => this.#completion(body, signal),
      embeddings: (body, signal) => this.#embeddings(body, signal),
      'audio.transcriptions': (body, signal) => this.#transcript(body, 'transcribe', signal),
      'audio.translations': (body, signal) => this.#transcript(body, 'translate', signal),
    };
  }

  /**
   * Run a request after all earlier ones have ended, since memory holds only one sequence. A request that is aborted while it waits ends at
   * once. `onProgress({crops, all})` reports how many crops of images are encoded so far, and how many have to be encoded for the prompt.
   */
  async *run(method, body, signal, onProgress = () => {}) {
    const before = this.running;
    let done;
    const ended = new Promise((resolve) => { done = resolve; });
    this.running = before.then(() => ended);
    try {
      await unlessAborted(before, signal);
      this.#require(method);
      this.onProgress = onProgress;
      yield* this.methods[method](body, signal);
    } finally {
      done();
    }
  }

  /** Throw RequestError unless the model has what a method needs. */
  #require(method) {
    const { name, kind, embeds } = this.model, hears = kind === 'transcriber';
    if (hears !== method.startsWith('audio.')) throw new RequestError('model', hears ? `${name} transcribes speech; use audio.transcriptions.create` : `${name} hears no audio`);
    if (!hears && kind !== 'generator' && method !== 'embeddings') throw new RequestError('model', `${name} gives embeddings and generates no text; use embeddings.create`);
    if (!embeds && method === 'embeddings') {
      throw new RequestError('model', `${name} generates text and was not trained for embeddings; export it with --embeddings to use its hidden states as embeddings`);
    }
  }

  /** Answer a conversation. Yield chunks if the request asks for a stream, otherwise the whole answer. */
  async *#chat(body, signal) {
    const asked = parsed(body, this.model), { prompt, spans, text: written } = await this.#prompt(body.messages, asked.tools, pauses(signal));
    this.#requireRoom(prompt, 'messages');
    const head = { id: `chatcmpl-${crypto.randomUUID()}`, created: Math.floor(Date.now() / 1000), model: this.model.name };
    const chunk = (delta, reason = null, logprobs = null) => ({ ...head, object: 'chat.completion.chunk', choices: [{ index: 0, delta, finish_reason: reason, logprobs }] });
    const parser = asked.tools.length > 0 ? new ToolParser(this.model.tools, asked.tools.map((tool) => tool.function.name), asked.mostCalls) : null;
    const splitter = this.#splitter(written), answer = { content: '', reasoning: '', calls: [], count: 0, entries: [], reason: 'stop' };
    if (asked.stream) yield chunk({ role: 'assistant', content: '' });
    for await (const { text, entries, reason } of this.#generate(prompt, asked, signal, spans)) {
      const parts = partsOf(text, splitter, parser, Boolean(reason));
      const deltas = parts.map((part) => told(part, answer)), logprobs = entries.length > 0 ? { content: entries } : null;
      answer.count++;
      answer.entries.push(...entries);
      answer.reason = reason ?? answer.reason;
      if (logprobs && deltas.length === 0) deltas.push({ content: '' });
      if (asked.stream) for (const [i, delta] of deltas.entries()) yield chunk(delta, null, i === 0 ? logprobs : null);
      if (parser?.done) break;
    }
    if (answer.calls.length > 0 && answer.reason === 'stop') answer.reason = 'tool_calls';
    const usage = {
      prompt_tokens: prompt.length, completion_tokens: answer.count, total_tokens: prompt.length + answer.count,
      prompt_tokens_details: { cached_tokens: this.cached },
    };
    if (asked.stream) {
      yield chunk({}, answer.reason);
      if (asked.usage) yield { ...head, object: 'chat.completion.chunk', choices: [], usage };
      return;
    }
    const logprobs = asked.sampling.logprobs < 0 ? null : { content: answer.entries };
    const message = { role: 'assistant', content: answer.content === '' && answer.calls.length > 0 ? null : answer.content };
    if (answer.calls.length > 0) message.tool_calls = answer.calls;
    if (answer.reasoning !== '') message.reasoning_content = message.reasoning = answer.reasoning;
    yield { ...head, object: 'chat.completion', choices: [{ index: 0, message, finish_reason: answer.reason, logprobs }], usage };
  }

  /** Return what separates thoughts from the answer to a prompt, or null if the model writes none. */
  #splitter(prompt) {
    const { thoughts = null } = this.model, isOpen = thoughts !== null && areOpen(prompt, thoughts);
    return thoughts !== null && (thoughts.thinks || isOpen) ? new ThoughtSplitter(thoughts, isOpen) : null;
  }

  /** Return the tokens of a conversation's prompt, the places of crops of its images in them, and its text. */
  async #prompt(messages, tools, pause) {
    const { codec, sight } = this, text = codec.prompt(messages, tools);
    if (sight === null) return { prompt: codec.encode(text), spans: [], text };
    const pictures = await sight.pictures(messages, pause);
    const prompt = codec.encode(sight.written(text, pictures));
    return { prompt, spans: sight.spans(prompt, pictures), text };
  }

  /**
   * Continue a text. Yield chunks if the request asks for a stream, otherwise the whole answer. Throw RequestError for a parameter that is
   * wrong or not supported.
   */
  async *#completion(body, signal) {
    if (typeof body.prompt !== 'string') throw new RequestError('prompt', 'prompt has to be a string');
    if (body.tools) throw new RequestError('tools', 'tools are for chat.completions; leave them out');
    for (const name of ['logprobs', 'top_logprobs']) {
      if ((body[name] ?? false) !== false) throw new RequestError(name, `${name} is not supported for text completions in the browser; leave it out`);
    }
    const asked = parsed(body, this.model, COMPLETED), prompt = this.codec.encode(body.prompt, { special: true });
    this.#requireRoom(prompt, 'prompt');
    const head = { id: `cmpl-${crypto.randomUUID()}`, object: 'text_completion', created: Math.floor(Date.now() / 1000), model: this.model.name };
    let whole = '', count = 0, last = null;
    for await (const { text, reason } of this.#generate(prompt, asked, signal)) {
      whole += text;
      count++;
      last = reason ?? last;
      if (asked.stream && text !== '') yield { ...head, choices: [{ index: 0, text, finish_reason: null, logprobs: null }] };
    }
    const usage = { prompt_tokens: prompt.length, completion_tokens: count, total_tokens: prompt.length + count };
    yield { ...head, choices: [{ index: 0, text: asked.stream ? '' : whole, finish_reason: last, logprobs: null }], ...(asked.stream ? {} : { usage }) };
    if (asked.stream && asked.usage) yield { ...head, choices: [], usage };
  }

  /**
   * Embed texts. An encoder pools over the tokens of a text; for a decoder, the hidden state of the last token is the vector. Throw
   * RequestError for a wrong parameter, or for a text that is empty or too long.
   */
  async *#embeddings(body, signal) {
    const { texts, dimensions, normalize, format } = parsedEmbedding(body, this.model), data = [], pause = pauses(signal);
    let total = 0;
    for (const [index, text] of texts.entries()) {
      const tokens = this.codec.encode(text, { special: true }), { max_context: most } = this.model;
      if (tokens.length === 0) throw new RequestError('input', `input ${index} is empty`);
      if (tokens.length > most) throw new RequestError('input', `input ${index} has ${tokens.length} tokens; this export holds ${most}`);
      total += tokens.length;
      const vector = this.#vector(tokens), whole = normalize ? unit(vector) : vector;
      const cut = dimensions < whole.length ? whole.slice(0, dimensions) : whole, made = normalize && cut !== whole ? unit(cut) : cut;
      data.push({ object: 'embedding', index, embedding: format === 'base64' ? base64(made) : Array.from(made) });
      await pause();
    }
    yield { object: 'list', model: this.model.name, data, usage: { prompt_tokens: total, total_tokens: total } };
  }

  /** Return the vector of a text with these tokens. A decoder forgets its sequence for it. */
  #vector(tokens) {
    if (this.model.kind === 'encoder') return this.network.encode(tokens);
    this.network.reset();
    this.tokens = [];
    return this.network.append(tokens, { wants: 'hidden' });
  }

  /** Write down speech, or translate it into English, segment by segment. `file` has the samples, 16,000 per second. */
  async *#transcript(body, task, signal) {
    const { network, model, codec } = this, asked = parsedAudio(body, model, task);
    const pause = pauses(signal), recording = await Recording.of(body.file, model.speech.num_mels, pause);
    const prompt = asked.prompt === '' ? [] : codec.encode(` ${asked.prompt}`);
    const work = new Transcription(network, model, codec.pieces, { ...asked, task, prompt }, pause), segments = [];
    if (Object.keys(model.speech.tokens.languages).length > 0) work.asked.language ??= work.languageOf(recording);
    for await (const segment of work.segments(recording)) {
      segments.push({ id: segments.length, ...segment });
      if (asked.stream) yield { type: 'transcript.text.delta', delta: segments.length > 1 ? segment.text : segment.text.trimStart() };
    }
    const text = segments.map((segment) => segment.text).join('').trim(), usage = { type: 'duration', seconds: Math.ceil(recording.seconds) };
    if (asked.stream) yield { type: 'transcript.text.done', text, usage };
    else if (asked.format === 'text') yield `${text}\n`;
    else if (asked.format === 'json') yield { text, usage };
    else if (asked.format !== 'verbose_json') yield subtitles(segments, asked.format);
    else yield { task, language: model.speech.names[work.asked.language], duration: recording.seconds, text, usage, segments };
  }

  /**
   * Yield {text, entries, reason} for each token after a prompt: the text that is certain by now, the log-probabilities, if they are asked
   * for, of the tokens that have a part in the text so far, and why the answer ends here. `spans` are the places of crops in the prompt.
   */
  async *#generate(prompt, { sampling, stops, maxTokens }, signal, spans = []) {
    const { network: decoder, model } = this, room = model.max_context - prompt.length, pause = pauses(signal);
    const seen = new Map(prompt.map((token) => [token, 0])), text = new Detokenizer(this.codec.pieces, stops);
    const kept = this.cached = decoder.rewind(this.#shared(prompt, spans));
    this.tokens = this.tokens.slice(0, kept);
    decoder.spans = spans;
    const unseen = new Set(spans.filter(({ at, crop }) => crop.vectors === null && at + model.vision.num_tokens > kept).map(({ crop }) => crop));
    for (const [crops, crop] of [...unseen].entries()) {
      this.onProgress({ crops, all: unseen.size });
      decoder.see(crop);
      await pause();
    }
    let next = prompt.slice(kept);
    for (; next.length > model.max_tokens; next = next.slice(model.max_tokens)) {
      this.#append(next.slice(0, model.max_tokens), 'nothing');
      await pause();
    }
    let waiting = [];   // log-probabilities of tokens whose text is not certain yet; those behind a stop string are never told
    for (let count = 1; ; count++) {
      this.#append(next, 'logits');
      const { token, logprob } = decoder.draw(sampling, seen), begin = text.length + text.held.length;
      seen.set(token, (seen.get(token) ?? 0) + 1);
      if (logprob) waiting.push({ begin, entry: this.#named(token, logprob) });
      const isEnd = model.eos_ids.includes(token), certain = isEnd ? '' : text.push(token);
      const reason = isEnd || text.stopped ? 'stop' : count >= Math.min(maxTokens, room) ? 'length' : undefined, isWhole = reason && !text.stopped;
      const settled = waiting.filter((one) => isWhole || one.begin < text.length);
      waiting = waiting.slice(settled.length);
      yield { text: certain + (isWhole ? text.finish() : ''), entries: settled.map(({ entry }) => entry), reason };
      if (reason) return;
      next = [token];
      await pause();
    }
  }

  /** Throw RequestError if a prompt has no tokens, or leaves no room for an answer. */
  #requireRoom({ length }, param) {
    const { max_context: most } = this.model;
    if (length === 0) throw new RequestError(param, `${param} is empty; expected at least one token`);
    if (length >= most) throw new RequestError(param, `the prompt has ${length} tokens; this export holds ${most}, answer included`);
  }

  /** Append tokens to the sequence, and remember them. */
  #append(tokens, wants) {
    this.network.append(tokens, { wants });
    this.tokens.push(...tokens);
  }

  /** Return how many tokens, with the same crops, a prompt shares with the beginning of the last sequence. At least one token is left to compute. */
  #shared(prompt, spans) {
    const keys = (known) => new Map(known.map(({ at, crop }) => [at, crop.key])), [before, now] = [this.network.spans, spans].map(keys);
    const isSame = (at) => this.tokens[at] === prompt[at] && before.get(at) === now.get(at);
    let length = 0;
    while (length < prompt.length - 1 && isSame(length)) length++;
    return length;
  }

  /** Return the log-probabilities of a token and its alternatives as the API shows them. */
  #named(token, { logprob, top }) {
    const named = (id, value) => ({ ...this.codec.named(id), logprob: value });
    return { ...named(token, logprob), top_logprobs: top.map((other) => named(other.token, other.logprob)) };
  }
}

/** Return the parts of a piece of an answer: thoughts, content and calls. The thoughts have no calls. Both readers may be null. */
function partsOf(text, splitter, parser, isLast) {
  const pieces = splitter === null ? (text === '' ? [] : [{ content: text }]) : [...splitter.push(text), ...(isLast ? splitter.finish() : [])];
  if (parser === null) return pieces;
  return [...pieces.flatMap((part) => (part.content === undefined ? [part] : parser.push(part.content))), ...(isLast ? parser.finish() : [])];
}

/** Add a part to the whole answer, and return it as a delta. */
function told(part, answer) {
  if (part.reasoning !== undefined) {
    answer.reasoning += part.reasoning;
    return { reasoning_content: part.reasoning, reasoning: part.reasoning };
  }
  if (part.content !== undefined) {
    answer.content += part.content;
    return { content: part.content };
  }
  const { call: index, id, name } = part;
  if (name !== undefined) {
    answer.calls.push({ id, type: 'function', function: { name, arguments: '' } });
    return { tool_calls: [{ index, id, type: 'function', function: { name, arguments: '' } }] };
  }
  answer.calls[index].function.arguments += part.arguments;
  return { tool_calls: [{ index, function: { arguments: part.arguments } }] };
}

/** Scale a vector to length 1. */
function unit(vector) {
  const length = Math.fround(Math.max(Math.sqrt(vector.reduce((total, x) => total + x * x, 0)), 1e-12));
  return vector.map((x) => x / length);
}

const base64 = (vector) => btoa(Array.from(new Uint8Array(vector.buffer, vector.byteOffset, vector.byteLength), (byte) => String.fromCharCode(byte)).join(''));
