// A speech model in memory: a decoder that attends to a piece of audio, which it hears before the first token of a sequence.
// compiler/frontend/hearing.py describes the arguments of `hear`.

import { Decoder } from './decoder.mjs';

const PAGE = 1;   // the page of what is heard; page 0 is padding

/** A decoder with the encoder of a speech model. */
export class Listener extends Decoder {
  static further(flat, { speech }) {
    const { num_hops: hops, num_frames: frames, hop, around } = speech;
    const shapes = { samples: [hop * hops + around], loudest: [1, 1], sounding: [hops, 1], slots: [frames] };
    return flat.functions.hear.inputs.filter(({ name }) => name in shapes).map((input) => [{ ...input, name: `hear.${input.name}` }, shapes[input.name]]);
  }

  static async load(...known) {
    const listener = await super.load(...known), { program, named, description: { speech, page_size: page } } = listener;
    program.view(named.heard_pages, Int32Array)[0] = PAGE;
    const first = PAGE * Math.ceil(speech.num_frames / page) * page;
    program.view(named['hear.slots'], Int32Array).forEach((_, i, slots) => { slots[i] = first + i; });
    return listener;
  }

  /** Hear a piece of audio: `hops` hops with the samples around them. The sequence begins anew. */
  hear({ samples, hops, loudest }) {
    const { program, named } = this, view = (name) => program.view(named[`hear.${name}`], Float32Array);
    view('samples').fill(0).set(samples);
    view('loudest')[0] = loudest;
    view('sounding').forEach((_, i, sounding) => { sounding[i] = i < hops ? 1 : 0; });
    program.call('hear', program.description.functions.hear.inputs.map(({ name }) => named[`hear.${name}`] ?? named[name]));
    this.reset();
  }

  /** Return the logits after the last token. */
  row() { return this.program.view(this.logits, Float32Array); }

  /** Return the probability of a token after the last one. */
  probability(token) {
    const row = this.row(), top = row.reduce((most, x) => Math.max(most, x), -Infinity);
    return Math.exp(row[token] - top) / row.reduce((total, x) => total + Math.exp(x - top), 0);
  }
}
