// Convert text to tokens and back: the model's tokenizer and chat template, and the bytes that each token stands for.

import { useTables } from './charsmap.mjs';
import { forTemplate, withSystem } from './messages.mjs';
import { overlap } from './tools.mjs';
import { Tokenizer } from './vendor/tokenizers.mjs';
import { Template } from './vendor/jinja.mjs';

/** The tokenizer and the chat template of a model. */
export class TextCodec {
  constructor(model, tokenizer, pieces) {
    this.model = model;
    this.tokenizer = new Tokenizer(tokenizer, {});
    useTables(this.tokenizer.normalizer);
    if (tokenizer.model.type === 'Unigram' && tokenizer.model.byte_fallback) addBytes(this.tokenizer.model);
    const { chat_template: plain, tool_template: tools } = model;
    this.template = plain === null ? null : new Template(plain);
    this.toolTemplate = tools === null ? this.template : new Template(tools);
    this.pieces = cutPieces(pieces, model.vocab_size);
  }

  static async load(model, read) {
    const [tokenizer, pieces] = await Promise.all([read('tokenizer.json'), read('pieces.bin')]);
    return new TextCodec(model, JSON.parse(new TextDecoder().decode(tokenizer)), pieces);
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
    const { vision, reads_parts: [plain, withTools], special_tokens: names, defaults } = this.model;
    const hasTools = tools.length > 0, template = hasTools ? this.toolTemplate : this.template, inParts = hasTools ? withTools : plain;
    const read = withSystem(forTemplate(messages, { marker: vision?.marker ?? null, inParts }), defaults, inParts);
    return template.render({ ...names, ...defaults.thinking, messages: read, tools: hasTools ? tools : null, add_generation_prompt: true });
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
      return pending.slice(0, begin);
    }
    const keep = Math.max(0, ...this.stops.map((stop) => overlap(pending, stop)));
    this.held = pending.slice(pending.length - keep);
    return pending.slice(0, pending.length - keep);
  }

  /** Return the text that was held back because it could have begun a stop string. */
  finish() {
    const text = this.held;
    this.held = '';
    return text;
  }
}
