/* Dictation: record speech with the microphone, let a model of the server transcribe it, and write the transcript where the cursor is. */

import {ask} from "../core/api.js";
import {icon, toast} from "../core/dom.js";
import {asWav, record} from "./microphone.js";

export class Dictation {
  #recording = null;  // while the microphone records
  #asked = null;  // the id of the model that transcribes the recording, and the place where it is written
  #isBusy = false;  // while the microphone opens, or the server transcribes
  #isDiscarded = false;  // whether the page was left while the microphone opened

  /* `model` returns the model that transcribes, or null; `place` returns where the recording belongs; `write` takes a transcript and the place. */
  constructor(button, {model, place, write}) {
    this.button = button;
    this.model = model;
    this.place = place;
    this.write = write;
    button.addEventListener("click", () => this.#recording ? this.stop() : this.#begin());
  }

  /* End the recording and transcribe it. If the browser still asks for the microphone, begin none. */
  stop() {
    if (this.#recording) this.#recording.stop();
    else this.#isDiscarded = true;
  }

  /* Offer dictation if the server and the browser can do it. Browsers open the microphone only on pages from this machine or over TLS. A running
     recording can be stopped, also if the model is gone. */
  show() {
    const isRunning = this.#recording !== null || this.#isBusy;
    this.button.hidden = !isRunning && (!this.model() || !navigator.mediaDevices?.getUserMedia);
    const label = this.#recording ? "Stop and write" : "Dictate";
    this.button.replaceChildren(icon(this.#recording ? "stop" : "microphone"));
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.disabled = this.#isBusy;
  }

  async #begin() {
    this.#asked = {model: this.model()?.id ?? "", place: this.place()};
    this.#isDiscarded = false;
    this.#setBusy(true);
    try {
      this.#recording = await record(sound => {
        this.#recording = null;
        if (this.#isDiscarded) this.show();
        else this.#transcribe(sound);
      });
      if (this.#isDiscarded) {
        this.#recording.stop();
        toast("Nothing is recorded, because you left the chat while the browser asked for the microphone.");
      }
    } catch (error) {
      toast(error.message);
    }
    this.#setBusy(false);
  }

  async #transcribe(sound) {
    const {model, place} = this.#asked;
    this.#setBusy(true);
    try {
      const form = new FormData();
      form.append("model", model);
      form.append("file", (await asWav(sound)).wav, "dictation.wav");
      const text = (await ask("/v1/audio/transcriptions", {method: "POST", body: form})).text.trim();
      if (text) this.write(text, place);
      else toast("Nothing was heard.");
    } catch (error) {
      toast(`The recording could not be transcribed: ${error.message}`);
    }
    this.#setBusy(false);
  }

  #setBusy(isBusy) {
    this.#isBusy = isBusy;
    this.show();
  }
}
