/* The parts that all pages except the chat share: a head, and the display of an error. */

import {h, icon} from "./dom.js";

export function pageHead(title, ...tools) {
  return h("header", {class: "bar"},
    h("button", {type: "button", class: "icon-button only-narrow", "data-icon": "menu", "data-action": "menu", "aria-label": "Menu", "aria-expanded": "false", "aria-controls": "sidebar"}),
    h("h1", {}, title), h("span", {class: "grow"}), ...tools);
}

/* Return a button for the head of a page. On a phone it shows only its icon. */
export function tool(name, label, attributes) {
  return h("button", {type: "button", class: "plain", title: label, ...attributes}, icon(name), h("span", {class: "label"}, label));
}

export function pageFault(app, error, retry) {
  return h("div", {class: "fault-box", role: "alert"},
    h("span", {}, error.message),
    error.needsKey && error.code !== "admin_disabled"
      ? h("button", {type: "button", class: "outline", onclick: () => app.enterKey()}, icon("key"), "Enter key")
      : h("button", {type: "button", class: "outline", onclick: retry}, "Try again"));
}
