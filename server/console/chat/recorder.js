/* Record a message for a model that hears: a button, and while the microphone records a bar with its level, the time, and a button that
   discards the recording. */

import {h, icon, iconButton, toast} from "../core/dom.js";
import {record, showLevel} from "./microphone.js";

export class Recorder {
  #recording = null;  // while the microphone records
  #isOpening = false;  // while the browser asks whether the page may use the microphone
  #isDiscarded = false;
  #count = 0;

  /* `listens` says whether the model hears, `room` how many seconds of audio the message still takes; `take` gets a recording as a File;
     `changed` is called when recording begins or ends. */
  constructor(button, bar, {listens, room, take, changed}) {
    this.button = button;
    this.bar = bar;
    this.listens = listens;
    this.room = room;
    this.take = take;
    this.changed = changed;
    this.level = h("i");
    this.time = h("span", {class: "number", role: "timer", "aria-label": "Recorded time"});
    bar.append(h("span", {class: "track", role: "img", "aria-label": "Level of the microphone"}, this.level), this.time,
      iconButton("trash", "Discard the recording", () => this.#discard(), {class: "icon-button small"}));
    button.addEventListener("click", () => this.#recording ? this.stop() : this.#begin());
  }

  get isRecording() {
    return this.#recording !== null;
  }

  /* Offer to record if the model hears. A running recording can be stopped, also if another model was chosen. */
  show() {
    const isRunning = this.isRecording, label = isRunning ? "Stop and attach" : "Record";
    this.button.hidden = !isRunning && !this.listens();
    this.button.replaceChildren(icon(isRunning ? "stop" : "microphone"));
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.disabled = this.#isOpening;
    this.bar.hidden = !isRunning;
  }

  /* End the recording and keep it. */
  stop() {
    this.#recording?.stop();
  }

  #discard() {
    this.#isDiscarded = true;
    this.stop();
  }

  async #begin() {
    const most = this.room();
    if (most < 1) return toast("The message takes no further recording: send it, or remove something.");
    this.#isDiscarded = false;
    this.#isOpening = true;
    this.show();
    try {
      let hide = () => {};
      this.#recording = await record((sound, isOver) => {
        hide();
        this.#end(sound);
        if (isOver) toast(`The recording ended after ${most} s, because a message takes no more.`);
      }, most);
      hide = this.#showProgress(this.#recording.stream);
    } catch (error) {
      this.#discard();
      toast(error.message);
    }
    this.#isOpening = false;
    this.show();
    this.changed();
  }

  /* Show level and time, until the returned function is called. */
  #showProgress(stream) {
    const began = performance.now(), hideLevel = showLevel(stream, this.level);
    const showTime = () => { this.time.textContent = timeOf((performance.now() - began) / 1000); };
    const timer = setInterval(showTime, 250);
    showTime();
    return () => {
      clearInterval(timer);
      hideLevel();
    };
  }

  #end(sound) {
    this.#recording = null;
    this.show();
    this.changed();
    if (this.#isDiscarded) return;
    this.#count += 1;
    this.take(new File([sound], `Recording ${this.#count}`, {type: sound.type || "audio/webm"}));
  }
}

const timeOf = seconds => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
