// A vision model in memory: a decoder that reads rows in the places of image tokens. compiler/frontend/squares.py describes the program `see`,
// which encodes a crop as rows.

import { Decoder } from './decoder.mjs';

/** A decoder with the encoder of a vision model. */
export class Seer extends Decoder {
  static further(flat, { vision: { crop_size: edge, num_places: places } }) {
    const shapes = { pixels: [1, edge, 3 * edge], crop_ids: [places], starts: [2] };
    return flat.functions.see.inputs.filter(({ name }) => name in shapes).map((input) => [{ ...input, name: `see.${input.name}` }, shapes[input.name]]);
  }

  /** Encode a crop: set its `vectors` to its rows, and drop its pixels, which are not needed any more. */
  see(crop) {
    const { program, named, description: { vision } } = this;
    program.view(named['see.pixels'], Uint8Array).set(crop.pixels);
    program.view(named['see.crop_ids'], Int32Array).fill(0);
    program.view(named['see.starts'], Int32Array).set([0, vision.num_places]);
    const [rows] = program.call('see', program.description.functions.see.inputs.map(({ name }) => named[`see.${name}`]));
    crop.vectors = program.view(rows, Float32Array).slice();
    crop.pixels = null;
  }

  look(start, count) {
    const { program, named, description: { hidden_size: size, vision: { num_tokens: tokens } } } = this;
    const places = program.view(named.seen_at, Int32Array), rows = program.view(named.seen_rows, Float32Array);
    let found = 0;
    for (const { at, crop } of this.spans) {
      const begin = Math.max(at, start), end = Math.min(at + tokens, start + count);
      if (begin >= end) continue;
      rows.set(crop.vectors.subarray((begin - at) * size, (end - at) * size), found * size);
      for (let position = begin; position < end; position++) places[found++] = position - start;
    }
    return found;
  }
}
