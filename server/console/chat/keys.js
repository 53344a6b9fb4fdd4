/* The list of the console's keyboard shortcuts, and the dialog that shows it. */

import {h} from "../core/dom.js";

const KEYS = [
  ["Enter", "Send the message"],
  ["Shift + Enter", "Start a new line"],
  ["Up", "Edit the last question, if the field is empty"],
  ["Escape", "Stop the answer, close what is open"],
  ["Ctrl + Shift + O", "Start a new chat"],
  ["Ctrl + Shift + ,", "Copy the last answer"],
  ["Ctrl + Shift + .", "Ask again for the last answer"],
  ["Ctrl + K", "Search conversations"],
  ["Ctrl + /", "Show this list"],
];

export function openKeys() {
  if (document.querySelector("dialog[open]")) return;
  const dialog = h("dialog", {"aria-label": "Keys", onclose: () => dialog.remove()},
    h("h2", {}, "Keys"),
    h("dl", {class: "keys"}, KEYS.map(([key, about]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, about)))),
    h("div", {class: "row end"}, h("button", {type: "button", class: "outline", onclick: () => dialog.close()}, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
