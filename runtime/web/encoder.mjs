// An encoder in memory: it takes the tokens of one text and computes the text's vector.

import { Program, align, sizeOf } from './program.mjs';

/** An encoder with the inputs of its program. */
export class Encoder {
  /** `description`: the part `model` of program.json. */
  static async load(flat, module, description, threads) {
    const encoder = new Encoder(), { max_context: most } = encoder.description = description;
    const { inputs } = flat.functions[description.entry];
    const shapeOf = ({ name }) => (name === 'starts' ? [2] : [most]);
    const bytes = inputs.reduce((total, input) => total + align(sizeOf(input.dtype, shapeOf(input))), 0);
    encoder.program = await Program.load(flat, module, bytes, threads);
    encoder.inputs = inputs.map((input) => encoder.program.tensor(input.dtype, shapeOf(input)));
    return encoder;
  }

  /** Return the vector of a text with these tokens. Throw RangeError if there are none or too many. */
  encode(tokens) {
    const { program, description: { entry, max_context: most } } = this, count = tokens.length;
    if (count < 1 || count > most) throw new RangeError(`the text has ${count} tokens; this export takes 1 to ${most}`);
    const values = { tokens, positions: tokens.map((_, i) => i), text_ids: tokens.map(() => 0), segments: tokens.map(() => 0), starts: [0, count] };
    const arrays = program.description.functions[entry].inputs.map(({ name }, i) => {
      program.view(this.inputs[i], Int32Array).set(values[name]);
      return { ...this.inputs[i], shape: [values[name].length] };
    });
    const [vectors] = program.call(entry, arrays);
    return program.view(vectors, Float32Array).slice();
  }
}
