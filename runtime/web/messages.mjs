// Convert messages from the format of OpenAI's API to the format that chat templates read, as server/api/request/conversation.py does.

import { RequestError } from './request.mjs';

const ROLES = { developer: 'system', function: 'tool' };   // other names of the same roles
const TEXTS = { text: 'text', input_text: 'text', output_text: 'text', refusal: 'refusal' };   // type of a part -> the field with its text

export function forTemplate(messages) {
  if (!Array.isArray(messages) || messages.length === 0) throw new RequestError('messages', 'messages has to be a list with at least one message');
  return messages.map((message, index) => read(message, `messages[${index}]`));
}

function read(message, where) {
  if (typeof message?.role !== 'string') throw new RequestError(`${where}.role`, `${where} has no role; expected system, user, assistant or tool`);
  const { tool_calls: calls, ...rest } = message;
  const seen = { ...rest, role: ROLES[message.role] ?? message.role, content: textOf(message.content, `${where}.content`) };
  if (calls?.length) seen.tool_calls = calls.map((call) => ({ ...call, type: 'function', function: { ...call.function, arguments: unpacked(call.function.arguments) } }));
  else if ((message.content ?? null) === null && message.role !== 'assistant') throw new RequestError(`${where}.content`, `${where} has neither content nor tool_calls`);
  return seen;
}

function textOf(content, where) {
  if (content === undefined || content === null || typeof content === 'string') return content ?? '';
  if (!Array.isArray(content)) throw new RequestError(where, `${where} has to be a text or a list of parts`);
  return content.map((part, index) => {
    const text = part?.[TEXTS[part?.type]];
    if (typeof text !== 'string') throw new RequestError(`${where}[${index}]`, `${where}[${index}] has type ${part?.type}; only text is understood`);
    return text;
  }).join('');
}

/** Parse the arguments of a call, because templates read an object. Arguments that were cut off stay a string. */
function unpacked(text) {
  if (typeof text !== 'string') return text ?? {};
  try { return JSON.parse(text); } catch { return text; }
}
