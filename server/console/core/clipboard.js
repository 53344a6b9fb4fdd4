/* Copying, with a sign that it was done. Pages of plain HTTP have no clipboard of their own unless they are on this machine. */

import {h, icon, iconButton, toast} from "./dom.js";

export function copyButton(label, text, attributes = {}) {
  const button = iconButton("copy", label, async () => {
    if (!await copy(text())) return toast("The browser lets nothing be copied.");
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  }, attributes);
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", {class: "unseen", value: text, "aria-hidden": "true"}), before = document.activeElement;
    document.body.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    before?.focus();
    return isDone;
  }
}
