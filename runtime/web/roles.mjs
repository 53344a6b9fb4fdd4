// Change a conversation that a chat template has refused, as server/text/templates/roles.py does: some templates take a system message only at
// the beginning, and demand that the user and the assistant take turns.

const BETWEEN = '\n\n';   // stands between the texts of messages that become one
const JOINED = ['system', 'user', 'assistant'], TEXTS = ['reasoning_content', 'thinking'];   // fields that are texts, beside the content

/**
 * Return the conversation in forms that more templates accept, those with fewer changes first: later system messages as the user's; messages
 * of one role joined; both; and the last two with the user's texts appended to the results before them.
 */
export function forms(messages) {
  const alone = withOneSystem(messages), [joined, both] = [messages, alone].map(withJoined), written = new Set([keyOf(messages)]);
  return [alone, joined, both, behindResults(joined), behindResults(both)].filter((form) => {
    const text = keyOf(form), isNew = form !== null && !written.has(text);
    written.add(text);
    return isNew;
  });
}

/** Return a text that equal conversations share. Arguments of calls may have a BigInt, which JSON lacks. */
const keyOf = (messages) => JSON.stringify(messages, (_, value) => (typeof value === 'bigint' ? String(value) : value));

/** Return the conversation with the system messages at its beginning as one, and each later one as a message of the user. */
function withOneSystem(messages) {
  const at = messages.findIndex(({ role }) => role !== 'system'), begin = at < 0 ? messages.length : at;
  const later = messages.slice(begin).map((message) => (message.role === 'system' ? { ...message, role: 'user' } : message));
  return [...(begin > 0 ? [one(messages.slice(0, begin))] : []), ...later];
}

/** Return the conversation with messages of one role that follow each other as one. Nothing is joined to a message with calls. */
function withJoined(messages) {
  const groups = [];
  for (const message of messages) {
    const before = groups.at(-1)?.at(-1);
    if (before?.role === message.role && JOINED.includes(message.role) && !before.tool_calls?.length) groups.at(-1).push(message);
    else groups.push([message]);
  }
  return groups.map(one);
}

/** Return the conversation with the user's messages behind the result of a call appended to it, or null if one of them has more than text. */
function behindResults(messages) {
  const groups = [];
  for (const message of messages) {
    if (groups.at(-1)?.[0].role === 'tool' && message.role === 'user') {
      if (typeof message.content !== 'string') return null;   // templates write a result as a text, so an image in it would be lost
      groups.at(-1).push(message);
    } else groups.push([message]);
  }
  return groups.map((group) => (group.length > 1 ? { ...group[0], content: contentOf(group) } : group[0]));
}

/** Return messages of one role as one message. */
function one(group) {
  if (group.length === 1) return group[0];
  const made = Object.fromEntries(group.flatMap(Object.entries));   // `assign` would take the field __proto__ for the prototype
  for (const name of TEXTS) {
    const texts = group.map((message) => message[name]).filter((text) => typeof text === 'string' && text !== '');
    if (texts.length > 0) made[name] = texts.join(BETWEEN);
  }
  return { ...made, content: contentOf(group) };
}

/** Return the contents of messages as one: a text if all are texts, otherwise a list of parts. */
function contentOf(group) {
  const contents = group.map(({ content }) => content).filter((content) => content?.length);
  if (contents.length < 2) return contents[0] ?? group.at(-1).content;
  if (contents.every((content) => typeof content === 'string')) return contents.join(BETWEEN);
  const made = [], isText = (part) => part?.type === 'text';
  for (const content of contents) {
    const more = typeof content === 'string' ? [{ type: 'text', text: content }] : content.map((part) => ({ ...part }));
    // The separator is part of a text beside it: some templates trim each part, and would lose it.
    if (isText(made.at(-1))) made.at(-1).text += BETWEEN + (isText(more[0]) ? more.shift().text : '');
    else if (made.length > 0 && isText(more[0])) more[0].text = BETWEEN + more[0].text;
    made.push(...more);
  }
  return made;
}
