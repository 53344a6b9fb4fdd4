// Transcribe a recording window by window, as server/api/speech/transcribe.py does: a window begins where the last complete segment ended,
// and is transcribed again at a higher temperature if its transcript repeats itself or is improbable.

import { HOP, RATE } from './sound.mjs';
import { Stamps, STAMP_S } from './stamps.mjs';

const STAMP_HOPS = 2, TEMPERATURES = [0, 0.2, 0.4, 0.6, 0.8, 1];
// A transcript is improbable below LEAST_LOGPROB, the mean log-probability of its tokens, and repeats itself if zlib shrinks it more than
// MOST_COMPRESSION times. A window is silent if the token for silence has a probability above MOST_SILENCE and the transcript is improbable.
// After a temperature above FORGETFUL, the next window does not see the text before it. MOST_BEFORE is the most tokens of that text.
const MOST_COMPRESSION = 2.4, LEAST_LOGPROB = -1, MOST_SILENCE = 0.6, FORGETFUL = 0.5, MOST_TOKENS = 224, MOST_BEFORE = 223;

/** `asked`: {language, task, temperature, seed, prompt}. `pause` is awaited between tokens; it may throw to end the work. */
export class Transcription {
  constructor(network, model, pieces, asked, pause) {
    Object.assign(this, { network, model, pieces, asked, pause, tokens: model.speech.tokens });
    this.temperatures = asked.temperature === 0 ? TEMPERATURES : [asked.temperature];
  }

  /** Return the language that is most probable at the beginning. */
  languageOf(recording) {
    const { network, tokens, model } = this, mask = new Uint8Array(model.vocab_size);
    network.hear(recording.piece(0, Math.min(model.speech.num_hops, recording.numHops)));
    network.append([tokens.start]);
    for (const id of Object.values(tokens.languages)) mask[id] = 1;
    const { token } = network.draw({ temperature: 0 }, undefined, mask);
    return Object.keys(tokens.languages).find((code) => tokens.languages[code] === token);
  }

  /** Yield the segments in order. */
  async *segments(recording) {
    const { tokens, model: { speech: { num_hops: most } } } = this;
    let earlier = [...this.asked.prompt];
    for (let seek = 0; seek < recording.numHops;) {
      const size = Math.min(most, recording.numHops - seek), offset = seek * HOP / RATE, best = await this.#window(recording.piece(seek, size), earlier);
      if (isSilent(best)) {
        seek += size;
        continue;
      }
      const { parts, hops } = cut(tokens, best.ids, size, offset);
      for (const { start, end, ids } of parts) {
        const text = this.#text(ids);
        if (text.trim() === '' || end <= start) continue;
        earlier.push(...ids);
        const { temperature, logprob, compression, silence } = best;
        yield { seek, start, end, text, tokens: ids, temperature, avg_logprob: logprob, compression_ratio: compression, no_speech_prob: silence };
      }
      if (best.temperature > FORGETFUL) earlier = [];
      seek += hops;
    }
  }

  /** Transcribe a window at the first temperature whose transcript is good. If none is good, take the most probable transcript, if possible among those that do not repeat themselves. */
  async #window(audio, earlier) {
    const attempts = [];
    this.network.hear(audio);
    for (const temperature of this.temperatures) {
      attempts.push(await this.#attempt(earlier, temperature));
      if (isGood(attempts.at(-1))) return attempts.at(-1);
    }
    const calm = attempts.filter(({ compression }) => compression <= MOST_COMPRESSION), chosen = calm.length > 0 ? calm : attempts;
    const best = chosen.reduce((most, one) => (one.logprob > most.logprob ? one : most));
    return { ...best, temperature: this.temperatures.at(-1) };
  }

  /** Transcribe the window that is heard, at one temperature. Return its tokens with what decides whether they are good. */
  async #attempt(earlier, temperature) {
    const { network, tokens, model, asked: { seed } } = this, prompt = this.#prompt(earlier), start = prompt.indexOf(tokens.start) + 1;
    const most = Math.min(MOST_TOKENS, model.max_context - prompt.length), stamps = new Stamps(tokens, model.vocab_size), ids = [];
    network.reset();
    network.append(prompt.slice(0, start));
    const silence = network.probability(tokens.silence);
    if (start < prompt.length) network.append(prompt.slice(start));
    let total = 0;
    while (ids.length < most) {
      const mask = stamps.mask(network.row()), { token, logprob: { logprob } } = network.draw({ temperature, seed, logprobs: 0 }, undefined, mask);
      if (token === tokens.end) break;
      total += logprob;
      ids.push(token);
      stamps.advance(token);
      if (ids.length < most) network.append([token]);
      await this.pause();
    }
    const text = this.#text(ids);
    return { ids, temperature, logprob: total / Math.max(ids.length, 1), silence, text, compression: await compressionOf(text.trim()) };
  }

  /** Return the tokens before the transcript: earlier text, and the tokens for language and task. */
  #prompt(earlier) {
    const { tokens, model, asked: { language, task } } = this, most = Math.min(MOST_BEFORE, Math.floor(model.max_context / 2) - 1);
    const before = earlier.length > 0 ? [tokens.before, ...earlier.slice(-most)] : [];
    return [...before, tokens.start, ...(Object.keys(tokens.languages).length > 0 ? [tokens.languages[language], tokens.tasks[task]] : [])];
  }

  /** Return the text of tokens without stamps. */
  #text(ids) {
    const bytes = ids.filter((id) => id < this.tokens.end).map((id) => this.pieces[id]), decoder = new TextDecoder('utf-8', { ignoreBOM: true });
    return bytes.map((piece) => decoder.decode(piece, { stream: true })).join('') + decoder.decode();
  }
}

const isSilent = ({ silence, logprob }) => silence > MOST_SILENCE && logprob < LEAST_LOGPROB;

const isGood = (attempt) => isSilent(attempt) || (attempt.compression <= MOST_COMPRESSION && attempt.logprob >= LEAST_LOGPROB);

/** Cut the tokens of a window of `size` hops, which begins at `offset` seconds, at its pairs of stamps. Return its parts, and the hops to the next window. */
export function cut(tokens, ids, size, offset) {
  const first = tokens.no_stamps + 1, isStamp = (token) => token >= first, time = (stamp) => offset + stamp * STAMP_S;
  const isWhole = ids.length > 1 && isStamp(ids.at(-1)) && !isStamp(ids.at(-2));
  const ends = ids.flatMap((token, i) => (i > 0 && isStamp(token) && isStamp(ids[i - 1]) ? [i] : []));
  if (ends.length === 0) {
    const last = ids.findLast(isStamp) ?? first;
    return { parts: [{ start: time(0), end: time(last > first ? last - first : Math.floor(size / STAMP_HOPS)), ids }], hops: size };
  }
  if (isWhole) ends.push(ids.length);
  const pieces = ends.map((end, i) => ids.slice(i === 0 ? 0 : ends[i - 1], end));
  const parts = pieces.map((piece) => ({ start: time(piece[0] - first), end: time(piece.at(-1) - first), ids: piece }));
  return { parts, hops: isWhole ? size : (pieces.at(-1).at(-1) - first) * STAMP_HOPS || size };
}

/** Write segments as subtitles in SRT or WebVTT. An arrow in a text would end the times of a subtitle. */
export function subtitles(segments, format) {
  const isSrt = format === 'srt', clock = (seconds) => {
    const time = new Date(Math.round(seconds * 1000)).toISOString().slice(11, 23), hours = Math.floor(seconds / 3600);
    return `${String(hours).padStart(2, '0')}${time.slice(2, 8)}${isSrt ? ',' : '.'}${time.slice(9)}`;
  };
  const blocks = segments.map(({ start, end, text }, i) => `${isSrt ? `${i + 1}\n` : ''}${clock(start)} --> ${clock(end)}\n${text.trim().replaceAll('-->', '->')}\n`);
  return (isSrt ? '' : 'WEBVTT\n\n') + blocks.join('\n');
}

/** Return how many times zlib shrinks a text: repetitions shrink much. */
async function compressionOf(text) {
  if (text === '') return 0;
  const bytes = new TextEncoder().encode(text), small = new Blob([bytes]).stream().pipeThrough(new CompressionStream('deflate'));
  return bytes.length / (await new Response(small).arrayBuffer()).byteLength;
}
