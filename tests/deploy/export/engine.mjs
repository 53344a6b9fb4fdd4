// node engine.mjs FOLDER: read requests as lines {method, body, abortAfter, abortAt} from stdin and print a JSON list of the events of each. Images
// in them are {width, height, rgba}, the bytes in base64. `abortAfter` is a number of events; `abortAt` is {crop}, the number of a crop that is
// about to be encoded, or {part}, that of a part of a prompt; parts have at most `size` tokens.
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const [folder] = process.argv.slice(2);
const from = (file) => import(pathToFileURL(join(folder, file)));
const [{ Engine }, { RelaxServe }] = [await from('engine.mjs'), await from('relaxserve.mjs')];
const created = (parts) => Object.fromEntries(Object.entries(parts).map(([name, { create }]) => [name, create]));
const engine = await Engine.load({ read: async (file) => new Uint8Array(await readFile(join(folder, file))) }), client = RelaxServe.of(engine);
const { network, model } = engine, mostTokens = model.max_tokens, { append } = network;
const create = { chat: client.chat.completions.create, text: client.completions.create, embeddings: client.embeddings.create, ...created(client.audio) };
const revived = (_, value) => (value?.rgba === undefined ? value : { ...value, data: new Uint8ClampedArray(Buffer.from(value.rgba, 'base64')) });

for await (const line of createInterface({ input: process.stdin })) {
  const { method, body, abortAfter, abortAt, size } = JSON.parse(line, revived), abort = new AbortController(), events = [];
  const onProgress = ({ crops }) => { if (crops === abortAt?.crop) abort.abort(); };
  let part = 0;
  model.max_tokens = size ?? mostTokens;
  network.append = (tokens, asked) => {
    if (asked?.wants === 'nothing' && part++ === abortAt?.part) abort.abort();
    return append.call(network, tokens, asked);
  };
  if (Array.isArray(body.file)) body.file = Float32Array.from(body.file);
  try {
    const made = await create[method](body, { signal: abort.signal, onProgress });
    if (!body.stream) events.push(made);
    else for await (const event of made) {
      events.push(event);
      if (events.length === abortAfter) abort.abort();
    }
  } catch (error) {
    events.push({ error: { name: error.name, message: error.message, param: error.param } });
  }
  console.log(JSON.stringify(events));
}
