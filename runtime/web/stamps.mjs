// Whisper's rules for time stamps, as server/constraints/stamps.py has them: a transcript begins with a stamp; stamps come in pairs, except
// the last; they never go back; and a stamp is drawn where all stamps together are more probable than every other token.

export const STAMP_S = 0.02;
const MOST_FIRST_S = 1;   // the first segment of a window begins within this time

/** The tokens that may follow those drawn so far in a window. */
export class Stamps {
  constructor({ end, no_stamps: before, banned }, vocabSize) {
    Object.assign(this, { end, first: before + 1, banned, vocabSize, drawn: [], latest: before + 1, allowed: new Uint8Array(vocabSize) });
  }

  /** Take note of a token that was drawn. */
  advance(token) {
    this.drawn.push(token);
    if (this.#isStamp(token)) this.latest = token;
  }

  /** Return a 1 for each token that may be drawn from these logits. */
  mask(logits) {
    const { allowed, first } = this;
    this.#follow();
    for (const token of this.banned) allowed[token] = 0;
    let top = -Infinity, other = -Infinity, total = 0, some = false, others = false;
    for (let i = 0; i < this.vocabSize; i++) {
      if (!allowed[i]) continue;
      if (i < first) [others, other] = [true, Math.max(other, logits[i])];
      else [some, top] = [true, Math.max(top, logits[i])];
    }
    for (let i = first; i < this.vocabSize; i++) if (allowed[i]) total += Math.exp(logits[i] - top);
    if (some && others && top + Math.log(total) > other) allowed.fill(0, 0, first);
    return allowed;
  }

  /**
   * Allow the tokens that the order of stamps allows. The first token is a stamp, at most MOST_FIRST_S after 0. After a stamp that begins a
   * segment, no stamp may follow. After a stamp that ends a segment, no text may follow, and a stamp must have the same time or a later
   * one. After text, a stamp must have a later time than the last one.
   */
  #follow() {
    const { allowed, drawn, first, end } = this;
    allowed.fill(1);
    if (drawn.length === 0) {
      allowed.fill(0, 0, first).fill(0, first + Math.round(MOST_FIRST_S / STAMP_S) + 1);
      return;
    }
    const ends = this.#isStamp(drawn.at(-1)), began = drawn.length < 2 || this.#isStamp(drawn.at(-2));
    if (ends && began) allowed.fill(0, first);
    else if (ends) allowed.fill(0, 0, end);
    allowed.fill(0, first, ends && !began ? this.latest : this.latest + 1);
  }

  #isStamp(token) { return token >= this.first; }
}
