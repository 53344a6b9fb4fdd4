// node text.mjs FOLDER [TEXTS, CONVERSATIONS]: print the token ids and decoded text of each text, and the prompts of each conversation, without
// and with a tool.
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { pathToFileURL } from 'node:url';

const [folder, given] = process.argv.slice(2);
const { Detokenizer, TextCodec } = await import(pathToFileURL(join(folder, 'text.mjs')));
const read = async (file) => new Uint8Array(await readFile(join(folder, file)));
const { model } = JSON.parse(new TextDecoder().decode(await read('program.json')));
const codec = await TextCodec.load(model, read), [texts, conversations] = JSON.parse(given);
const ids = texts.map((text) => codec.encode(text));
const shown = ids.map((list) => { const text = new Detokenizer(codec.pieces); return list.map((id) => text.push(id)).join('') + text.finish(); });
const [prompts, withTools] = [[], [{}]].map((tools) => conversations.map((messages) => codec.prompt(messages, tools)));
console.log(JSON.stringify({ ids, prompts, withTools, texts: shown }));
