// node sound.mjs RUNTIME < INPUT: read a JSON list of recordings, each a list of samples; write their loudest energies, and the first piece of each.
import { readFileSync } from 'node:fs';
import { pathToFileURL } from 'node:url';

const { Recording } = await import(pathToFileURL(`${process.argv[2]}/sound.mjs`)), { mels, recordings } = JSON.parse(readFileSync(0));
console.log(JSON.stringify(await Promise.all(recordings.map(async (samples) => {
  const recording = await Recording.of(Float32Array.from(samples), mels, () => {}), { samples: heard, hops } = recording.piece(0, Math.min(recording.numHops, 3));
  return { loudest: recording.loudest, num_hops: recording.numHops, heard: [...heard], hops };
}))));
