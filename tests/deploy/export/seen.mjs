// node seen.mjs FOLDER < INPUT: encode crops, append the tokens of a prompt in parts, draw tokens, and write all logits as f32. The input is
// {tokens, size, count, crops}: tokens of a part, how many tokens are drawn, and the crops, [position, bytes in base64].
import { readFileSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder] = process.argv.slice(2), { loadModel } = await import(pathToFileURL(join(folder, 'loader.mjs')));
const { network } = await loadModel({ read: async (file) => new Uint8Array(await readFile(join(folder, file))), threads: 1 });
const { tokens, size, count, crops } = JSON.parse(readFileSync(0));
network.spans = crops.map(([at, bytes]) => ({ at, crop: { pixels: Buffer.from(bytes, 'base64'), vectors: null } }));
for (const { crop } of network.spans) network.see(crop);
for (let begin = 0; begin < tokens.length; begin += size) network.append(tokens.slice(begin, begin + size));
for (let i = 0; i < count; i++) {
  process.stdout.write(Buffer.from(network.program.view(network.logits, Uint8Array)));
  network.append([network.draw({ temperature: 0 }).token]);
}
