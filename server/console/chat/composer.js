/* The field for writing a message, and the share of the context that the conversation uses. */

import {h, icon} from "../core/dom.js";

export class Composer {
  #isRunning = false;
  #isReady = false;

  /* `isEmpty` says whether a message without a text has nothing else to send, `isReading` whether an attachment is still being read or recorded; `up` is called for the key Up in an empty field. */
  constructor(form, {send, stop, draft = () => {}, isEmpty = () => true, isReading = () => false, up = () => {}}) {
    this.isEmpty = isEmpty;
    this.isReading = isReading;
    this.form = form;
    this.field = form.querySelector("textarea");
    this.button = form.querySelector(".send");
    this.context = form.querySelector(".context");
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (this.#isRunning) return stop();
      const text = this.field.value.trim();
      if ((!text && isEmpty()) || isReading() || !this.#isReady) return;
      this.text = "";
      send(text);
    });
    this.field.addEventListener("input", () => { this.#fit(); draft(); });
    this.field.addEventListener("keydown", event => {
      if (event.key === "ArrowUp" && !this.field.value && !this.#isRunning) {
        event.preventDefault();
        up();
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.#isRunning) form.requestSubmit();
    });
  }

  get text() {
    return this.field.value;
  }

  set text(text) {
    this.field.value = text;
    this.#fit();
  }

  /* Put a text where the cursor is. */
  insert(text) {
    this.field.setRangeText(text, this.field.selectionStart, this.field.selectionEnd, "end");
    this.field.dispatchEvent(new Event("input"));
    this.field.focus();
  }

  focus() {
    if (matchMedia("(hover: hover)").matches) this.field.focus();  // on a phone the keyboard would cover the page
  }

  show({isRunning, isReady, continues}) {
    if (continues !== undefined) this.field.placeholder = continues ? "Begin a text" : "Ask something";
    if (isRunning !== this.#isRunning) {
      this.button.replaceChildren(icon(isRunning ? "stop" : "send"));
      this.button.title = isRunning ? "Stop" : "Send";
      this.button.setAttribute("aria-label", this.button.title);
    }
    this.#isRunning = isRunning;
    this.#isReady = isReady;
    this.enable();
  }

  /* Show how many tokens of the context the conversation uses. If the count is null, show nothing. */
  showContext(count, limit) {
    const {context} = this;
    context.hidden = count === null;
    if (count === null) return;
    const bar = h("i");
    bar.style.width = `${Math.min(100, 100 * count / limit)}%`;
    context.classList.toggle("full", count > limit);
    context.setAttribute("aria-valuenow", Math.min(count, limit));
    context.setAttribute("aria-valuemax", limit);
    context.setAttribute("aria-valuetext", `${count} of ${limit} tokens`);
    context.replaceChildren(h("span", {class: "track"}, bar), `${count.toLocaleString("en")} of ${limit.toLocaleString("en")} tokens`);
  }

  #fit() {
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
    this.enable();
  }

  /* Enable the button if the message can be sent, or if an answer can be stopped. */
  enable() {
    this.button.disabled = !this.#isRunning && !(this.#isReady && !this.isReading() && (this.field.value.trim() || !this.isEmpty()));
  }
}
