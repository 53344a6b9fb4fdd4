/* Files that are attached to a message. Texts are sent within the message, images as parts of it if the model has vision; other kinds of files
   are refused by name. */

import {h, iconButton, toast} from "../core/dom.js";
import {bytes} from "../core/format.js";

const MOST_BYTES = 512 * 1024;  // largest text file
const MOST_IMAGE_BYTES = 1024 * 1024;  // largest image that is sent; a larger one is made smaller
const MOST_IMAGES_BYTES = 4 * 1024 * 1024;  // largest sum of the images of a message: servers accept bodies of 8 MiB, and base64 adds a third
const LONGEST_EDGE = 1536;  // pixels of the longest edge of an image that is made smaller
const IMAGE = /^image\/(png|jpeg|webp|gif)$/;
const DATA_URL = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;
const MOST_FILES = 16;
const FENCE = "```";

/* Return the file as {name, text}, or as {name, image} with a data: URL. Throw an Error that names the file if it cannot be attached. */
export async function readAttachment(file, model) {
  const kinds = model?.sees ? "texts and images" : "texts";
  if (IMAGE.test(file.type) && model?.sees) return readImage(file);
  if (/^(image|audio|video)\//.test(file.type)) throw new Error(`${file.name} is of type ${file.type}; only ${kinds} can be attached`);
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

async function readImage(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} cannot be read as an image`);
  }
  if (file.size <= MOST_IMAGE_BYTES) return {name: file.name, image: await asDataUrl(file)};
  const {width, height} = bitmap, scale = Math.min(1, LONGEST_EDGE / Math.max(width, height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))), context = canvas.getContext("2d");
  context.fillStyle = "white";  // fills transparent places, as the server does for the model
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return {name: file.name, image: await asDataUrl(await canvas.convertToBlob({type: "image/jpeg", quality: .9}))};
}

const asDataUrl = blob => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/* Return the image if it is the URL of one, else null. Conversations from files are foreign. */
export const imageOf = value => typeof value === "string" && DATA_URL.test(value) ? value : null;

export const imagesOf = (files = []) => files.filter(file => file.image);

/* Return the content of a message as the API takes it: a text, or parts if there are images. `part` makes a part of an image or a text. */
export function contentOf(content, files, part) {
  const text = withFiles(content, files), images = imagesOf(files);
  return images.length ? [...images.map(file => part.image(file.image)), ...text ? [part.text(text)] : []] : text;
}

/* Return the text of a message as the model reads it: each text file in a fence that is longer than any in the file, then what was written. */
export function withFiles(content, files = []) {
  return [...files.filter(file => !file.image).map(({name, text}) => {
    const fence = FENCE + "`".repeat(Math.max(0, ...[...text.matchAll(/`{3,}/g)].map(([found]) => found.length - FENCE.length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  }), content].filter(Boolean).join("\n\n");
}

export function fileList(files, drop = null) {
  return h("ul", {class: "files"}, files.map(file => h("li", {class: [file.image ? "picture" : "pill", drop && "with-button"].filter(Boolean).join(" ")},
    file.image ? h("img", {src: file.image, alt: file.name, title: file.name}) : `${file.name}, ${bytes(new Blob([file.text]).size)}`,
    drop && iconButton("close", `Remove ${file.name}`, () => drop(file), {class: "icon-button small"}))));
}

/* The attachments of the message that is being written: chosen with the button, photographed, dropped on the pane, or pasted. */
export class Attachments {
  files = [];
  #reading = 0;  // files that were chosen and are not read yet

  /* `model` returns the model that will read the message. */
  constructor(form, pane, {model, changed}) {
    this.model = model;
    this.changed = changed;
    this.list = form.querySelector(".attached");
    this.button = form.querySelector("[data-action=attach]");
    this.camera = form.querySelector("[data-action=photograph]");
    for (const button of [this.button, this.camera]) {
      const input = form.querySelector(`#${button.getAttribute("aria-controls")}`);
      button.addEventListener("click", () => input.click());
      input.addEventListener("change", () => { this.#take(input.files); input.value = ""; });
    }
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

  /* Show what the model can read. */
  show() {
    const sees = Boolean(this.model()?.sees);
    this.camera.hidden = !sees;
    this.button.title = sees ? "Attach text files and images" : "Attach text files";
    this.button.setAttribute("aria-label", this.button.title);
  }

  get isReading() {
    return this.#reading > 0;
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
      this.#reading += 1;
      this.changed();
      try {
        this.#add(await readAttachment(file, this.model()));
      } catch (error) {
        toast(`${error.message}.`);
      }
      this.#reading -= 1;
    }
    this.#show();
  }

  #add(file) {
    const files = [...this.files, file], size = imagesOf(files).reduce((sum, {image}) => sum + image.length * 3 / 4, 0);
    if (files.length > MOST_FILES) throw new Error(`${file.name} is one file too many; expected at most ${MOST_FILES}`);
    if (file.image && size > MOST_IMAGES_BYTES) throw new Error(`${file.name} is too much: the images have ${bytes(size)}; expected at most ${bytes(MOST_IMAGES_BYTES)}`);
    this.files = files;
  }

  #show() {
    this.list.replaceChildren(...this.files.length ? [fileList(this.files, file => { this.files = this.files.filter(other => other !== file); this.#show(); })] : []);
    this.changed();
  }
}
