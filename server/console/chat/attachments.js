/* Files that are attached to a message. Texts are sent within the message; other kinds of files are refused by name. */

import {h, iconButton, toast} from "../core/dom.js";
import {bytes} from "../core/format.js";

const MOST_BYTES = 512 * 1024;  // of one file
const MOST_FILES = 16;
const FENCE = "```";

/* Return the file as {name, text}. Throw an Error that names the file if it cannot be attached. */
export async function readAttachment(file) {
  if (/^(image|audio|video)\//.test(file.type)) throw new Error(`${file.name} is of type ${file.type}; only texts can be attached`);
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${bytes(file.size)}; expected at most ${bytes(MOST_BYTES)}`);
  let text;
  try {
    text = new TextDecoder("utf-8", {fatal: true}).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text in UTF-8; only texts can be attached`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text: it has zero bytes`);
  return {name: file.name, text};
}

/* Return the text of a message as the model reads it: each file in a fence that is longer than any in the file, then what was written. */
export function withFiles(content, files = []) {
  return [...files.map(({name, text}) => {
    const fence = FENCE + "`".repeat(Math.max(0, ...[...text.matchAll(/`{3,}/g)].map(([found]) => found.length - FENCE.length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  }), content].filter(Boolean).join("\n\n");
}

export function fileList(files, drop = null) {
  return h("ul", {class: "files"}, files.map(file => h("li", {class: drop ? "pill with-button" : "pill"}, `${file.name}, ${bytes(new Blob([file.text]).size)}`,
    drop && iconButton("close", `Remove ${file.name}`, () => drop(file), {class: "icon-button small"}))));
}

/* The attachments of the message that is being written: chosen with the button, dropped on the pane, or pasted. */
export class Attachments {
  files = [];

  constructor(form, pane, changed) {
    this.changed = changed;
    this.input = form.querySelector("input[type=file]");
    this.list = form.querySelector(".attached");
    form.querySelector("[data-action=attach]").addEventListener("click", () => this.input.click());
    this.input.addEventListener("change", () => { this.#take(this.input.files); this.input.value = ""; });
    pane.addEventListener("dragover", event => event.dataTransfer.types.includes("Files") && event.preventDefault());
    pane.addEventListener("drop", event => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.#take(event.dataTransfer.files);
    });
    form.addEventListener("paste", event => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#take(event.clipboardData.files);
    });
  }

  /* Return the files and forget them. */
  send() {
    const {files} = this;
    this.files = [];
    this.#show();
    return files;
  }

  async #take(chosen) {
    for (const file of [...chosen]) {
      try {
        if (this.files.length >= MOST_FILES) throw new Error(`${file.name} is one file too many; expected at most ${MOST_FILES}`);
        this.files = [...this.files, await readAttachment(file)];
      } catch (error) {
        toast(`${error.message}.`);
      }
    }
    this.#show();
  }

  #show() {
    this.list.replaceChildren(...this.files.length ? [fileList(this.files, file => { this.files = this.files.filter(other => other !== file); this.#show(); })] : []);
    this.changed();
  }
}
