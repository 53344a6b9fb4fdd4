// The images of a conversation: cut them into crops, and write their tokens into the prompt, as server/images/sight.py does. An image that
// cannot be used is refused with a RequestError, which names its place in the messages.

import { ImageFault, cropsOf, pixelsOf } from './images.mjs';
import { imagesIn } from './messages.mjs';
import { RequestError } from './request.mjs';

const KEPT_BYTES = 64 * 2 ** 20;
const ADDRESS = /^data:[^,]*;base64,/;

/** The images of the last turns, as crops and their rows. */
export class Sight {
  #kept = new Map();   // image by digest, least recently used first

  /** `keptBytes`: about how many bytes of crops and their rows are kept for later turns. */
  constructor({ vision, max_context }, keptBytes = KEPT_BYTES) { Object.assign(this, { vision, most: max_context, keptBytes }); }

  /** Return the images of messages, in order. A crop is {key, pixels, vectors}: crops with equal keys are equal, and have either pixels or vectors. `pause` may throw to end the work. */
  async pictures(messages, pause) {
    const found = [];
    let count = 0;
    for (const { where, image, detail } of imagesIn(messages)) {
      found.push(await this.#picture(image, detail, `${where}.image_url.url`, pause));
      count += found.at(-1).crops.length * this.vision.num_tokens;
      if (count > this.most) throw new RequestError('messages', `the images up to ${where} alone have ${count} tokens; this export holds ${this.most}: send fewer, or detail "low"`);
    }
    return found;
  }

  /** Return an image as {rows, columns, crops}, from those that are kept if it was there before. */
  async #picture(image, detail, where, pause) {
    const file = fileOf(image, where), isLow = detail === 'low', key = `${await digestOf(file, where)} ${isLow}`;
    const picture = this.#kept.get(key) ?? await this.#cut(file, isLow, key, where, pause);
    this.#kept.delete(key);
    this.#kept.set(key, picture);
    let size = [...this.#kept.values()].reduce((total, one) => total + sizeOf(one), 0);
    for (const [oldest, one] of this.#kept) {
      if (size <= this.keptBytes || oldest === key) break;
      this.#kept.delete(oldest);
      size -= sizeOf(one);
    }
    return picture;
  }

  /** Cut an image into crops. Throw RequestError if the image cannot be used. */
  async #cut(file, isLow, key, where, pause) {
    const { fit } = this.vision, plan = isLow ? { ...this.vision, fit: { ...fit, splits: false } } : this.vision;
    try {
      const { rows, columns, crops } = await cropsOf(await pixelsOf(file), plan, pause);
      return { rows, columns, crops: crops.map((pixels, i) => ({ key: `${key} ${i}`, pixels, vectors: null })) };
    } catch (fault) {
      if (fault instanceof ImageFault) throw new RequestError(where, `${where} is an image that cannot be used: ${fault.message}`);
      throw fault;
    }
  }

  /** Return a prompt with the tokens of each image in place of its marker. Throw RequestError if it has another number of markers. */
  written(prompt, pictures) {
    const { marker, begin } = this.vision, pieces = prompt.split(marker);
    if (pieces.length !== pictures.length + 1) {
      throw new RequestError('messages', `the chat template writes ${pieces.length - 1} images, and the messages have ${pictures.length}: put images only where the template shows them`);
    }
    const text = pieces.reduce((before, piece, i) => before + this.#text(pictures[i - 1]) + piece);
    return text.startsWith(begin) ? text : begin + text;
  }

  /** Return the text of an image's tokens. */
  #text({ rows, columns }) {
    const { image_text, num_tokens, around, whole } = this.vision, tokens = image_text.repeat(num_tokens);
    let text = '';
    for (let row = 1; row <= rows; row++) {
      for (let column = 1; column <= columns; column++) text += `${around}<row_${row}_col_${column}>${tokens}`;
      text += '\n';
    }
    return `${text}${rows > 0 ? '\n' : ''}${around}${whole}${tokens}${around}`;
  }

  /** Return the places of crops in the tokens of a prompt: the image tokens belong to them in order. */
  spans(prompt, pictures) {
    const { image_token, num_tokens } = this.vision, places = prompt.flatMap((token, at) => (token === image_token ? [at] : []));
    return pictures.flatMap(({ crops }) => crops).map((crop, i) => ({ at: places[i * num_tokens], crop }));
  }
}

const sizeOf = ({ crops }) => crops.reduce((sum, { pixels, vectors }) => sum + (pixels ?? vectors).byteLength, 0);

/** Return an image as a Blob or an ImageData. */
function fileOf(image, where) {
  if (image instanceof Blob || image?.data instanceof Uint8ClampedArray) return image;
  if (typeof image !== 'string' || !ADDRESS.test(image)) {
    const shown = typeof image === 'string' ? image.slice(0, 40) : typeof image;
    throw new RequestError(where, `${where} is ${shown}; expected a data: URL in base64, a Blob or an ImageData, as nothing is fetched here`);
  }
  try {
    return new Blob([Uint8Array.from(atob(image.replace(ADDRESS, '')), (letter) => letter.charCodeAt(0))]);
  } catch {
    throw new RequestError(where, `${where} is not base64`);
  }
}

/** Return a text that is the same for images with the same bytes and, without a file, the same width. */
async function digestOf(file, where) {
  const bytes = file instanceof Blob ? await bytesOf(file, where) : file.data, digest = new Uint8Array(await crypto.subtle.digest('SHA-256', bytes));
  const text = Array.from(digest, (byte) => byte.toString(16).padStart(2, '0')).join('');
  return file instanceof Blob ? text : `${text} ${file.width}`;
}

/** Return the bytes of a Blob. A Blob of a file on a disk cannot be read after the file has changed. */
async function bytesOf(blob, where) {
  try {
    return await blob.arrayBuffer();
  } catch (error) {
    throw new RequestError(where, `${where} is a file that cannot be read (${error.message}); give its bytes, as in new Blob([await file.arrayBuffer()])`);
  }
}
