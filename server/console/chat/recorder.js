/* Record a message for a model that hears: a button, and while the microphone records a bar with its level, the time, and a button that
   discards the recording. */

import {h, icon, iconButton, toast} from "../core/dom.js";
import {record, showLevel} from "./microphone.js";

export class Recorder {
  #recording = null;  // while the microphone records
  #isOpening = false;  // while the browser asks whether the page may use the microphone
  #isDiscarded = false;
  #model = null;  // the model for which the recording began
  #count = 0;

  /* `model` returns the model that will read the message, `room` how many seconds of audio the message still takes; `isReading` says whether an
     attachment is still being read; `take` gets a recording as a File, and the model for which it began; `changed` is called when recording
     begins or ends. */
  constructor(button, bar, {model, room, isReading, take, changed}) {
    this.button = button;
    this.bar = bar;
    this.model = model;
    this.room = room;
    this.isReading = isReading;
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
    this.button.hidden = !isRunning && !this.model()?.listens;
    this.button.replaceChildren(icon(isRunning ? "stop" : "microphone"));
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.disabled = this.#isOpening || (!isRunning && this.isReading());  // what is read takes room in the message, too
    this.bar.hidden = !isRunning;
  }

  /* End the recording and keep it. If the browser still asks for the microphone, begin none. */
  stop() {
    if (this.#recording) this.#recording.stop();
    else this.#isDiscarded = true;
  }

  #discard() {
    this.#isDiscarded = true;
    this.stop();
  }

  async #begin() {
    const most = this.room();
    if (most < 1) return toast("The message takes no further recording: send it, or remove something.");
    this.#model = this.model();
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
      const isLess = this.isReading() || this.room() < most;
      if (this.#isDiscarded || isLess) {
        this.#discard();
        toast(`Nothing is recorded, because ${isLess ? "the message changed" : "you left the chat"} while the browser asked for the microphone.`);
      } else hide = this.#showProgress(this.#recording.stream);
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
    this.take(new File([sound], `Recording ${this.#count}`, {type: sound.type || "audio/webm"}), this.#model);
  }
}

const timeOf = seconds => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
