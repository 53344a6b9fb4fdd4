// Normalise texts by the table of a sentencepiece model, as the package tokenizers does. The module of npm does not read the table: it
// normalises every text to NFKC.
//
// A table has two parts: a double array (darts-clone), which finds a text by its bytes, and the texts that replace the found texts, each
// ended by a zero.

const LONGEST = 5;   // a character with its marks is looked up as a whole if it has at most this many bytes, otherwise by code points

/** Let the normalisers of a tokenizer that have a table use it. */
export function useTables(normalizer) {
  if (normalizer?.charsmap) {
    const table = new Table(normalizer.charsmap);
    normalizer.normalize = (text) => table.normalized(text);
  }
  for (const part of normalizer?.normalizers ?? []) useTables(part);
}

/** The table of a sentencepiece model, from its text in base64. */
class Table {
  #encoder = new TextEncoder();
  #decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  #graphemes = new Intl.Segmenter('en', { granularity: 'grapheme' });

  constructor(base64) {
    const bytes = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0)), view = new DataView(bytes.buffer), size = view.getUint32(0, true);
    this.units = Uint32Array.from({ length: size / 4 }, (_, i) => view.getUint32(4 + 4 * i, true));
    this.texts = bytes.subarray(4 + size);
  }

  /** Return a text with each character, or character with its marks, replaced as the table says. */
  normalized(text) {
    let found = '';
    for (const { segment } of this.#graphemes.segment(text)) {
      const whole = this.#encoder.encode(segment).length <= LONGEST ? this.#replaced(segment) : null;
      found += whole ?? Array.from(segment, (point) => this.#replaced(point) ?? point).join('');
    }
    return found;
  }

  /** Return the text that replaces the shortest beginning of a text that the table has, or null. */
  #replaced(text) {
    let at = offsetOf(this.units[0]);
    for (const byte of this.#encoder.encode(text)) {
      at ^= byte;
      const unit = this.units[at];
      if (byte === 0 || labelOf(unit) !== byte) return null;
      at ^= offsetOf(unit);
      if (hasValue(unit)) return this.#textAt(this.units[at] & 0x7fffffff);
    }
    return null;
  }

  #textAt(begin) { return this.#decoder.decode(this.texts.subarray(begin, this.texts.indexOf(0, begin))); }
}

const offsetOf = (unit) => (unit >>> 10) << ((unit & 0x200) >>> 6);
const labelOf = (unit) => (unit & 0x800000ff) >>> 0;
const hasValue = (unit) => (unit >>> 8 & 1) === 1;
