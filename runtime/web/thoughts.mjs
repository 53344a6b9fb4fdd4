// Split an answer into thoughts and content while it streams, as ThoughtSplitter in server/text/dialects/thoughts.py does.

import { stripped } from './methods.mjs';
import { overlap } from './tools.mjs';

/** Return whether a prompt ends with the opening of a block of thoughts. */
export function areOpen(prompt, { begin }) {
  const [written, opening] = [prompt, begin].map((text) => stripped(text, '\n', false));
  return written.endsWith(opening);
}

/**
 * Yields the parts {reasoning} and {content} of one answer. A block of thoughts is one only at the beginning of the answer, or if the prompt
 * has opened it (`inside`). Line ends behind a marker are dropped.
 */
export class ThoughtSplitter {
  #held = '';   // it may be the beginning of a marker

  constructor({ begin, closing }, inside) {
    Object.assign(this, { begin, closing, inside, isBegun: inside, isBehindMarker: inside });
  }

  /** Take more text of the answer, and return the parts that are certain by now. */
  push(more) {
    const parts = [], { begin, closing } = this;
    let text = this.#held + more;
    this.#held = '';
    if (!this.isBegun) {
      const rest = stripped(text, null, true, false);
      if (!rest.startsWith(begin) && begin.startsWith(rest)) {
        this.#held = text;
        return parts;
      }
      this.isBegun = true;
      if (rest.startsWith(begin)) {
        this.inside = this.isBehindMarker = true;
        text = rest.slice(begin.length);
      }
    }
    if (this.inside) {
      const at = text.indexOf(closing), end = at < 0 ? text.length - overlap(text, closing) : at, thought = this.#behindMarker(text.slice(0, end));
      if (thought !== '') parts.push({ reasoning: thought });
      if (at < 0) {
        this.#held = text.slice(end);
        return parts;
      }
      this.inside = false;
      this.isBehindMarker = true;
      text = text.slice(at + closing.length);
    }
    const content = this.#behindMarker(text);
    if (content !== '') parts.push({ content });
    return parts;
  }

  /** Return the text that was held back: a thought inside the block, otherwise content. */
  finish() {
    const text = this.#held;
    this.#held = '';
    return text === '' ? [] : [this.inside ? { reasoning: text } : { content: text }];
  }

  /** Return a text without line ends at its beginning, if it follows a marker. */
  #behindMarker(text) {
    if (!this.isBehindMarker) return text;
    const rest = text.replace(/^\n+/, '');
    this.isBehindMarker = rest === '';
    return rest;
  }
}
