// Convert text to tokens and back: the model's tokenizer and chat template, and the bytes that each token stands for.

import { useTables } from './charsmap.mjs';
import { forTemplate, inOnlyParts, withSystem, withWrittenArguments, withoutEmptyContent } from './messages.mjs';
import { RequestError } from './request.mjs';
import { forms } from './roles.mjs';
import { useUnicode } from './spaces.mjs';
import { TemplateRejection } from './statements.mjs';
import { Template } from './template.mjs';
import { overlap } from './tools.mjs';
import { Tokenizer } from './vendor/tokenizers.mjs';

/** The tokenizer and the chat template of a model. */
export class TextCodec {
  constructor(model, tokenizer, pieces) {
    this.model = model;
    this.tokenizer = new Tokenizer(tokenizer, {});
    useTables(this.tokenizer.normalizer);
    useUnicode(this.tokenizer, tokenizer);
    if (tokenizer.model.type === 'Unigram' && tokenizer.model.byte_fallback) addBytes(this.tokenizer.model);
    const { chat_template: plain, tool_template: tools } = model;
    this.template = plain === null ? null : templateOf(plain);
    this.toolTemplate = tools === null ? this.template : templateOf(tools);
    this.pieces = cutPieces(pieces, model.vocab_size);
    this.added = new Map((tokenizer.added_tokens ?? []).map(({ id, content }) => [id, content]));
  }

  static async load(model, read) {
    const [tokenizer, pieces] = await Promise.all([read('tokenizer.json'), read('pieces.bin')]);
    return new TextCodec(model, JSON.parse(new TextDecoder().decode(tokenizer)), pieces);
  }

  /** Return the text of a token, also of a special one, and its bytes. Bytes that are a part of a character stand as \xNN behind "bytes:", as in the server's answers. */
  named(id) {
    const piece = this.pieces[id], bytes = piece.length > 0 ? piece : new TextEncoder().encode(this.added.get(id) ?? '');
    try {
      return { token: new TextDecoder('utf-8', { ignoreBOM: true, fatal: true }).decode(bytes), bytes: [...bytes] };
    } catch {
      return { token: `bytes:${Array.from(bytes, (byte) => `\\x${byte.toString(16).padStart(2, '0')}`).join('')}`, bytes: [...bytes] };
    }
  }

  /** Return the tokens of a text. `special`: with the special tokens that the tokenizer adds. */
  encode(text, { special = false } = {}) {
    return this.tokenizer.encode(text, { add_special_tokens: special }).ids;
  }

  /**
   * Render the prompt of a conversation, with the marker in the place of each image. The template writes special tokens itself. Throw an
   * error if the model has no template.
   */
  prompt(messages, tools = []) {
    if (this.template === null) throw new Error(`${this.model.name} has no chat template; use completions`);
    const { vision, reads_parts: readsParts, tests_none: testsNone, special_tokens: names, defaults, writes_calls: writesCalls } = this.model;
    const hasTools = tools.length > 0, template = hasTools ? this.toolTemplate : this.template, inParts = readsParts[Number(hasTools)];
    const found = withSystem(forTemplate(messages, { marker: vision?.marker ?? null, writesCalls }), defaults);
    const variables = { ...names, ...defaults.thinking, tools: hasTools ? tools : null, add_generation_prompt: true };
    const tried = (form) => {
      const read = testsNone[Number(hasTools)] ? form.map(withoutEmptyContent) : form;
      return rendered(template, inParts ? read.map(inOnlyParts) : read, variables);
    };
    try { return firstAccepted(found, tried); } catch (error) {
      throw new RequestError('messages', `the chat template refused the messages: ${error.message}`);
    }
  }
}

/** Return the prompt of a conversation or, if the template refuses it, of the first of its forms that the template accepts. */
function firstAccepted(messages, tried) {
  try { return tried(messages); } catch (refusal) {
    if (!(refusal instanceof TemplateRejection)) throw refusal;
    for (const form of forms(messages)) {
      try { return tried(form); } catch { /* the caller does not know this form */ }
    }
    throw refusal;
  }
}

/** Return a chat template. One that the browser cannot read refuses all messages; completions do not need it. */
function templateOf(source) {
  try { return new Template(source); } catch ({ message }) {
    return { render() { throw new Error(`the browser cannot read it: ${message}`); } };
  }
}

/**
 * Render messages. If that throws a TypeError, try again with the arguments of calls as JSON text, as the server does.
 */
function rendered(template, messages, names) {
  try {
    return template.render({ ...names, messages });
  } catch (error) {
    const written = error instanceof TypeError ? withWrittenArguments(messages) : null;
    if (written === null) throw error;
    return rendered(template, written, names);
  }
}

/** Let a unigram model write a piece that is no token as the tokens of its bytes. The module of npm does so only for BPE. */
function addBytes(model) {
  const encode = model.encode.bind(model), bytesOf = new TextEncoder();
  model.encode = (words) => encode(words).flatMap((piece) => {
    if (model.tokens_to_ids.has(piece)) return [piece];
    const bytes = Array.from(bytesOf.encode(piece), (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, '0')}>`);
    return bytes.every((byte) => model.tokens_to_ids.has(byte)) ? bytes : [piece];
  });
}

/** Return the bytes of each token. The file has the lengths as 16-bit integers, followed by the bytes of all tokens. */
function cutPieces(bytes, count) {
  const lengths = new DataView(bytes.buffer, bytes.byteOffset, 2 * count), pieces = [];
  for (let i = 0, at = 2 * count; i < count; i++) {
    const length = lengths.getUint16(2 * i, true);
    pieces.push(bytes.subarray(at, at += length));
  }
  return pieces;
}

/** Converts tokens of one answer to text. It never emits half a character, a beginning of a stop string, or text after a stop string. */
export class Detokenizer {
  constructor(pieces, stops = []) {
    this.pieces = pieces;
    this.stops = stops.filter((stop) => stop !== '');
    this.decoder = new TextDecoder('utf-8', { ignoreBOM: true });
    this.held = '';
    this.length = 0;   // of the text returned so far
    this.stopped = false;
  }

  /** Add a token, and return the text that is certain by now. */
  push(token) {
    const pending = this.held + this.decoder.decode(this.pieces[token], { stream: true });
    const ends = this.stops.map((stop) => [pending.indexOf(stop), stop]).filter(([at]) => at >= 0);
    if (ends.length > 0) {
      const [[begin]] = ends.sort(([a, x], [b, y]) => a + x.length - b - y.length || a - b);
      this.stopped = true;
      this.held = '';
      this.length += begin;
      return pending.slice(0, begin);
    }
    const keep = Math.max(0, ...this.stops.map((stop) => overlap(pending, stop))), certain = pending.length - keep;
    this.held = pending.slice(certain);
    this.length += certain;
    return pending.slice(0, certain);
  }

  /** Return the text that was held back because it could have begun a stop string. */
  finish() {
    const text = this.held;
    this.held = '';
    this.length += text.length;
    return text;
  }
}
