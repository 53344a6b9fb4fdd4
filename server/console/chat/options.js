/* The options of answers: the form's fields, and the request field that each of them sets. An empty field is not sent. */

export const NUMBERS = [
  {name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1, hint: "0: always the most probable token"},
  {name: "top_p", label: "Top-p", min: 0.01, max: 1, step: 0.05, hint: "draw from the smallest set of tokens with this total probability"},
  {name: "top_k", label: "Top-k", min: 0, step: 1, hint: "number of most probable tokens to draw from; 0: all"},
  {name: "min_p", label: "Min-p", min: 0, max: 1, step: 0.01, hint: "least probability, as a share of the most probable token's"},
  {name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "for tokens that have occurred"},
  {name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "for each time they occurred"},
  {name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05, hint: "1: no penalty"},
  {name: "max_tokens", label: "Longest answer", min: 1, step: 1, hint: "in tokens; empty: up to the end of the context"},
  {name: "seed", label: "Seed", step: 1, hint: "same seed, same answer"},
];
export const TEXTS = ["system", "schema", "tools", "mcp"];

export const PRESETS = {
  "Model's own": {},
  Precise: {temperature: 0},
  Creative: {temperature: 1, top_p: 0.95},
};

/* Return the request's fields for the numbers, the schema and the tools of the options. Throw an OptionFault that names the field if one is
   invalid. */
export function asFields(options) {
  const fields = {};
  for (const {name} of NUMBERS) if (options[name] !== undefined) fields[name] = options[name];
  if (options.schema?.trim()) {
    fields.response_format = {type: "json_schema", json_schema: {name: "answer", schema: parsed("schema", options.schema, isObject, "a JSON schema: an object")}};
  }
  const tools = toolsOf(options);
  if (tools.length) fields.tools = tools;
  return fields;
}

/* Return the tools in OpenAI's form. Bare functions are accepted, too. */
export function toolsOf(options) {
  if (!options.tools?.trim()) return [];
  const tools = parsed("tools", options.tools, Array.isArray, "a list of tools: [{\"type\": \"function\", \"function\": {\"name\": …}}]");
  return tools.map(tool => tool.function ? tool : {type: "function", function: tool});
}

export class OptionFault extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function parsed(field, text, isRight, expected) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new OptionFault(field, `${field} is not JSON: ${error.message}`);
  }
  if (!isRight(value)) throw new OptionFault(field, `${field} is not ${expected}`);
  return value;
}

const isObject = value => typeof value === "object" && value !== null && !Array.isArray(value);
