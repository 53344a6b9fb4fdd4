/* What pages beside the chat have in common: a head, and the way they say that something is wrong. */

import {h, icon} from "./dom.js";

export function pageHead(title, ...tools) {
  return h("header", {class: "bar"},
    h("button", {type: "button", class: "icon-button only-narrow", "data-icon": "menu", "data-action": "menu", "aria-label": "Menu", "aria-expanded": "false", "aria-controls": "sidebar"}),
    h("h1", {}, title), h("span", {class: "grow"}), ...tools);
}

/* A button of the head, which on a phone is its icon alone. */
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
