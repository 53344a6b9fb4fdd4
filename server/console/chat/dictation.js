/* Dictation: record speech with the microphone, let a model of the server transcribe it, and write the transcript where the cursor is. */

import {ask} from "../core/api.js";
import {icon, toast} from "../core/dom.js";

const RATE = 16_000;  // samples per second, as models hear them
const MOST_MS = 120_000;  // milliseconds of one recording: 4 MB as it is sent, and servers accept bodies of 8 MiB
const HEAD_BYTES = 44;  // of a WAV file

export class Dictation {
  #recorder = null;  // while it records
  #isBusy = false;  // while the microphone opens, or the server transcribes

  /* `model` returns the model that transcribes, or null; `write` takes a transcript. */
  constructor(button, {model, write}) {
    this.button = button;
    this.model = model;
    this.write = write;
    button.addEventListener("click", () => this.#recorder ? this.#recorder.stop() : this.#begin());
  }

  /* Offer dictation if the server and the browser can do it. Browsers open the microphone only on pages from this machine or over TLS. */
  show() {
    this.button.hidden = !this.model() || !navigator.mediaDevices?.getUserMedia;
    const label = this.#recorder ? "Stop and write" : "Dictate";
    this.button.replaceChildren(icon(this.#recorder ? "stop" : "microphone"));
    this.button.title = label;
    this.button.setAttribute("aria-label", label);
    this.button.disabled = this.#isBusy;
  }

  async #begin() {
    this.#setBusy(true);
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({audio: true});
    } catch (error) {
      toast(`The microphone cannot be used: ${error.message}.`);
      return this.#setBusy(false);
    }
    const parts = [], recorder = new MediaRecorder(stream);
    const timer = setTimeout(() => recorder.stop(), MOST_MS);
    recorder.addEventListener("dataavailable", event => parts.push(event.data));
    recorder.addEventListener("stop", () => {
      clearTimeout(timer);
      for (const track of stream.getTracks()) track.stop();
      this.#recorder = null;
      this.#transcribe(new Blob(parts, {type: recorder.mimeType}));
    });
    recorder.start();
    this.#recorder = recorder;
    this.#setBusy(false);
  }

  async #transcribe(recording) {
    this.#setBusy(true);
    try {
      const form = new FormData();
      form.append("model", this.model()?.id ?? "");
      form.append("file", await asWav(recording), "dictation.wav");
      const text = (await ask("/v1/audio/transcriptions", {method: "POST", body: form})).text.trim();
      if (text) this.write(text);
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
