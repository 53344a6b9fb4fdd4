// node heard.mjs FOLDER < INPUT: hear the samples of a recording, append the tokens of a prompt one by one, and write the logits after each as f32.
import { readFile } from 'node:fs/promises';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder] = process.argv.slice(2), from = (file) => import(pathToFileURL(join(folder, file)));
const [{ loadModel }, { Recording }] = [await from('loader.mjs'), await from('sound.mjs')];
const { network, model } = await loadModel({ read: async (file) => new Uint8Array(await readFile(join(folder, file))), threads: 1 });
const { samples, prompt } = JSON.parse(readFileSync(0)), recording = await Recording.of(Float32Array.from(samples), model.speech.num_mels, () => {});
network.hear(recording.piece(0, Math.min(recording.numHops, model.speech.num_hops)));
for (const token of prompt) {
  network.append([token]);
  process.stdout.write(Buffer.from(network.program.view(network.logits, Uint8Array)));
}
