/* The form in which the user enters the results of the model's tool calls, and approves calls of MCP servers. */

import {h} from "../core/dom.js";

/* When the user submits the form, call `send` with a list: {call, content} for each call, and also `approve` for a call that waited for approval. */
export function answersForm(calls, send) {
  const fields = new Map(calls.filter(call => !call.waits).map(call => [call, h("textarea", {class: "code", rows: 2, required: true, placeholder: "What the tool returns, as text or JSON"})]));
  const waiting = calls.filter(call => call.waits);
  const title = waiting.length ? `Shall ${waiting.map(call => `${call.name} of ${call.server}`).join(", ")} be called?`
    : calls.length === 1 ? "The model waits for a tool." : "The model waits for tools.";
  return h("form", {class: "answers", onsubmit: event => {
    event.preventDefault();
    const approve = event.submitter?.value !== "refuse";
    send(calls.map(call => fields.has(call) ? {call, content: fields.get(call).value}
      : {call, approve, content: approve ? "You approved this call." : "You refused this call."}));
  }},
  h("strong", {}, title),
  [...fields].map(([call, field]) => h("label", {class: "field"}, `Result of ${call.name}`, field)),
  h("div", {class: "row end"},
    waiting.length > 0 && h("button", {class: "outline", value: "refuse"}, "Refuse"),
    h("button", {class: "primary"}, waiting.length ? "Approve" : calls.length === 1 ? "Send result" : "Send results")));
}
