// Read the width and the height that an image file declares, before anything decodes it.

const hasSize = (kind) => kind >= 0xc0 && kind <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(kind);   // markers of JPEG: a segment with the size
const isAlone = (kind) => kind === 0x01 || (kind >= 0xd0 && kind <= 0xd8);                      // no segment follows

/** Return {width, height} of a PNG, GIF, JPEG or WebP file, or null if the bytes are none of them, or end before the size. */
export function declaredSize(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  try {
    if (begins(bytes, '\x89PNG\r\n\x1a\n')) return { width: view.getUint32(16), height: view.getUint32(20) };
    if (begins(bytes, 'GIF8')) return { width: view.getUint16(6, true), height: view.getUint16(8, true) };
    if (begins(bytes, '\xff\xd8\xff')) return sizeOfJpeg(view);
    if (begins(bytes, 'RIFF') && begins(bytes, 'WEBP', 8)) return sizeOfWebp(bytes, view);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;   // the file ends within its header
  }
  return null;
}

const begins = (bytes, text, at = 0) => [...text].every((letter, i) => bytes[at + i] === letter.charCodeAt(0));

/** Go from segment to segment, and return the first size. Return null where no segment begins. Reading beyond the end throws RangeError. */
function sizeOfJpeg(view) {
  for (let at = 2; ;) {
    if (view.getUint8(at) !== 0xff) return null;
    const kind = view.getUint8(at + 1);
    if (kind === 0xff) at += 1;   // a marker may be filled up with more of these
    else if (isAlone(kind)) at += 2;
    else if (hasSize(kind)) return { width: view.getUint16(at + 7), height: view.getUint16(at + 5) };
    else at += 2 + view.getUint16(at + 2);
  }
}

/** Return the size of a WebP file in one of its three formats, or null if it has another one. */
function sizeOfWebp(bytes, view) {
  if (begins(bytes, 'VP8 ', 12)) return { width: view.getUint16(26, true) & 0x3fff, height: view.getUint16(28, true) & 0x3fff };
  if (begins(bytes, 'VP8L', 12)) {
    const bits = view.getUint32(21, true);
    return { width: (bits & 0x3fff) + 1, height: ((bits >>> 14) & 0x3fff) + 1 };
  }
  if (begins(bytes, 'VP8X', 12)) return { width: (view.getUint32(24, true) & 0xffffff) + 1, height: (view.getUint32(26, true) >>> 8) + 1 };
  return null;
}
