// node crops.mjs RUNTIME < INPUT: read a JSON list of [width, height, longest edge, crop size, bytes of RGBA in base64]; cut each image, and
// write the rows, the columns and the crops in base64.
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const { cropsOf, pixelsOf } = await import(pathToFileURL(`${process.argv[2]}/images.mjs`)), found = [];
for (const [width, height, longest_edge, crop_size, bytes] of JSON.parse(readFileSync(0))) {
  const image = await pixelsOf({ width, height, data: new Uint8ClampedArray(Buffer.from(bytes, 'base64')) });
  const { rows, columns, crops } = await cropsOf(image, { crop_size, fit: { longest_edge, splits: true } }, () => {});
  found.push([rows, columns, crops.map((crop) => Buffer.from(crop).toString('base64'))]);
}
console.log(JSON.stringify(found));
