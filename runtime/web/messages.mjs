// Convert messages from the format of OpenAI's API to the format that chat templates read, as server/api/request/conversation.py does. What
// is not valid is refused with a RequestError, which names the place.

import { parsedJson } from './json.mjs';
import { RequestError } from './request.mjs';
import { WORD } from './spaces.mjs';
import { json, made } from './values.mjs';

const ROLES = new Map([['developer', 'system'], ['function', 'tool']]);   // other names of the same roles
const ROLE = new RegExp(`^(?=.{1,64}$)[${WORD}][${WORD}.\\-]*$`, 'u');
const TEXTS = { text: 'text', input_text: 'text', output_text: 'text', summary_text: 'text', reasoning_text: 'text', refusal: 'refusal' };   // type of a part -> the field with its text

const FIELDS = ['name', 'tool_call_id', 'refusal', 'reasoning', 'reasoning_content'];   // of a message, which are texts
const IMAGE = 'image_url';   // type of a part that is an image
const DETAILS = ['auto', 'low', 'high'];

/**
 * Return the messages for a template. `marker` stands for an image in its texts; null: the model reads no images. A content with images is a
 * list of parts. `writesCalls`: whether calls of tools and their results are left to the template.
 */
export function forTemplate(messages, { marker = null, writesCalls = true } = {}) {
  if (!Array.isArray(messages) || messages.length === 0) throw new RequestError('messages', 'messages has to be a list with at least one message');
  return messages.map((message, index) => {
    const where = `messages[${index}]`, found = read(message, where, marker);
    if (!writesCalls && (found.tool_calls || found.role === 'tool')) {
      throw new RequestError(where, `${where} has a call of a tool, or its result, which the chat template of this model does not write; write it as text`);
    }
    return parted(found, marker, false);
  });
}

/**
 * Return messages in the format of templates that begin with the model's default system message, unless they have one. If the template
 * writes no system message, the first message of the user begins with its text.
 */
export function withSystem(messages, { system, has_system: hasSystem }) {
  if (!system || messages.some(({ role }) => role === 'system')) return messages;
  const at = messages.findIndex(({ role }) => role === 'user');
  if (hasSystem || at < 0) return [{ role: 'system', content: system }, ...messages];
  const { content } = messages[at], head = `${system}\n\n`;
  const [first, ...rest] = content[0]?.type === 'text' ? content : [{ type: 'text', text: '' }, ...content];
  const changed = typeof content === 'string' ? head + content : [{ ...first, text: head + first.text }, ...rest];
  return messages.map((message, i) => (i === at ? { ...message, content: changed } : message));
}

/** Return an assistant's message with calls and an empty content with null as its content, which some templates expect. Return any other message unchanged. */
export function withoutEmptyContent(message) {
  const { role, tool_calls: calls, content } = message;
  return role === 'assistant' && calls?.length && content.length === 0 ? { ...message, content: null } : message;
}

/**
 * Return messages with the arguments of calls as JSON text; null if none are objects. DeepSeek's templates append the arguments to a text, so
 * they fail on the objects that other templates expect.
 */
export function withWrittenArguments(messages) {
  let isChanged = false;
  const texted = (call) => {
    const { arguments: given } = call.function;
    if (typeof given !== 'object' || given === null || Array.isArray(given)) return call;
    isChanged = true;
    return { ...call, function: { ...call.function, arguments: json(made(given)) } };
  };
  const changed = messages.map((message) => (message.tool_calls ? { ...message, tool_calls: message.tool_calls.map(texted) } : message));
  return isChanged ? changed : null;
}

/** Return a message whose content is a list of parts, which is empty for an empty text. */
export function inOnlyParts(message) {
  return typeof message.content === 'string' ? parted(message, null, true) : message;
}

/** Return the images of messages, each with its place. */
export function imagesIn(messages) {
  return messages.flatMap(({ content }, number) => (Array.isArray(content) ? content : []).flatMap((part, index) => {
    if (part?.type !== IMAGE) return [];
    const where = `messages[${number}].content[${index}]`, image = part.image_url?.url ?? part.image_url;
    if ((image ?? null) === null) throw new RequestError(`${where}.image_url`, `${where}.image_url is absent; expected an object with url`);
    const detail = part.image_url.detail ?? 'auto';
    if (!DETAILS.includes(detail)) throw new RequestError(`${where}.image_url.detail`, `${where}.image_url.detail is ${JSON.stringify(detail)}; expected one of ${DETAILS.join(', ')}`);
    return [{ where, image, detail }];
  }));
}

/** Return one message as templates read it. `where` names it in errors. */
function read(message, where, marker) {
  if (typeof message?.role !== 'string') throw new RequestError(`${where}.role`, `${where} has no role; expected system, user, assistant or tool`);
  if (!ROLE.test(message.role)) throw new RequestError(`${where}.role`, `${where}.role is ${JSON.stringify(message.role)}; expected a name of at most 64 characters`);
  for (const name of FIELDS) {
    if ((message[name] ?? null) !== null && typeof message[name] !== 'string') throw new RequestError(`${where}.${name}`, `${where}.${name} has to be a text`);
  }
  const { tool_calls: given, function_call: old, refusal, reasoning, reasoning_content, ...rest } = message, thoughts = reasoning_content ?? reasoning ?? null;
  const calls = given?.length ? given : old ? [{ function: old }] : [], content = textOf(message.content, `${where}.content`, marker) || (refusal ?? '');
  const seen = { ...rest, role: ROLES.get(message.role) ?? message.role, content };
  for (const name of ['name', 'tool_call_id']) if (seen[name] === null) delete seen[name];
  if (calls.length > 0) seen.tool_calls = calls.map((call, index) => called(call, `${where}.tool_calls[${index}]`));
  else if ((message.content ?? null) === null && message.role !== 'assistant') throw new RequestError(`${where}.content`, `${where} has neither content nor tool_calls`);
  if (thoughts === null) return seen;
  return { ...seen, reasoning_content: thoughts, ...(calls.length > 0 && content !== '' ? {} : { thinking: thoughts }) };
}

/** Return a call of a tool as templates read it. */
function called(call, where) {
  if (typeof call?.function?.name !== 'string') throw new RequestError(where, `${where} has to be {id, type: "function", function: {name, arguments}}`);
  const { id, index, function: { name, arguments: text, ...more }, ...rest } = call;
  if (Array.isArray(text) || !['undefined', 'object', 'string'].includes(typeof text)) throw new RequestError(where, `${where} has arguments that are neither a text nor an object`);
  return { ...rest, type: 'function', function: { ...more, name, arguments: unpacked(text, where) }, ...((id ?? null) === null ? {} : { id }) };
}

/** Return the texts of a content in one, with the marker in place of each image. */
function textOf(content, where, marker) {
  if (content === undefined || content === null || typeof content === 'string') return without(marker, content ?? '', where);
  if (!Array.isArray(content)) throw new RequestError(where, `${where} has to be a text or a list of parts`);
  return content.map((part, index) => {
    if (part?.type === IMAGE && marker !== null) return marker;
    const text = part?.[TEXTS[part?.type]], known = marker === null ? 'only text is' : 'only text and images are';
    if (typeof text !== 'string') throw new RequestError(`${where}[${index}]`, `${where}[${index}] has type ${part?.type}; ${known} understood`);
    return without(marker, text, `${where}[${index}].text`);
  }).join('');
}

/** Return the text. Throw RequestError if it has the marker, which only images may have. */
function without(marker, text, where) {
  if (marker !== null && text.includes(marker)) throw new RequestError(where, `${where} has the text ${JSON.stringify(marker)}, which stands for an image; leave it out, or write it otherwise`);
  return text;
}

/** Return a message whose content is a list of parts if the content has images or `always` is true, otherwise the message itself. */
function parted(message, marker, always) {
  const texts = marker === null ? [message.content] : message.content.split(marker);
  if (texts.length === 1 && !always) return message;
  const content = texts.flatMap((text, i) => [...(i > 0 ? [{ type: 'image' }] : []), ...(text === '' ? [] : [{ type: 'text', text }])]);
  return { ...message, content };
}

/** Parse the arguments of a call, because templates read an object. Arguments that were cut off stay a string. */
function unpacked(text, where) {
  if (typeof text !== 'string' || text === '') return text || {};
  try { return parsedJson(text); } catch (error) {
    if (error instanceof SyntaxError) return text;
    throw new RequestError(where, `${where} has arguments in which ${error.message}`);
  }
}
