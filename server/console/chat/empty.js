/* The contents of a chat before the first message. */

import {h} from "../core/dom.js";

const DEMO = [
  "What is the capital of France?",
  "What sound does a cow make?",
  "What is 23 plus 19?",
  "Tell me a story about a rabbit and a lantern.",
];

export function welcome(model, ask) {
  const context = model.max_model_len ? `${model.max_model_len.toLocaleString("en")} tokens of context` : "";
  if (model.id !== "demo") return h("div", {class: "empty"}, h("h2", {}, model.id), h("p", {}, `Ready, with ${context}.`));
  return h("div", {class: "empty"},
    h("h2", {}, "Ask the demo model"),
    h("p", {}, `It is tiny, answers at once, and knows animals, capitals, colours, sums and short stories. It has ${context}.`),
    h("ul", {class: "examples"}, DEMO.map(question => h("li", {}, h("button", {type: "button", onclick: () => ask(question)}, question)))));
}

export function continues(model) {
  return h("div", {class: "empty"},
    h("h2", {}, model.id),
    h("p", {}, `${model.id} has no chat template: it continues texts, and was not trained for conversations.`),
    h("p", {}, "Write the beginning of a text, such as: The capital of France is"));
}

export function noChat(model) {
  return h("div", {class: "empty"},
    h("h2", {}, model.id),
    h("p", {}, `${model.id} has no chat template: it continues texts, and was not trained for conversations.`),
    h("p", {}, "Choose another model above, or let it continue texts on the chat page."));
}

export function noModel() {
  return h("div", {class: "empty"},
    h("h2", {}, "No model is loaded"),
    h("p", {}, "Load one on the models page, or start the server with one: relaxserve serve MODEL."),
    h("p", {}, h("a", {class: "outline", href: "#/models"}, "Open models")));
}

export function trouble(error, {retry, enterKey}) {
  return h("div", {class: "empty", role: "alert"},
    h("h2", {}, error.needsKey ? "A key is needed" : "Something is wrong"),
    h("p", {}, sentence(error.message)),
    h("div", {class: "row"},
      error.needsKey && h("button", {type: "button", class: "primary", onclick: enterKey}, "Enter key"),
      h("button", {type: "button", class: "outline", onclick: retry}, "Try again")));
}

const sentence = text => `${text[0].toUpperCase()}${text.slice(1)}${/[.?!]$/.test(text) ? "" : "."}`;
