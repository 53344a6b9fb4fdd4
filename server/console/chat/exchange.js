/* Write conversations as files and links, and read them. A link holds the shown branch itself, behind the #, which browsers send to no server. */

import {newConversation, newId, path} from "./conversation.js";
import {isAudio, isImage, mediaOf, withFiles} from "./attachments.js";
import {NUMBERS, TEXTS} from "./options.js";

const ROLES = new Set(["user", "assistant", "tool"]);
const MOST_NODES = 20_000;
const MOST_LINK_CHARS = 16_000;  // programs cut longer links
const MOST_CHARS = 8 << 20;  // largest unpacked link

export function asMarkdown(conversation) {
  const parts = path(conversation).map(node => {
    const calls = (node.calls ?? []).map(call => `\`\`\`json\n${JSON.stringify({name: call.name, arguments: call.arguments}, null, 2)}\n\`\`\`\n`);
    return `## ${{user: "You", assistant: node.model ?? "Assistant", tool: "Tool"}[node.role]}\n\n${[...mediaOf(node.files).map(markdownOf), withFiles(node.content, node.files), ...calls].filter(Boolean).join("\n\n")}\n`;
  });
  const system = conversation.options?.system?.trim() ? [`## System prompt\n\n${conversation.options.system.trim()}\n`] : [];
  return [`# ${conversation.title}\n`, ...system, ...parts].join("\n");
}

const markdownOf = ({name, image, audio}) => `${image ? "!" : ""}[${name.replace(/[[\]]/g, "")}](${image ?? audio})`;

export const asJson = conversation => JSON.stringify(conversation, null, 2);

export const fileName = conversation => conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";

/* Return a link to the shown branch, or null if it would be too long. */
export async function linkOf(conversation) {
  const nodes = path(conversation), branch = {...conversation, nodes: Object.fromEntries(nodes.map(node => [node.id, node]))};
  const data = await packed(JSON.stringify(branch));
  return data.length > MOST_LINK_CHARS ? null : `${new URL(document.baseURI).href.replace(/#.*$/, "")}#/shared/${data}`;
}

/* Return the conversation of a link's data. Throw an Error if it is damaged. */
export async function fromLink(data) {
  try {
    return parseConversation(await unpacked(data));
  } catch (error) {
    throw new Error(`the link holds no conversation, or not all of one: ${error.message}`);
  }
}

/* Return a new conversation with the contents of a file. The text is foreign, so every field is checked, and nodes get new ids. Throw an Error
   if the text holds no whole conversation. */
export function parseConversation(text) {
  const {title, options, leaf, nodes, created} = Object(JSON.parse(text));
  if (typeof nodes !== "object" || nodes === null) throw new Error("it has no messages");
  const entries = Object.entries(nodes);
  if (!entries.length || entries.length > MOST_NODES) throw new Error(`it has ${entries.length} messages; expected 1 to ${MOST_NODES}`);
  const ids = new Map(entries.map(([id]) => [id, newId()]));
  const conversation = newConversation(optionsOf(Object(options)));
  for (const [id, node] of entries) conversation.nodes[ids.get(id)] = nodeOf(Object(node), ids.get(id), ids);
  conversation.title = textOf(title).slice(0, 200) || "Imported conversation";
  conversation.created = Number.isFinite(created) ? created : conversation.created;
  conversation.leaf = ids.get(leaf);
  if (!conversation.leaf) throw new Error("its last message is absent");
  requireRoots(conversation);
  return conversation;
}

function nodeOf(node, id, ids) {
  if (!ROLES.has(node.role)) throw new Error(`a message has the role ${JSON.stringify(node.role)}; expected ${[...ROLES].join(", ")}`);
  const parent = node.parent === null || node.parent === undefined ? null : ids.get(node.parent);
  if (parent === undefined) throw new Error("a message follows one that is absent");
  const common = {id, parent, role: node.role, created: Number.isFinite(node.created) ? node.created : Date.now(), content: textOf(node.content)};
  if (node.role === "user") return {...common, files: listOf(node.files).map(fileOf)};
  if (node.role === "tool") {
    return {...common, call: textOf(node.call), name: textOf(node.name), ...typeof node.approve === "boolean" ? {approve: node.approve} : {}};
  }
  const calls = listOf(node.calls).map(call => ({id: textOf(call.id), name: textOf(call.name), arguments: textOf(call.arguments), ...ofServer(call)}));
  return {...common, reasoning: textOf(node.reasoning), calls, model: textOf(node.model), finish: textOf(node.finish) || "stop"};
}

function fileOf({name, text, image, audio}) {
  const common = {name: textOf(name)};
  if (image !== undefined && !isImage(image)) throw new Error(`the image ${JSON.stringify(common.name)} is not the URL of a PNG, JPEG, WebP or GIF`);
  if (audio !== undefined && !isAudio(audio)) throw new Error(`the recording ${JSON.stringify(common.name)} is not the URL of a WAV file`);
  if (image !== undefined) return {...common, image};
  return audio === undefined ? {...common, text: textOf(text)} : {...common, audio};
}

/* Throw an Error if messages follow each other in a circle. */
function requireRoots({nodes}) {
  const rooted = new Set([null]);  // the messages whose way to the root is known
  for (const id of Object.keys(nodes)) {
    const passed = new Set();
    for (let at = id; !rooted.has(at); at = nodes[at].parent) {
      if (passed.has(at)) throw new Error("its messages follow each other in a circle");
      passed.add(at);
    }
    for (const one of passed) rooted.add(one);
  }
}

function optionsOf(options) {
  const texts = TEXTS.filter(name => typeof options[name] === "string").map(name => [name, options[name]]);
  const numbers = NUMBERS.filter(({name}) => Number.isFinite(options[name])).map(({name}) => [name, options[name]]);
  return {...Object.fromEntries([...texts, ...numbers]), ...typeof options.truncate === "boolean" ? {truncate: options.truncate} : {}};
}

const textOf = value => typeof value === "string" ? value : "";
const listOf = value => Array.isArray(value) ? value.map(Object) : [];

async function packed(text) {
  const bytes = new Uint8Array(await new Response(new Blob([text]).stream().pipeThrough(new CompressionStream("deflate-raw"))).arrayBuffer());
  return btoa(Array.from(bytes, byte => String.fromCharCode(byte)).join("")).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

async function unpacked(data) {
  const bytes = Uint8Array.from(atob(data.replaceAll("-", "+").replaceAll("_", "/")), letter => letter.charCodeAt(0));
  const decoder = new TextDecoder("utf-8", {fatal: true});
  let text = "";
  for (const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader(); ;) {
    const {value, done} = await reader.read();
    if (done) return text + decoder.decode();
    text += decoder.decode(value, {stream: true});
    if (text.length > MOST_CHARS) throw new Error("it is too long");
  }
}

/* Return the fields of a call of an MCP server. One that waited for approval waits no longer, because the answer's items are not exchanged. */
function ofServer({server, output, error}) {
  if (!server) return {};
  return {server: textOf(server), ...(output === undefined ? {} : {output: textOf(output)}), ...(error ? {error: textOf(error)} : {})};
}
