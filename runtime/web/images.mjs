// Images as vision models see them: decoded into RGB, scaled, and cut into crops. server/images describes this, and gives the same bytes from
// the same pixels.

import { declaredSize } from './sizes.mjs';

export const MOST_PIXELS = 40_000_000;   // most pixels of an image, as the server's max_image_pixels
const MOST_LENGTH = 65_535;              // most pixels of an edge: the filter's weights for its pixels take memory, and no canvas is longer
const STRIP = 2 ** 22;                   // approximate number of pixels that are read from a canvas at a time
const MOST_EDGE = 4096;                  // most pixels of an edge of an image before its edges become multiples of a crop's edge
const LOBES = 3, PRECISION = 22;         // lobes of Lanczos's filter; bits of its integer weights, as in Pillow
const HALF = 2 ** (PRECISION - 1), COLOURS = 3, OPAQUE = 255;

/** Thrown for an image that cannot be used. The message continues a sentence that names the image. */
export class ImageFault extends Error {}

// --- pixels ----------------------------------------------------------------------------------------------------------------

/** Return the pixels of an image in RGB: of a file (a Blob), or of an ImageData. Throw ImageFault if the image cannot be used. */
export async function pixelsOf(given) {
  if (given instanceof Blob) return decoded(given);
  const { width, height, data } = given;
  requireSize(width, height);
  if (data.length !== 4 * width * height) throw new ImageFault(`it has ${data.length} bytes; expected ${4 * width * height}, four for each of its ${width} x ${height} pixels`);
  return { width, height, pixels: onWhite(data, new Uint8Array(COLOURS * width * height)) };
}

/**
 * Decode a file upright, without changes for the colours of a screen. The caller has to close the bitmap. Throw ImageFault if the file
 * declares no size or one that is not allowed, or if nothing can decode it here.
 */
export async function bitmapOf(file) {
  if (!globalThis.createImageBitmap) throw new ImageFault('nothing can decode files here; expected an ImageData: {width, height, data}');
  const size = declaredSize(new Uint8Array(await file.arrayBuffer()));
  if (size === null) throw new ImageFault('its beginning declares no size; expected a PNG, JPEG, WebP or GIF file');
  requireSize(size.width, size.height);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file, { colorSpaceConversion: 'none', premultiplyAlpha: 'none' });
  } catch {
    throw new ImageFault('this browser cannot decode it; expected a PNG, JPEG, WebP or GIF file');
  }
  try {
    requireSize(bitmap.width, bitmap.height);
  } catch (fault) {
    bitmap.close();
    throw fault;
  }
  return bitmap;
}

/** Read the pixels of a file in strips, because some browsers limit the pixels of a canvas. Throw ImageFault if the file cannot be used. */
async function decoded(file) {
  const bitmap = await bitmapOf(file), { width, height } = bitmap, pixels = new Uint8Array(COLOURS * width * height);
  const lines = Math.min(Math.ceil(STRIP / width), height), size = COLOURS * width;
  try {
    const context = new OffscreenCanvas(width, lines).getContext('2d', { willReadFrequently: true });
    if (context === null) throw new ImageFault(`this browser has no canvas of ${width} x ${lines} pixels: make it smaller`);
    context.imageSmoothingEnabled = false;
    for (let top = 0; top < height; top += lines) {
      const count = Math.min(lines, height - top);
      context.clearRect(0, 0, width, lines);
      context.drawImage(bitmap, 0, -top);
      onWhite(context.getImageData(0, 0, width, count).data, pixels.subarray(top * size, (top + count) * size));
    }
  } finally {
    bitmap.close();
  }
  return { width, height, pixels };
}

/** Throw ImageFault if an image of this size is empty or too large. */
function requireSize(width, height) {
  if (!(width >= 1 && height >= 1)) throw new ImageFault(`it has ${width} x ${height} pixels; expected at least one`);
  if (Math.max(width, height) > MOST_LENGTH) throw new ImageFault(`it has ${width} x ${height} pixels; expected edges of at most ${MOST_LENGTH}: make it shorter`);
  if (width * height > MOST_PIXELS) throw new ImageFault(`it has ${width} x ${height} pixels; expected at most ${MOST_PIXELS}: make it smaller`);
}

/** Write the colours of pixels on white, with Pillow's rounding. */
function onWhite(data, pixels) {
  for (let from = 0, to = 0; from < data.length; from += 4) {
    const alpha = data[from + 3];
    for (let colour = 0; colour < COLOURS; colour++) {
      const value = data[from + colour];
      if (alpha === OPAQUE) pixels[to++] = value;
      else {
        const sum = (value * alpha + OPAQUE * (OPAQUE - alpha)) * 128 + 128 * 128;
        pixels[to++] = (((sum >> 8) + sum) >> 8) >> 7;
      }
    }
  }
  return pixels;
}

// --- crops -----------------------------------------------------------------------------------------------------------------

/**
 * Return the crops of an image, each the RGB bytes of a square: those of a grid, row by row, and last that of the whole image. `rows` and
 * `columns` are 0 if there is only the crop of the whole image. `fit` is Tiles of runtime/fits.py. `pause` is awaited from time to time; it may throw to end
 * the work.
 */
export async function cropsOf(image, { crop_size: edge, fit }, pause) {
  const scaled = await resized(image, scaledSize(image, fit.longest_edge), pause);
  const cut = fit.splits ? await resized(scaled, divisibleSize(scaled, edge), pause) : scaled;
  const whole = await resized(cut, { width: edge, height: edge }, pause), rows = cut.height / edge, columns = cut.width / edge;
  if (!fit.splits || (rows === 1 && columns === 1)) return { rows: 0, columns: 0, crops: [whole.pixels] };
  const places = Array.from({ length: rows * columns }, (_, i) => [Math.floor(i / columns) * edge, (i % columns) * edge]);
  return { rows, columns, crops: [...places.map(([top, left]) => square(cut, top, left, edge)), whole.pixels] };
}

/** Return the bytes of a square of an image, whose upper left pixel is in line `top` and column `left`. */
function square({ width, pixels }, top, left, edge) {
  const found = new Uint8Array(COLOURS * edge * edge), line = COLOURS * edge;
  for (let row = 0; row < edge; row++) {
    const begin = COLOURS * ((top + row) * width + left);
    found.set(pixels.subarray(begin, begin + line), row * line);
  }
  return found;
}

/** Return the size of an image whose longer edge has `longest` pixels. The shorter edge is rounded down, then up to an even number. */
function scaledSize({ width, height }, longest) {
  const even = (length) => Math.max(length + (length % 2), 1);
  const ratio = width / height, size = width >= height
    ? { width: longest, height: even(Math.trunc(longest / ratio)) }
    : { width: even(Math.trunc(longest * ratio)), height: longest };
  return limited(size);
}

/** Reduce a size with an edge above MOST_EDGE, in proportion. */
function limited({ width, height }) {
  const ratio = width / height;
  if (width >= height && width > MOST_EDGE) return { width: MOST_EDGE, height: Math.max(Math.trunc(MOST_EDGE / ratio), 1) };
  if (height > width && height > MOST_EDGE) return { width: Math.max(Math.trunc(MOST_EDGE * ratio), 1), height: MOST_EDGE };
  return { width, height };
}

/** Round the longer edge of a size up to a multiple of a crop's edge, scale the other edge in proportion, and round it up, too. */
function divisibleSize({ width, height }, edge) {
  const up = (length) => Math.ceil(length / edge) * edge, ratio = width / height;
  if (width >= height) return { width: up(width), height: up(Math.max(Math.trunc(up(width) / ratio), 1)) };
  return { width: up(Math.max(Math.trunc(up(height) * ratio), 1)), height: up(height) };
}

// --- scaling, as Pillow scales bytes by Lanczos's filter ----------------------------------------------------------------------

/** Scale an image: first its lines, or first its columns if its height loses more than twice as many pixels as its width, as in Pillow 13. */
async function resized(image, { width, height }, pause) {
  const across = (from) => (from.width === width ? from : scaledAcross(from, width));
  const down = (from) => (from.height === height ? from : scaledDown(from, height));
  const lower = image.height - height, isDownFirst = lower > 0 && lower > 2 * (image.width - width);
  await pause();
  const half = isDownFirst ? down(image) : across(image);
  await pause();
  return isDownFirst ? across(half) : down(half);
}

/** Scale each line of an image to `width` pixels. */
function scaledAcross({ width: before, height, pixels }, width) {
  const { begins, counts, weights, most } = filterOf(before, width), found = new Uint8Array(COLOURS * width * height);
  for (let row = 0, to = 0; row < height; row++) {
    const line = COLOURS * row * before;
    for (let column = 0; column < width; column++) {
      let red = HALF, green = HALF, blue = HALF;
      for (let tap = 0, from = line + COLOURS * begins[column], at = column * most; tap < counts[column]; tap++, from += COLOURS, at++) {
        const weight = weights[at];
        red = (red + pixels[from] * weight) | 0;
        green = (green + pixels[from + 1] * weight) | 0;
        blue = (blue + pixels[from + 2] * weight) | 0;
      }
      found[to++] = byteOf(red);
      found[to++] = byteOf(green);
      found[to++] = byteOf(blue);
    }
  }
  return { width, height, pixels: found };
}

/** Scale each column of an image to `height` pixels. */
function scaledDown({ width, height: before, pixels }, height) {
  const { begins, counts, weights, most } = filterOf(before, height), line = COLOURS * width;
  const found = new Uint8Array(line * height), sums = new Int32Array(line);
  for (let row = 0; row < height; row++) {
    sums.fill(HALF);
    for (let tap = 0; tap < counts[row]; tap++) {
      const weight = weights[row * most + tap], from = (begins[row] + tap) * line;
      for (let i = 0; i < line; i++) sums[i] += pixels[from + i] * weight;
    }
    for (let i = 0, to = row * line; i < line; i++) found[to + i] = byteOf(sums[i]);
  }
  return { width, height, pixels: found };
}

const byteOf = (sum) => Math.min(Math.max(sum >> PRECISION, 0), 255);

/** Return, for each pixel of a line that is scaled from `before` to `after` pixels, the first pixel and the number of pixels that it is made from, and their integer weights. */
function filterOf(before, after) {
  const scale = before / after, wide = Math.max(scale, 1), support = LOBES * wide, most = 2 * Math.ceil(support) + 1;
  const begins = new Int32Array(after), counts = new Int32Array(after), weights = new Int32Array(most * after), own = new Float64Array(most);
  for (let i = 0; i < after; i++) {
    const centre = (i + 0.5) * scale, begin = Math.max(Math.trunc(centre - support + 0.5), 0);
    const count = Math.min(Math.trunc(centre + support + 0.5), before) - begin;
    let total = 0;
    for (let tap = 0; tap < count; tap++) total += own[tap] = lanczos((tap + begin - centre + 0.5) * (1 / wide));
    for (let tap = 0; tap < count; tap++) {
      const share = (total === 0 ? own[tap] : own[tap] / total) * 2 ** PRECISION;
      weights[i * most + tap] = Math.trunc(share < 0 ? share - 0.5 : share + 0.5);
    }
    [begins[i], counts[i]] = [begin, count];
  }
  return { begins, counts, weights, most };
}

const lanczos = (x) => (x >= -LOBES && x < LOBES ? sinc(x) * sinc(x / LOBES) : 0);

function sinc(x) {
  if (x === 0) return 1;
  const angle = x * Math.PI;
  return Math.sin(angle) / angle;
}
