// node vectors.mjs FOLDER TOKENS: write the embedding of each list of tokens as f32.
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder, given] = process.argv.slice(2);
const { loadModel } = await import(pathToFileURL(join(folder, 'loader.mjs')));
const { network, model } = await loadModel({ read: async (file) => new Uint8Array(await readFile(join(folder, file))) });
for (const tokens of JSON.parse(given)) {
  const vector = model.kind === 'encoder' ? network.encode(tokens) : (network.reset(), network.append(tokens, { wants: 'hidden' }));
  process.stdout.write(Buffer.from(vector.buffer, vector.byteOffset, vector.byteLength));
}
