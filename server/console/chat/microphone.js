/* Open the microphone, record with it, and turn sound that the browser reads into WAV, which every server can decode without further packages. */

const RATE = 16_000;  // samples per second, as models hear them
export const WAV_BYTES = 2 * RATE;  // bytes of a second of sound
const HEAD_BYTES = 44;  // bytes before the samples of a WAV file
export const MOST_S = 150;  // longest recording: 4.8 MB as WAV, which base64 makes 6.4 MB, and servers accept bodies of 8 MiB
const REASONS = {
  NotAllowedError: "the browser does not allow this page to use it; allow it in the settings of this site",
  NotFoundError: "there is none; connect one",
  NotReadableError: "the system does not give it to the browser; another program may use it",
};

/* Open the microphone and record until `stop` of the returned recording is called, for at most `most` seconds. Then call `ended` with the sound,
   and with whether the time was over. Throw an Error that says why this is impossible. */
export async function record(ended, most = MOST_S) {
  let stream = null;
  try {
    if (!navigator.mediaDevices?.getUserMedia) throw new Error("browsers open it only for pages from this machine or over TLS");
    stream = await navigator.mediaDevices.getUserMedia({audio: true});
    return begun(stream, ended, most);
  } catch (error) {
    release(stream);
    throw new Error(`The microphone cannot be used: ${REASONS[error.name] ?? error.message}.`);
  }
}

function begun(stream, ended, most) {
  const parts = [], recorder = new MediaRecorder(stream);
  let timer = 0, isOver = false;
  const stop = () => recorder.state === "inactive" || recorder.stop();
  recorder.addEventListener("dataavailable", event => parts.push(event.data));
  recorder.addEventListener("stop", () => {
    clearTimeout(timer);
    release(stream);
    ended(new Blob(parts, {type: recorder.mimeType}), isOver);
  });
  recorder.start();
  timer = setTimeout(() => { isOver = true; stop(); }, 1000 * most);
  return {stream, stop};
}

function release(stream) {
  for (const track of stream?.getTracks() ?? []) track.stop();
}

/* Show the level of a stream as the width of a bar, until the returned function is called. */
export function showLevel(stream, bar) {
  const context = new AudioContext(), analyser = context.createAnalyser(), samples = new Float32Array(analyser.fftSize);
  context.createMediaStreamSource(stream).connect(analyser);
  let frame = 0;
  const draw = () => {
    analyser.getFloatTimeDomainData(samples);
    const top = samples.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    bar.style.width = `${Math.round(100 * Math.min(1, Math.sqrt(top)))}%`;  // the root shows quiet speech, too
    frame = requestAnimationFrame(draw);
  };
  draw();
  return () => {
    cancelAnimationFrame(frame);
    context.close();
  };
}

/* Return the length of a file in seconds as it declares it, or NaN or Infinity if it does not. */
export const declaredSeconds = file => new Promise(resolve => {
  const address = URL.createObjectURL(file), sound = new Audio();
  sound.onloadedmetadata = sound.onerror = () => {
    URL.revokeObjectURL(address);
    resolve(sound.duration);
  };
  sound.preload = "metadata";
  sound.src = address;
});

/* Return a sound as a WAV file with one channel, and its length in seconds. */
export async function asWav(sound) {
  const heard = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await sound.arrayBuffer());  // at the rate of the context
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
  return {wav: new Blob([file.buffer], {type: "audio/wav"}), seconds: heard.duration};
}
