// node tools.mjs FOLDER: read {form, names, pieces, mostCalls} as lines from stdin and print the parts that the parser finds in each.
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const { ToolParser } = await import(pathToFileURL(`${process.argv[2]}/tools.mjs`));
for await (const line of createInterface({ input: process.stdin })) {
  const { form, names, pieces, mostCalls } = JSON.parse(line), parser = new ToolParser(form, names, mostCalls ?? Infinity);
  console.log(JSON.stringify([...pieces.flatMap((piece) => parser.push(piece)), ...parser.finish()]));
}
