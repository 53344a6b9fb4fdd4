/* Dictation: record speech with the microphone, let a model of the server transcribe it, and write the transcript where the cursor is. */

import {ask} from "../core/api.js";
import {icon, toast} from "../core/dom.js";

const RATE = 16_000;  // samples per second, as models hear them
const MOST_MS = 120_000;  // milliseconds of one recording: 4 MB as it is sent, and servers accept bodies of 8 MiB
const HEAD_BYTES = 44;  // of a WAV file

export class Dictation {
  #recorder = null;  // while it records
  #asked = null;  // the id of the model that transcribes the recording, and the place where it is written
  #isBusy = false;  // while the microphone opens, or the server transcribes

  /* `model` returns the model that transcribes, or null; `place` returns where the recording belongs; `write` takes a transcript and the place. */
  constructor(button, {model, place, write}) {
    this.button = button;
    this.model = model;
    this.place = place;
    this.write = write;
    button.addEventListener("click", () => this.#recorder ? this.#recorder.stop() : this.#begin());
  }

  /* Offer dictation if the server and the browser can do it. Browsers open the microphone only on pages from this machine or over TLS. A running
     recording can be stopped, also if the model is gone. */
  show() {
    const isRunning = this.#recorder !== null || this.#isBusy;
    this.button.hidden = !isRunning && (!this.model() || !navigator.mediaDevices?.getUserMedia);
    const label = this.#recorder ? "Stop and write" : "Dictate";
    this.button.replaceChildren(icon(this.#recorder ? "stop" : "microphone"));
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.disabled = this.#isBusy;
  }

  async #begin() {
    this.#asked = {model: this.model()?.id ?? "", place: this.place()};
    this.#setBusy(true);
    let stream = null;
    try {
      stream = await navigator.mediaDevices.getUserMedia({audio: true});
      this.#recorder = this.#record(stream);
    } catch (error) {
      release(stream);
      toast(`The microphone cannot be used: ${error.message}.`);
    }
    this.#setBusy(false);
  }

  /* Return a recorder that runs. */
  #record(stream) {
    const parts = [], recorder = new MediaRecorder(stream);
    let timer = 0;
    recorder.addEventListener("dataavailable", event => parts.push(event.data));
    recorder.addEventListener("stop", () => {
      clearTimeout(timer);
      release(stream);
      this.#recorder = null;
      this.#transcribe(new Blob(parts, {type: recorder.mimeType}));
    });
    recorder.start();
    timer = setTimeout(() => recorder.stop(), MOST_MS);
    return recorder;
  }

  async #transcribe(recording) {
    const {model, place} = this.#asked;
    this.#setBusy(true);
    try {
      const form = new FormData();
      form.append("model", model);
      form.append("file", await asWav(recording), "dictation.wav");
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

function release(stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

/* Return a recording as a WAV file with one channel, which every server can read without further packages. */
async function asWav(recording) {
  const heard = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await recording.arrayBuffer());  // at the rate of the context
  const samples = new Float32Array(heard.length), file = new DataView(new ArrayBuffer(HEAD_BYTES + 2 * samples.length));
  for (let channel = 0; channel < heard.numberOfChannels; channel += 1) heard.getChannelData(channel).forEach((value, i) => { samples[i] += value / heard.numberOfChannels; });
  const text = (at, value) => [...value].forEach((letter, i) => file.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  file.setUint32(4, file.byteLength - 8, true);
  text(8, "WAVEfmt ");
  [[16, 16], [24, RATE], [28, 2 * RATE], [40, 2 * samples.length]].forEach(([at, value]) => file.setUint32(at, value, true));
  [[20, 1], [22, 1], [32, 2], [34, 16]].forEach(([at, value]) => file.setUint16(at, value, true));  // PCM, one channel, 16 bits
  text(36, "data");
  samples.forEach((value, i) => file.setInt16(HEAD_BYTES + 2 * i, 32767 * Math.max(-1, Math.min(1, value)), true));
  return new Blob([file.buffer], {type: "audio/wav"});
}
