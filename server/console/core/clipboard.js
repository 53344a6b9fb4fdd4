/* A button that copies a text and confirms it. Over plain HTTP, browsers offer the clipboard API only on localhost, so there is a fallback. */

import {h, icon, iconButton, toast} from "./dom.js";

/* Return the button. `text` returns the text to copy. */
export function copyButton(label, text, attributes = {}) {
  const button = iconButton("copy", label, async () => {
    if (!await copy(text())) return toast("The browser does not allow copying.");
    button.replaceChildren(icon("check"));
    setTimeout(() => button.replaceChildren(icon("copy")), 1500);
  }, attributes);
  return button;
}

/* Copy a text. Return whether the browser has allowed it. */
export async function copy(text) {
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
