/* A conversation is a tree of nodes. A repeated answer or an edited question begins a new branch.

   conversation: {id, title, created, updated, options, leaf, nodes: {id: node}}     `leaf` is the last node of the branch that is shown
   node: {id, parent, created, role, content, reasoning, calls, call, approve, items, model, finish, error, usage, figures, dropped}
     files: [{name, text}] of a user, the attached texts, and {name, image} or {name, audio} with a data: URL
     role: user | assistant | tool;   calls: [{id, name, arguments}] of an assistant;   call: the id of the call that a tool's node answers
     a call of an MCP server also has {server, output, error}, or {server, waits} until the user approves it: `approve` of a tool's node
     items: the answer as /v1/responses has it, if it came from there
     dropped: how many earlier messages were left out of the request for this answer, because they did not fit into the context */

export const newId = () => crypto.getRandomValues(new Uint32Array(3)).reduce((id, part) => id + part.toString(36), "");

export function newConversation(options) {
  const now = Date.now();
  return {id: newId(), title: "", created: now, updated: now, options, leaf: null, nodes: {}};
}

/* Add a node below `parent`, which may be null, and show its branch. */
export function add(conversation, parent, fields) {
  const node = {id: newId(), parent, created: Date.now(), ...fields};
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = node.created;
  if (!conversation.title && node.role === "user") conversation.title = titleOf(node.content || node.files[0].name);
  return node;
}

/* Return the nodes of the shown branch, from the root to the leaf. */
export function path(conversation, leaf = conversation.leaf) {
  const nodes = [];
  for (let id = leaf; id !== null; id = conversation.nodes[id].parent) nodes.push(conversation.nodes[id]);
  return nodes.reverse();
}

/* Return the node and its alternatives at the same place, in order of creation. */
export function siblings(conversation, node) {
  return childrenOf(conversation, node.parent).filter(other => other.role === node.role && other.call === node.call);
}

/* Show the branch of this node, down to its latest leaf. */
export function choose(conversation, id) {
  for (let children = childrenOf(conversation, id); children.length; children = childrenOf(conversation, id)) id = children.at(-1).id;
  conversation.leaf = id;
}

/* Mark answers as interrupted that were unfinished when an earlier page was closed. Return the conversation. */
export function markInterrupted(conversation) {
  for (const node of Object.values(conversation.nodes)) if (node.finish === null && !node.error) node.finish = "interrupted";
  return conversation;
}

/* Return whether nothing more comes to a message: an answer that is interrupted here may still stream in another tab. */
export const hasEnded = ({finish, error}) => Boolean(error) || (finish !== null && finish !== "interrupted");

/* Take over what another tab has stored of a conversation. Messages and ends of answers that it lacks stay, and so does `running`, the
   answer that this tab writes. This tab stays at its branch, and follows only messages that continue it. Return whether the stored
   conversation lacks a message or an end: the other tab had not heard of it yet, and has overwritten it. */
export function takeOver(conversation, {nodes, leaf, ...rest}, running) {
  let isBehind = Object.keys(conversation.nodes).some(id => !(id in nodes));
  for (const node of Object.values(nodes)) {
    const own = conversation.nodes[node.id];
    if (node.id === running?.id) continue;
    if (own && hasEnded(own) && !hasEnded(node)) isBehind = true;
    else conversation.nodes[node.id] = Object.assign(own ?? {}, node);
  }
  const goesOn = conversation.leaf === null || path(conversation, leaf).some(node => node.id === conversation.leaf);
  Object.assign(conversation, rest, goesOn && !running ? {leaf} : {});
  return isBehind;
}

/* Return the tool calls of the last answer that have no result yet. */
export function openCalls(conversation) {
  const nodes = path(conversation), asked = nodes.findLast(node => node.role === "assistant");
  if (!asked?.calls?.length || nodes.slice(nodes.indexOf(asked) + 1).some(node => node.role === "user")) return [];
  const answered = new Set(nodes.filter(node => node.role === "tool").map(node => node.call));
  return asked.calls.filter(call => !answered.has(call.id) && (call.waits || !call.server));
}

/* Return whether a title, a message or the name of a file contains the query, in any case. An empty query matches every conversation. */
export function matches(conversation, query) {
  const wanted = query.trim().toLowerCase();
  return !wanted || conversation.title.toLowerCase().includes(wanted)
    || Object.values(conversation.nodes).some(node => node.content?.toLowerCase().includes(wanted) || node.files?.some(file => file.name.toLowerCase().includes(wanted)));
}

const childrenOf = (conversation, parent) =>
  Object.values(conversation.nodes).filter(node => node.parent === parent).sort((a, b) => a.created - b.created);

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}
