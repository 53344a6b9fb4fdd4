/* Request answers that use tools of MCP servers. The server calls these tools, so such answers come from /v1/responses. */

import {stream} from "../core/api.js";
import {contentOf, mediaOf} from "./attachments.js";
import {asFields} from "./options.js";

const PARTS = {image: url => ({type: "input_image", image_url: url}), text: text => ({type: "input_text", text})};

/* Return the names of the MCP servers of the options. */
export const serversOf = options => (options.mcp ?? "").split(",").map(name => name.trim()).filter(Boolean);

/* Request an answer to `nodes`, and write it into `node`. Yield after each change. Throw an Error if the request or the stream fails. */
export async function* answerWithTools(node, nodes, model, options, signal) {
  const byId = new Map();  // calls by the id of their item
  for await (const event of stream("/v1/responses", {method: "POST", body: bodyOf(nodes, model, options), signal})) {
    take(node, event, byId);
    yield;
    if (event.response && event.type !== "response.created" && event.type !== "response.in_progress") return;
    if (event.type === "error") throw new Error(event.message);
  }
}

function bodyOf(nodes, model, options) {
  const asked = new Set(nodes.flatMap(node => node.items ?? []).map(item => item.id));
  const {tools = [], max_tokens: longest, response_format: format, ...sampling} = asFields(options);
  const offers = serversOf(options).map(name => ({type: "mcp", server_label: name, require_approval: "always"}));
  return {
    model: model.id, input: nodes.flatMap(node => itemsOf(node, asked)), stream: true, store: false, ...sampling,
    tools: [...offers, ...tools.map(tool => ({type: "function", ...tool.function}))],
    truncation: options.truncate === false || nodes.some(node => mediaOf(node.files).length) ? "disabled" : "auto",  // the server truncates no conversation with images or audio
    ...(options.system?.trim() ? {instructions: options.system} : {}),
    ...(longest ? {max_output_tokens: longest} : {}),
    ...(format ? {text: {format: {type: "json_schema", ...format.json_schema}}} : {}),
  };
}

/* Return the items of a node. An answer that came from here has its own. `asked`: the ids of all items, since imported answers have none. */
function itemsOf(node, asked) {
  if (node.role === "user") return [{role: "user", content: contentOf(node.content, node.files, PARTS)}];
  if (node.role === "tool") {
    if (node.approve === undefined) return [{type: "function_call_output", call_id: node.call, output: node.content}];
    return asked.has(node.call) ? [{type: "mcp_approval_response", approval_request_id: node.call, approve: node.approve}] : [];
  }
  if (node.items) return node.items;
  const calls = (node.calls ?? []).filter(call => !call.server);
  return [
    ...(node.content ? [{role: "assistant", content: node.content}] : []),
    ...calls.map(({id, name, arguments: given}) => ({type: "function_call", call_id: id, name, arguments: given})),
  ];
}

/* Write what an event of the stream says into the node. `byId`: the calls that have begun, by the id of their item. */
function take(node, event, byId) {
  const {item} = event;
  switch (event.type) {
    case "response.output_text.delta":
      node.content += event.delta;
      break;
    case "response.reasoning_text.delta":
      node.reasoning += event.delta;
      break;
    case "response.mcp_call_arguments.delta":
    case "response.function_call_arguments.delta":
      byId.get(event.item_id).arguments += event.delta;
      break;
    case "response.output_item.added":
      if (item.type === "message" && node.content) node.content += "\n\n";
      if (item.type === "mcp_call" || item.type === "function_call") byId.set(item.id, open(node, item));
      break;
    case "response.output_item.done":
      if (item.type === "mcp_approval_request") open(node, item).waits = true;
      else if (item.type === "mcp_list_tools" && item.error) open(node, {...item, name: "list of tools", arguments: "{}"}).error = item.error;
      else if (byId.has(item.id)) close(byId.get(item.id), item);
      break;
    default:
      if (event.response) end(node, event.response);
  }
}

/* Add the call of an item to the node, and return the call. */
function open(node, item) {
  const call = {id: item.call_id ?? item.id, name: item.name, arguments: item.arguments};
  if (item.server_label) call.server = item.server_label;
  node.calls.push(call);
  return call;
}

function close(call, item) {
  call.arguments = item.arguments;
  if (item.output != null) call.output = item.output;
  if (item.error) call.error = item.error.message ?? item.error.content?.[0]?.text ?? String(item.error);
}

function end(node, response) {
  if (response.status === "in_progress") return;
  node.items = response.output.filter(item => item.type !== "reasoning");
  node.finish = response.status === "incomplete" ? "length" : "stop";
  if (response.error) node.error = response.error.message;
  if (response.usage) node.usage = {prompt: response.usage.input_tokens, completion: response.usage.output_tokens};
}
