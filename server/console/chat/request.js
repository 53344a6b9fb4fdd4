/* Convert a branch of a conversation to a request, and the stream of its answer to a node. */

import {ask, stream} from "../core/api.js";
import {contentOf, mediaOf, withFiles} from "./attachments.js";
import {path} from "./conversation.js";
import {answerWithTools, serversOf} from "./mcp.js";
import {asFields, toolsOf} from "./options.js";

const LEAST_ROOM = 256;  // tokens reserved for an answer without a limit; at most a quarter of the context

const TOO_LONG = new Set(["context_length_exceeded", "body_too_large"]);  // the server's error codes for too many images or recordings
const CONTINUED = 256;  // tokens by which a text is continued if no limit is set: few base models end a text by themselves

const PARTS = {image: url => ({type: "image_url", image_url: {url}}), text: text => ({type: "text", text})};

export function messagesOf(nodes, options) {
  const system = options.system?.trim() ? [{role: "system", content: options.system}] : [];
  return [...system, ...nodes.flatMap(message)];
}

function message(node) {
  switch (node.role) {
    case "tool":
      return node.approve === undefined ? [{role: "tool", tool_call_id: node.call, content: node.content}] : [];
    case "user":
      return [{role: "user", content: contentOf(node.content, node.files, PARTS)}];
    default: {
      const calls = (node.calls ?? []).filter(call => !call.server).map(({id, name, arguments: given}) => ({id, type: "function", function: {name, arguments: given}}));
      if (!node.content && !calls.length) return [];  // the answer failed, or was stopped before it began
      return [{role: "assistant", content: node.content || null, ...(calls.length ? {tool_calls: calls} : {})}];
    }
  }
}

/* Return the number of tokens of the prompt for an answer to `nodes`. */
export async function countTokens(model, nodes, options, signal) {
  if (model.chats === false) return (await ask("/tokenize", {method: "POST", body: {model: model.id, prompt: textOf(nodes)}, signal})).count;
  const tools = toolsOf(options);
  const body = {model: model.id, messages: messagesOf(nodes, options), add_generation_prompt: true, ...(tools.length ? {tools} : {})};
  return (await ask("/tokenize", {method: "POST", body, signal})).count;
}

/* Return the newest nodes, as many as fit into the context. Whole exchanges are left out, so that the first remaining node is a question. The
   last exchange stays even if it does not fit. */
export async function fitted(nodes, model, options, signal) {
  const room = Math.min(options.max_tokens ?? LEAST_ROOM, Math.floor(model.max_model_len / 4));
  const count = async kept => {
    try {
      return await countTokens(model, kept, options, signal);
    } catch (error) {
      if (TOO_LONG.has(error.code)) return Infinity;
      throw error;
    }
  };
  const limit = model.max_model_len - room;
  if (await count(nodes) <= limit) return nodes;
  const starts = nodes.flatMap((node, at) => node.role === "user" && at > 0 ? [at] : []);
  let low = 0, high = starts.length;  // search for the fewest exchanges to leave out; the last one always stays
  while (low < high) {
    const middle = (low + high) >> 1;
    if (await count(nodes.slice(starts[middle])) <= limit) high = middle;
    else low = middle + 1;
  }
  return nodes.slice(starts[Math.min(low, starts.length - 1)] ?? 0);
}

/* Return the path and the body of the request for an answer to `nodes`. A model without a chat template continues their texts. */
function requestOf(nodes, model, options) {
  const stream = {stream: true, stream_options: {include_usage: true}};
  if (model.chats !== false) return ["/v1/chat/completions", {model: model.id, messages: messagesOf(nodes, options), ...stream, ...asFields(options)}];
  const fields = asFields({...options, tools: ""}), truncate = options.truncate === false ? {} : {truncate_prompt_tokens: -1};
  return ["/v1/completions", {model: model.id, prompt: textOf(nodes), max_tokens: CONTINUED, ...stream, ...truncate, ...fields}];
}

/* Return the text that a model without a chat template continues. A message after an answer begins a line. Throw an Error if there are images
   or recordings, which such a model does not read. */
export function textOf(nodes) {
  const media = nodes.flatMap(node => mediaOf(node.files));
  if (media.length) throw new Error(`The conversation has ${media[0].image ? "images" : "audio"}, and this model only reads text. Choose another model.`);
  return nodes.map(({role, content, files}, at) => role === "user" && at > 0 ? `\n${withFiles(content, files)}` : withFiles(content, files)).join("");
}

/* Request an answer and write it into `node` while it streams. Call `changed` after each change. An error is written into the node, too. */
export async function answer(conversation, node, model, {signal, changed}) {
  const {options} = conversation;
  const before = path(conversation, node.parent);
  let first = 0, usage = null;
  const began = performance.now();
  try {
    if (serversOf(options).length && model.chats !== false) {
      for await (const _ of answerWithTools(node, before, model, options, signal)) {
        if (node.content || node.reasoning || node.calls.length) first ||= performance.now();
        changed();
      }
      return;
    }
    const nodes = options.truncate === false || model.chats === false ? before : await fitted(before, model, options, signal);
    node.dropped = before.length - nodes.length;
    const [address, body] = requestOf(nodes, model, options);
    for await (const event of stream(address, {method: "POST", body, signal})) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      first ||= performance.now();
      take(node, choice);
      changed();
    }
    node.finish ??= "stop";
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else node.error = error.message;
    if (error.needsKey) node.needsKey = true;
  } finally {
    if (usage) node.usage = {prompt: usage.prompt_tokens, completion: usage.completion_tokens};
    if (first) node.figures = {waited: first - began, wrote: performance.now() - first};
    changed();
  }
}

/* Write what a choice of an event says into the node. */
function take(node, {delta = {}, text, finish_reason: finish}) {
  node.content += delta.content ?? text ?? "";
  node.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = node.calls[part.index] ??= {id: "", name: "", arguments: ""};
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (finish) node.finish = finish;
}

export const emptyAnswer = model => ({role: "assistant", content: "", reasoning: "", calls: [], model, finish: null});
