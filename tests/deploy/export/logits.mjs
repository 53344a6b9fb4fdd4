// node logits.mjs FOLDER TARGET PROMPT COUNT [THREADS]: decode greedily; write the logits of each step as f32, and the ids as JSON to stderr.
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder, target, prompt, count, threads = '1'] = process.argv.slice(2);
const { loadModel } = await import(pathToFileURL(join(folder, 'loader.mjs')));
const { network: decoder } = await loadModel({ read: async (file) => new Uint8Array(await readFile(join(folder, file))), target, threads: Number(threads) });
const ids = [], rows = [];
let next = JSON.parse(prompt);
for (let i = 0; i < Number(count); i++) {
  decoder.append(next);
  rows.push(Buffer.from(decoder.program.view(decoder.logits, Uint8Array)));
  const { token } = decoder.draw({ temperature: 0 });
  ids.push(token);
  next = [token];
}
process.stdout.write(Buffer.concat(rows));
process.stderr.write(JSON.stringify(ids));
