/* The form in which the user enters the results of the model's tool calls. */

import {h} from "../core/dom.js";

export function answersForm(calls, send) {
  const fields = calls.map(call => h("textarea", {class: "code", rows: 2, required: true, placeholder: "What the tool returns, as text or JSON"}));
  return h("form", {class: "answers", onsubmit: event => {
    event.preventDefault();
    send(calls.map((call, at) => ({call, content: fields[at].value})));
  }},
  h("strong", {}, calls.length === 1 ? "The model waits for a tool." : "The model waits for tools."),
  calls.map((call, at) => h("label", {class: "field"}, `Result of ${call.name}`, fields[at])),
  h("div", {class: "row end"}, h("button", {class: "primary"}, calls.length === 1 ? "Send result" : "Send results")));
}
