/* Files that are attached to a message. Texts are sent within the message; images are parts of it if the model sees, and audio if it hears. Other
   kinds of files are refused by name. */

import {h, iconButton, toast} from "../core/dom.js";
import {bytes} from "../core/format.js";
import {asWav, declaredSeconds, MOST_S, WAV_BYTES} from "./microphone.js";

const MOST_BYTES = 512 * 1024;  // largest text file
const MOST_IMAGE_BYTES = 1024 * 1024;  // largest image that is sent; a larger one is made smaller
const MOST_AUDIO_BYTES = 64 * 1024 * 1024;  // largest file of audio, which becomes WAV of at most MOST_S
const MOST_MEDIA_BYTES = 5 * 1024 * 1024;  // largest sum of the images and the audio of a message: servers accept bodies of 8 MiB, and base64 adds a third
const LONGEST_EDGE = 1536;  // pixels of the longest edge of an image that is made smaller
const IMAGE = /^image\/(png|jpeg|webp|gif)$/;
const WRITTEN = new Set(["video/mp2t", "video/vnd.dlna.mpeg-tts", "image/svg+xml"]);  // types that systems give to texts: TypeScript (.ts) and SVG
const IMAGE_URL = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;
const AUDIO_URL = /^data:audio\/wav;base64,[A-Za-z0-9+/]+=*$/;
const LATE_S = 2;  // seconds by which a recorder may stop too late
const MOST_FILES = 16;
const FENCE = "```";

/* Return the file as {name, text}, or as {name, image} or {name, audio} with a data: URL. Throw an Error that names the file if it cannot be
   attached. */
export async function readAttachment(file, model) {
  if (IMAGE.test(file.type) && model?.sees) return readImage(file);
  if (/^audio\//.test(file.type) && model?.listens) return readAudio(file);
  if (/^(image|audio|video)\//.test(file.type) && !WRITTEN.has(file.type)) throw new Error(`${file.name} is of type ${file.type}; only ${kindsFor(model)} can be attached`);
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

/* Return in words what may be attached to a message for a model. */
function kindsFor(model) {
  const media = [...model?.sees ? ["images"] : [], ...model?.listens ? ["audio"] : []];
  return media.length ? `${["texts", ...media].slice(0, -1).join(", ")} and ${media.at(-1)}` : "texts";
}

async function readAudio(file) {
  if (file.size > MOST_AUDIO_BYTES) throw new Error(`${file.name} has ${bytes(file.size)}; expected at most ${bytes(MOST_AUDIO_BYTES)}`);
  requireShort(file, await declaredSeconds(file));  // before it is decoded, which takes memory
  let found;
  try {
    found = await asWav(file);
  } catch {
    throw new Error(`${file.name} cannot be read as audio`);
  }
  requireShort(file, found.seconds);
  return {name: file.name, audio: await asDataUrl(found.wav)};
}

/* Throw an Error if a recording is too long. A length that is not known passes. */
function requireShort(file, seconds) {
  if (Number.isFinite(seconds) && seconds > MOST_S + LATE_S) throw new Error(`${file.name} lasts ${Math.ceil(seconds)} s; expected at most ${MOST_S} s`);
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

/* Say whether a value is the URL of an image, or of a recording, that was attached. Conversations from files are foreign. */
export const isImage = value => typeof value === "string" && IMAGE_URL.test(value);
export const isAudio = value => typeof value === "string" && AUDIO_URL.test(value);

/* Return the images and the recordings among attached files. */
export const mediaOf = (files = []) => files.filter(file => file.image || file.audio);

/* Return about how many bytes the images and the recordings among files have: base64 has four characters for three bytes. */
const bytesOf = files => mediaOf(files).reduce((sum, {image, audio}) => sum + (image ?? audio).length * 3 / 4, 0);

/* Return the content of a message as the API takes it: a text, or parts if there are images or recordings. `part` makes a part of an image or a
   text; that of a recording is the same in all APIs. */
export function contentOf(content, files, part) {
  const text = withFiles(content, files), media = mediaOf(files);
  return media.length ? [...media.map(file => file.image ? part.image(file.image) : audioPart(file.audio)), ...text ? [part.text(text)] : []] : text;
}

const audioPart = url => ({type: "input_audio", input_audio: {data: url.slice(url.indexOf(",") + 1), format: "wav"}});

/* Return the text of a message as the model reads it: each text file in a fence that is longer than any in the file, then what was written. */
export function withFiles(content, files = []) {
  return [...files.filter(file => file.text !== undefined).map(({name, text}) => {
    const fence = FENCE + "`".repeat(Math.max(0, ...[...text.matchAll(/`{3,}/g)].map(([found]) => found.length - FENCE.length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  }), content].filter(Boolean).join("\n\n");
}

/* Return the list of attached files. If `drop` is given, each file has a button that calls it with the file. */
export function fileList(files, drop = null) {
  return h("ul", {class: "files"}, files.map(file => h("li", {class: [file.image ? "picture" : "pill", drop && "with-button"].filter(Boolean).join(" ")}, shown(file),
    drop && iconButton("close", `Remove ${file.name}`, () => drop(file), {class: "icon-button small"}))));
}

function shown({name, text, image, audio}) {
  if (image) return h("img", {src: image, alt: name, title: name});
  if (audio) return [h("span", {}, name), h("audio", {src: audio, controls: true, preload: "metadata", "aria-label": name})];
  return `${name}, ${bytes(new Blob([text]).size)}`;
}

/* The attachments of the message that is being written: chosen with the button, photographed, recorded, dropped on the pane, or pasted. */
export class Attachments {
  files = [];
  #reading = 0;  // files that were chosen and are not read yet

  /* `model` returns the model that will read the message; `isRecording` says whether a recording will be attached, which gets the room that is
     left; `changed` is called when files are attached, removed, or being read. */
  constructor(form, pane, {model, isRecording, changed}) {
    this.model = model;
    this.isRecording = isRecording;
    this.changed = changed;
    this.list = form.querySelector(".attached");
    this.button = form.querySelector("[data-action=attach]");
    this.camera = form.querySelector("[data-action=photograph]");
    for (const button of [this.button, this.camera]) {
      const input = form.querySelector(`#${button.getAttribute("aria-controls")}`);
      button.addEventListener("click", () => input.click());
      input.addEventListener("change", () => { this.take(input.files); input.value = ""; });
    }
    pane.addEventListener("dragover", event => event.dataTransfer.types.includes("Files") && event.preventDefault());
    pane.addEventListener("drop", event => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.take(event.dataTransfer.files);
    });
    form.addEventListener("paste", event => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.take(event.clipboardData.files);
    });
  }

  /* Show what the model can read. */
  show() {
    const model = this.model();
    this.camera.hidden = !model?.sees;
    this.button.title = `Attach ${kindsFor(model).replace("texts", "text files")}`;
    this.button.setAttribute("aria-label", this.button.title);
  }

  get isReading() {
    return this.#reading > 0;
  }

  /* Return how many seconds may still be recorded for the message. */
  get roomSeconds() {
    if (this.files.length >= MOST_FILES) return 0;
    return Math.min(MOST_S, Math.floor((MOST_MEDIA_BYTES - bytesOf(this.files)) / WAV_BYTES) - LATE_S);
  }

  /* Return the files and forget them. */
  send() {
    const {files} = this;
    this.files = [];
    this.#show();
    return files;
  }

  /* Read files, and attach them. Tell the user why a file cannot be attached. While something is recorded, attach nothing. `model` is the model
     for which they were chosen or recorded: another may be chosen before they are read. */
  async take(chosen, model = this.model()) {
    if (this.isRecording()) return toast("The recording takes the room that is left in the message: end it, then attach files.");
    for (const file of [...chosen]) {
      this.#reading += 1;
      this.changed();
      try {
        this.#add(await readAttachment(file, model));
      } catch (error) {
        toast(`${error.message}.`);
      }
      this.#reading -= 1;
    }
    this.#show();
  }

  #add(file) {
    const files = [...this.files, file], size = bytesOf(files);
    if (files.length > MOST_FILES) throw new Error(`${file.name} is one file too many; expected at most ${MOST_FILES}`);
    if (file.text === undefined && size > MOST_MEDIA_BYTES) {
      throw new Error(`${file.name} is too much: the images and the audio have ${bytes(size)}; expected at most ${bytes(MOST_MEDIA_BYTES)}`);
    }
    this.files = files;
  }

  #show() {
    this.list.replaceChildren(...this.files.length ? [fileList(this.files, file => { this.files = this.files.filter(other => other !== file); this.#show(); })] : []);
    this.changed();
  }
}
