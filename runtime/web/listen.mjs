// The part of chat.html for models that transcribe speech: take a file, or record the microphone.

const MOST_MS = 120_000;   // milliseconds of one recording

/** Let the page take files with speech and recordings, and write down each. */
export function listen(client, { part, shown }) {
  const [hearing, record, file, quit, status] = ['hearing', 'record', 'file', 'quit', 'status'].map(part);
  let recorder = null;

  const busy = (is) => {
    record.disabled = file.disabled = is;
    quit.hidden = !is;
  };

  /** Transcribe a file or a recording, and show the text as it arrives. */
  async function write(name, sound) {
    const abort = new AbortController(), message = shown('user', name) && shown('assistant', ''), began = performance.now();
    quit.onclick = () => abort.abort();
    busy(true);
    status.textContent = 'Listening …';
    try {
      let seconds = 0;
      for await (const { type, delta, text, usage } of await client.audio.transcriptions.create({ file: sound, stream: true }, { signal: abort.signal })) {
        message.textContent = type === 'transcript.text.done' ? text : message.textContent + delta;
        seconds = usage?.seconds ?? seconds;
      }
      status.textContent = `${seconds} s of speech in ${((performance.now() - began) / 1000).toFixed(1)} s, ${client.target}`;
    } catch (error) {
      status.textContent = error.name === 'AbortError' ? 'Stopped.' : `${name} cannot be transcribed: ${error.message}`;
    }
    busy(false);
  }

  /** Open the microphone and begin to record. Throw an error if the microphone cannot be used. */
  async function start() {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
    try {
      recorder = recording(stream);
      record.textContent = 'Stop recording';
    } catch (error) {
      release(stream);
      throw error;
    }
  }

  /** Return a recorder that runs, at most MOST_MS. When it stops, what it has recorded is transcribed. */
  function recording(stream) {
    const running = new MediaRecorder(stream), parts = [];
    let timer = 0;
    running.ondataavailable = ({ data }) => parts.push(data);
    running.onstop = () => {
      clearTimeout(timer);
      release(stream);
      recorder = null;
      record.textContent = 'Record';
      write('Recording', new Blob(parts, { type: parts[0]?.type }));
    };
    running.start();
    timer = setTimeout(() => running.stop(), MOST_MS);
    return running;
  }

  record.addEventListener('click', async () => {
    if (recorder !== null) return recorder.stop();
    record.disabled = file.disabled = true;   // while the microphone opens; a file can be chosen when the recording has ended
    try {
      await start();
    } catch (error) {
      status.textContent = `The microphone cannot be used: ${error.message}`;
    } finally {
      record.disabled = false;
      file.disabled = recorder !== null;
    }
  });
  file.addEventListener('change', () => {
    const [chosen] = file.files;
    if (chosen) write(chosen.name, chosen);
    file.value = '';
  });
  hearing.addEventListener('submit', (event) => event.preventDefault());
  hearing.hidden = false;
}

/** Close a microphone or a camera. */
export function release(stream) {
  for (const track of stream.getTracks()) track.stop();
}
