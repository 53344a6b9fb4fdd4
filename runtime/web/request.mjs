// Parse the parameters of a request, by their names in OpenAI's API. Each parameter is either honoured or refused by name,
// with a RequestError.

/** A parameter of a request is wrong. `param` names it. */
export class RequestError extends Error {
  constructor(param, message) {
    super(message);
    this.name = 'RequestError';
    this.param = param;
    this.code = 'invalid_value';
  }
}

/** Return a check that a value is a number, or an integer, in a range. */
const number = (low, high) => (value, name) => {
  if (typeof value !== 'number' || Number.isNaN(value) || value < low || value > high) {
    throw new RequestError(name, `${name} is ${JSON.stringify(value)}; expected a number from ${low} to ${high}`);
  }
  return value;
};
const integer = (low, high) => (value, name) => {
  if (!Number.isInteger(number(low, high)(value, name))) throw new RequestError(name, `${name} is ${value}; expected an integer`);
  return value;
};
const SAMPLED = {
  temperature: number(0, 100), top_p: number(0, 1), min_p: number(0, 1), typical_p: number(Number.MIN_VALUE, 1), top_k: integer(-1, 2 ** 31 - 1),
  frequency_penalty: number(-2, 2), presence_penalty: number(-2, 2), repetition_penalty: number(0.01, 100),
};
const GENERATED = new Set([
  ...Object.keys(SAMPLED), 'model', 'messages', 'prompt', 'stream', 'stream_options', 'max_tokens', 'max_completion_tokens', 'stop', 'seed', 'logit_bias', 'logprobs',
  'top_logprobs', 'n', 'user', 'tools', 'tool_choice', 'parallel_tool_calls',
]);
const EMBEDDED = new Set(['model', 'input', 'encoding_format', 'dimensions', 'normalize', 'prompt_name', 'user']);
const HEARD = new Set(['model', 'file', 'language', 'prompt', 'response_format', 'temperature', 'seed', 'stream', 'timestamp_granularities', 'user']);
const TRANSCRIPTS = ['json', 'text', 'verbose_json', 'srt', 'vtt'];
const MOST_TOP = 20;

/** Throw RequestError for a parameter that is not among the known ones, unless its value is undefined or null, as of one that is left out. */
function requireKnown(body, known) {
  for (const [name, value] of Object.entries(body)) {
    if (!known.has(name) && (value ?? null) !== null) throw new RequestError(name, `${name} is not supported in the browser; leave it out`);
  }
}

/**
 * Check the parameters of a chat or text completion, and fill in the model's defaults. `usual`: the most tokens of an answer if neither the
 * body nor the model says it.
 */
export function parsed(body, model, usual = model.max_context) {
  requireKnown(body, GENERATED);
  const sampling = { ...model.sampling }, { defaults } = model;
  for (const [name, check] of Object.entries(SAMPLED)) {
    if ((body[name] ?? null) !== null) sampling[name] = check(body[name], name);
  }
  sampling.top_k = Math.max(0, sampling.top_k ?? 0);   // -1 means off, like 0
  if ((body.n ?? 1) !== 1) throw new RequestError('n', `n is ${body.n}; expected 1: one sequence runs at a time`);
  return {
    sampling: { ...sampling, seed: seedOf(body.seed), logit_bias: biasOf(body.logit_bias ?? {}, model), logprobs: topOf(body) },
    stops: stopsOf(body.stop ?? defaults.stop),
    maxTokens: mostOf(body, defaults.max_tokens ?? usual, model.max_context),
    stream: body.stream === true,
    usage: body.stream_options?.include_usage === true,
    tools: toolsOf(body, model),
    mostCalls: body.parallel_tool_calls === false ? 1 : Infinity,
  };
}

/** Return the most tokens of an answer: `usual` if the request names none or 0, and `all` for -1, as many as fit. */
function mostOf({ max_completion_tokens: completion, max_tokens: most }, usual, all) {
  if ((completion ?? null) !== null) return integer(1, 2 ** 31 - 1)(completion, 'max_completion_tokens');
  const asked = integer(-1, 2 ** 31 - 1)(most ?? 0, 'max_tokens');
  return asked === -1 ? all : asked || usual;
}

/** Return the tools that the model may call. The browser runtime has no grammars, so it cannot force a call. */
function toolsOf({ tools, tool_choice: choice }, model) {
  if (choice !== undefined && choice !== null && choice !== 'auto' && choice !== 'none') {
    throw new RequestError('tool_choice', `tool_choice is ${JSON.stringify(choice)}; in the browser expected "auto" or "none"`);
  }
  if (tools === undefined || tools === null) return [];
  if (!Array.isArray(tools)) throw new RequestError('tools', 'tools has to be a list');
  for (const [index, tool] of tools.entries()) {
    if (tool?.type !== 'function' || typeof tool.function?.name !== 'string') {
      throw new RequestError(`tools[${index}]`, `tools[${index}] has to be {type: "function", function: {name, ...}}`);
    }
    if (!/^[A-Za-z0-9_.-]{1,64}$/.test(tool.function.name)) {
      throw new RequestError(`tools[${index}].function.name`, `tools[${index}].function.name is ${JSON.stringify(tool.function.name)}; expected up to 64 letters, digits, _, . and -`);
    }
  }
  if (choice === 'none' || tools.length === 0) return [];
  if (model.tools === null) {
    throw new RequestError('tools', `the browser cannot offer tools to ${model.name}: its chat template shows none, or its calls are not JSON; leave tools out`);
  }
  return tools.map(definition);
}

/** Return a tool as the server gives it to templates, which write its fields in their order: without nulls, and known fields first. */
function definition({ type, function: { name, description, parameters, strict, ...others }, ...rest }) {
  const present = (fields) => Object.fromEntries(Object.entries(fields).filter(([, value]) => (value ?? null) !== null));
  return present({ type, function: present({ name, description, parameters, strict, ...others }), ...rest });
}

/** Check an embeddings request. Return its texts, each after the prompt that the model was trained with, and the encoding of the answer. */
export function parsedEmbedding(body, { hidden_size: size, embedding: { normalize, prompts, default_prompt: usual } }) {
  requireKnown(body, EMBEDDED);
  const inputs = [body.input].flat();
  if (inputs.length === 0 || inputs.some((text) => typeof text !== 'string')) throw new RequestError('input', 'input has to be a text or a list of texts');
  const prompt = body.prompt_name ?? usual, known = Object.keys(prompts);
  if (prompt && !known.includes(prompt)) throw new RequestError('prompt_name', `prompt_name is ${prompt}; expected ${known.length ? `one of ${known.join(', ')}` : 'none, as the model has no prompts'}`);
  const format = body.encoding_format ?? 'float';
  if (format !== 'float' && format !== 'base64') throw new RequestError('encoding_format', `encoding_format is ${JSON.stringify(format)}; expected float or base64`);
  return {
    texts: inputs.map((text) => (prompts[prompt] ?? '') + text),
    dimensions: integer(1, size)(body.dimensions ?? size, 'dimensions'),
    normalize: body.normalize ?? normalize,
    format,
  };
}

/** Check a request for a transcription or a translation. */
export function parsedAudio(body, { speech: { tokens, names } }, task) {
  requireKnown(body, HEARD);
  if (!(body.file instanceof Float32Array)) throw new RequestError('file', 'file has to be a sound: a Blob or its bytes, or a Float32Array of 16000 samples per second');
  if (!body.file.every(Number.isFinite)) throw new RequestError('file', 'file has samples that are no finite numbers');
  const known = Object.keys(tokens.languages), isEnglish = known.length === 0, asked = body.language ?? (isEnglish ? 'en' : null);
  const language = typeof asked === 'string' ? codeOf(asked, names) : asked;
  if (isEnglish ? language !== 'en' : language !== null && !known.includes(language)) {
    throw new RequestError('language', `language is ${JSON.stringify(asked)}; expected ${isEnglish ? 'en, the only one that' : `a code such as en, one of ${known.length} that`} the model knows`);
  }
  if (isEnglish && task === 'translate') throw new RequestError('model', 'this model only transcribes English');
  const format = body.response_format ?? 'json';
  if (!TRANSCRIPTS.includes(format)) throw new RequestError('response_format', `response_format is ${JSON.stringify(format)}; expected one of ${TRANSCRIPTS.join(', ')}`);
  const times = body.timestamp_granularities ?? [];
  if (!Array.isArray(times) || times.some((part) => part !== 'segment')) {
    throw new RequestError('timestamp_granularities', `timestamp_granularities is ${JSON.stringify(times)}; expected ["segment"], as words have no times in the browser`);
  }
  if (typeof (body.prompt ?? '') !== 'string') throw new RequestError('prompt', 'prompt has to be a string');
  return {
    language,
    format,
    prompt: (body.prompt ?? '').trim(),
    temperature: number(0, 1)(body.temperature ?? 0, 'temperature'),
    seed: seedOf(body.seed ?? 0),
    stream: body.stream === true,
  };
}

/** Return the code of a language that is given by its code or by its English name. `names` has the names by code. */
function codeOf(language, names) {
  const asked = language.trim().toLowerCase();
  return Object.keys(names).find((code) => names[code] === asked.replaceAll('-', ' ')) ?? asked;
}

/** Return a seed as a BigInt, a random one if none is given. */
function seedOf(seed) {
  if (seed === undefined || seed === null) return crypto.getRandomValues(new BigUint64Array(1))[0];
  if (typeof seed === 'bigint' || Number.isSafeInteger(seed)) return BigInt(seed);
  throw new RequestError('seed', `seed is ${JSON.stringify(seed)}; expected an integer`);
}

/** Return a logit bias after the check of its tokens and values. */
function biasOf(bias, { vocab_size: size }) {
  for (const [id, value] of Object.entries(bias)) {
    if (!/^\d+$/.test(id) || Number(id) >= size) throw new RequestError('logit_bias', `logit_bias names token ${id}; the vocabulary has ${size}`);
    number(-100, 100)(value, 'logit_bias');
  }
  return bias;
}

/** Return the number of alternatives whose log-probabilities are asked for, or -1 if no log-probabilities are. */
function topOf({ logprobs, top_logprobs: top }) {
  if (logprobs === true) return integer(0, MOST_TOP)(top ?? 0, 'top_logprobs');
  if ((logprobs ?? false) !== false) throw new RequestError('logprobs', `logprobs is ${JSON.stringify(logprobs)}; expected true or false`);
  if (top) throw new RequestError('top_logprobs', `top_logprobs is ${top} without logprobs; set logprobs to true`);
  return -1;
}

/** Return the stop strings as a list, empty if there are none. */
function stopsOf(stop) {
  const stops = stop === undefined || stop === null ? [] : [stop].flat();
  if (stops.some((text) => typeof text !== 'string')) throw new RequestError('stop', 'stop has to be a string or a list of strings');
  if (stops.includes('')) throw new RequestError('stop', 'a stop string has 0 characters; expected at least 1');
  return stops;
}
