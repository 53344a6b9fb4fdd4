// A decoder in memory. It takes the tokens of one sequence, computes logits, and draws tokens from them with the compiled sampler. Without a
// head for logits it only computes hidden states. runtime/step_arguments.py describes the arguments of a step;
// runtime/sampling.py and compiler/sampling/meaning.py describe the sampler's columns.

import { Program, align, sizeOf } from './program.mjs';

const SHARE_ONE = 2 ** 30, WEIGHT_BITS = 40, SHARPEST = 1e30;
const NOT_A_NUMBER = -1;

/** Return the name of an input without the number of its cache group. Groups after the first append their number. */
const kindOf = (name) => name.replace(/\d+$/, '');

/** Default sampling parameters, the same as the server's. */
export const SAMPLING = {
  temperature: 1, top_p: 1, top_k: 0, min_p: 0, typical_p: 1, seed: 0n,
  repetition_penalty: 1, frequency_penalty: 0, presence_penalty: 0, logit_bias: {}, logprobs: -1,
};

/** A decoder with the pages of one sequence, and its sampler if it generates text. Subclasses hear or see, too. */
export class Decoder {
  /** `description`: the part `model` of program.json. */
  static async load(flat, module, description, threads) {
    const decoder = new this();
    const { max_tokens, max_context, page_size, vocab_size, hidden_size } = decoder.description = description;
    const most = Math.ceil(max_context / page_size), entry = flat.functions[description.entry];
    const shapes = {
      tokens: [max_tokens], positions: [max_tokens], slots: [max_tokens], seq_ids: [max_tokens],
      page_tables: [1, most], logit_rows: [1], hidden_rows: [1], seen_at: [max_tokens], seen_rows: [max_tokens, hidden_size],
      heard_pages: [1], starts: [2], saved: [Math.ceil(max_tokens / page_size) + 1], sources: [1], saved_pages: [Math.ceil(max_tokens / page_size) + 1],
    };
    const shapeOf = (name) => description.cache_shapes[name] ?? shapes[kindOf(name)];
    const sampler = {
      rows: [1], numbers: [1, 5], settings: [1, 9], bias_starts: [2], bias_ids: [vocab_size], bias_values: [vocab_size],
      seen_starts: [2], seen_ids: [vocab_size], seen_counts: [vocab_size], masks: [1, Math.ceil(vocab_size / 32)],
    };
    const drawn = flat.functions.sample?.inputs.slice(1) ?? [];   // a model that only embeds has no sampler
    const wanted = [...entry.inputs.map((i) => [i, shapeOf(i.name)]), ...drawn.map((i) => [i, sampler[i.name]]), ...this.further(flat, description)];
    const bytes = wanted.reduce((total, [input, shape]) => total + align(sizeOf(input.dtype, shape)), 0);
    const program = decoder.program = await Program.load(flat, module, bytes, threads);
    const made = wanted.map(([input, shape]) => program.tensor(input.dtype, shape));
    decoder.inputs = made.slice(0, entry.inputs.length);
    decoder.samplerInputs = made.slice(entry.inputs.length, entry.inputs.length + drawn.length);
    decoder.named = Object.fromEntries(wanted.map(([input], i) => [input.name, made[i]]));
    for (const table of decoder.#inputs('page_tables')) {
      table.forEach((_, page) => { table[page] = page + 1; });   // page 0 is padding
    }
    if (decoder.hasHead) program.view(decoder.named.rows, Int32Array)[0] = 0;
    decoder.reset();
    return decoder;
  }

  /** Return the inputs of functions beside the step and the sampler, with their shapes. */
  static further() { return []; }

  /** Write which tokens of a step read rows in place of their embeddings, and these rows. Return the number of these tokens: 0 without images. */
  look() { return 0; }

  get hasHead() { return this.named.rows !== undefined; }

  get keepsStates() { return this.named.saved !== undefined; }

  /** Return views of the inputs of a kind, one for each cache group. */
  #inputs(kind) {
    return Object.entries(this.named).filter(([name]) => kindOf(name) === kind).map(([, tensor]) => this.program.view(tensor, Int32Array));
  }

  /** Forget the sequence. The caller then sets `spans`, the crops of images of the next sequence, in ascending order: {at, crop} is a crop from position `at` on. */
  reset() { Object.assign(this, { length: 0, spans: [] }); }

  /** Cut the sequence to at most `length` tokens and return how many are left. States are kept only after full pages and after the last token. */
  rewind(length) {
    const { page_size: page } = this.description;
    if (length < this.length) this.length = this.keepsStates ? Math.floor(length / page) * page : length;
    return this.length;
  }

  /**
   * Append tokens to the sequence. `wants` says what to compute for the last one: `logits`, which stay in memory until the next call, `hidden`,
   * the hidden state, which is returned, or `nothing`. Throw RangeError if there is no token, or no room for all.
   */
  append(tokens, { wants = 'logits' } = {}) {
    const { max_tokens, max_context } = this.description;
    if (tokens.length === 0) throw new RangeError('append takes at least one token');
    if (this.length + tokens.length > max_context) {
      throw new RangeError(`the sequence would have ${this.length + tokens.length} tokens; this export holds ${max_context}`);
    }
    let outputs;
    for (let begin = 0; begin < tokens.length; begin += max_tokens) {
      const part = tokens.slice(begin, begin + max_tokens), isLast = begin + max_tokens >= tokens.length;
      outputs = this.#step(part, isLast ? wants : 'nothing');
    }
    this.logits = outputs[0];
    return wants === 'hidden' ? this.program.view(outputs[outputs.length - 1], Float32Array).slice() : undefined;
  }

  /** Compute a step of at most `max_tokens` tokens, and return its outputs. For `wants` see `append`. */
  #step(tokens, wants) {
    const { program, named, description: { page_size, entry, hidden_size } } = this, count = tokens.length, start = this.length;
    const [ids, positions, sequences] = ['tokens', 'positions', 'seq_ids'].map((name) => program.view(named[name], Int32Array));
    for (let i = 0; i < count; i++) {
      ids[i] = tokens[i];
      positions[i] = start + i;
      sequences[i] = 0;
    }
    for (const slots of this.#inputs('slots')) for (let i = 0; i < count; i++) slots[i] = page_size + start + i;
    for (const name of ['logit_rows', 'hidden_rows']) if (named[name]) program.view(named[name], Int32Array)[0] = count - 1;
    const saved = this.keepsStates ? this.#states(start, count) : 0, hasLogits = this.hasHead ? wants === 'logits' : wants === 'hidden';
    const seen = this.look(start, count);
    this.length += count;
    const used = {
      tokens: [count], positions: [count], slots: [count], seq_ids: [count], page_tables: [1, Math.ceil(this.length / page_size)],
      logit_rows: [hasLogits ? 1 : 0], hidden_rows: [wants === 'hidden' ? 1 : 0], saved: [saved], saved_pages: [saved],
      seen_at: [seen], seen_rows: [seen, hidden_size],
    };
    const { inputs } = program.description.functions[entry];
    return program.call(entry, this.inputs.map((tensor, i) => ({ ...tensor, shape: used[kindOf(inputs[i].name)] ?? tensor.shape })));
  }

  /** Write where the step reads the state before its tokens, and where it saves the state after the last token of each page. Return the number of saved states. */
  #states(start, count) {
    const { program, named, description: { page_size: page } } = this, saved = [];
    for (let i = 0; i < count; i++) if ((start + i) % page === page - 1 || i === count - 1) saved.push(i);
    program.view(named.starts, Int32Array).set([0, count]);
    program.view(named.saved, Int32Array).set(saved);
    for (const sources of this.#inputs('sources')) sources[0] = start === 0 ? 0 : 1 + Math.floor((start - 1) / page);
    for (const pages of this.#inputs('saved_pages')) pages.set(saved.map((i) => 1 + Math.floor((start + i) / page)));
    return saved.length;
  }

  /**
   * Draw a token from the logits of the last `append`. `seen` maps each token of the sequence to how often it was drawn (0: only in the
   * prompt). `mask`, if given, has a 1 for each token that may be drawn. Return {token, logprob}; `logprob` is null unless the settings ask for
   * it. Throw an error if no token can be drawn.
   */
  draw(settings = {}, seen = new Map(), mask = null) {
    const { program, named } = this, asked = { ...SAMPLING, ...settings };
    const view = (name, Type) => program.view(named[name], Type);
    const sharpness = asked.temperature > 0 ? Math.min(1 / asked.temperature, SHARPEST) : 0;
    const reach = asked.min_p > 0 ? -Math.log(asked.min_p) : Infinity;
    view('numbers', Float32Array).set([sharpness, reach, asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty]);
    const share = (p) => BigInt(Math.min(Math.round(p * SHARE_ONE), SHARE_ONE));
    const seed = BigInt.asIntN(64, BigInt(asked.seed));
    view('settings', BigInt64Array).set([
      seed, BigInt(this.length), 0n, BigInt(asked.top_k), share(asked.top_p), share(asked.typical_p), mask === null ? -1n : 0n, BigInt(asked.logprobs), 0n,
    ]);
    const bias = Object.entries(asked.logit_bias), counted = this.#penalises(asked) ? [...seen] : [];
    this.#list('bias', bias.map(([id, value]) => [Number(id), value]), 'bias_values', Float32Array);
    this.#list('seen', counted, 'seen_counts', Int32Array);
    if (mask !== null) this.#pack(mask);
    const lengths = { bias_ids: bias.length, bias_values: bias.length, seen_ids: counted.length, seen_counts: counted.length };
    const { inputs } = program.description.functions.sample;
    const arrays = this.samplerInputs.map((tensor, i) => {
      const { name } = inputs[i + 1], length = lengths[name];
      if (name === 'masks') return { ...tensor, shape: [mask === null ? 0 : 1, tensor.shape[1]] };
      return length === undefined ? tensor : { ...tensor, shape: [length] };
    });
    const [tokens, ...found] = program.call('sample', [this.logits, ...arrays]);
    const token = program.view(tokens, Int32Array)[0];
    if (token < 0) throw new Error(token === NOT_A_NUMBER ? 'the model computed a logit that is NaN or positive infinity' : 'no token is left to draw');
    return { token, logprob: asked.logprobs < 0 ? null : this.#logprob(found) };
  }

  /** Write a mask as one bit per token. */
  #pack(mask) {
    const words = this.program.view(this.named.masks, Int32Array).fill(0);
    for (let i = 0; i < mask.length; i++) if (mask[i]) words[i >> 5] |= 1 << (i & 31);
  }

  #penalises({ repetition_penalty, frequency_penalty, presence_penalty }) {
    return repetition_penalty !== 1 || frequency_penalty !== 0 || presence_penalty !== 0;
  }

  /** Write a list of [token, value] pairs to the inputs of the sampler. */
  #list(name, pairs, values, Type) {
    this.program.view(this.named[`${name}_starts`], Int32Array).set([0, pairs.length]);
    this.program.view(this.named[`${name}_ids`], Int32Array).set(pairs.map(([id]) => id));
    this.program.view(this.named[values], Type).set(pairs.map(([, value]) => value));
  }

  /** Convert distances to log-probabilities. A distance is the largest logit minus the token's logit; the most probable token has weight 2^WEIGHT_BITS. */
  #logprob([distances, totals, , topIds, topDistances]) {
    const { program } = this;
    const normaliser = Math.log(Number(program.view(totals, BigInt64Array)[0])) - WEIGHT_BITS * Math.log(2);
    const ids = program.view(topIds, Int32Array), far = program.view(topDistances, Float32Array);
    const top = [...ids].flatMap((id, i) => (id < 0 ? [] : [{ token: id, logprob: -far[i] - normaliser }]));
    return { logprob: -program.view(distances, Float32Array)[0] - normaliser, top };
  }
}
