// Sound as speech models hear it: samples, 16,000 per second, and the loudest energy of their spectrogram. runtime/spectrogram.py and
// server/audio describe both, and compute the same numbers.

export const RATE = 16000, HOP = 160;   // samples per second, and from one column of the spectrogram to the next
const WINDOW = 400, BEFORE = WINDOW / 2, BINS = WINDOW / 2 + 1, AROUND = (Math.ceil(WINDOW / HOP) - 1) * HOP;
// Tables are multiplied by this scale, and samples have this many bits. Both are rounded to integers, so all sums are exact in double precision.
const TABLE_SCALE = 2 ** 20, SAMPLE_BITS = 23;
const BLOCK = 500;   // hops between two pauses
const MEL_HZ = 200 / 3, BREAK_HZ = 1000, LOG_STEP = Math.log(6.4) / 27;

/** Return the samples of a file, a Blob or its bytes: the mean of its channels, in the formats that the browser plays. Return given samples unchanged. Throw TypeError where nothing decodes files. */
export async function samplesOf(file) {
  if (file instanceof Float32Array) return file;
  if (!globalThis.OfflineAudioContext) throw new TypeError(`file has to be a Float32Array of ${RATE} samples per second here, since nothing can decode other files`);
  const bytes = file instanceof Blob ? await file.arrayBuffer() : file, decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes);
  const channels = Array.from({ length: decoded.numberOfChannels }, (_, i) => decoded.getChannelData(i));
  if (channels.length === 1) return channels[0].slice();
  return Float32Array.from(channels[0], (_, i) => channels.reduce((total, channel) => total + channel[i], 0) / channels.length);
}

/** A recording, from which a model hears pieces of whole hops. */
export class Recording {
  /** `pause` is awaited from time to time; it may throw to end the work. */
  static async of(samples, numMels, pause) {
    const recording = new Recording(), whole = withSurroundings(samples);
    return Object.assign(recording, {
      numHops: Math.floor(samples.length / HOP), seconds: samples.length / RATE, samples: whole, loudest: await loudestEnergy(whole, numMels, pause),
    });
  }

  /** Return `size` hops from hop `begin`, with the samples around them. A piece has at least one hop, which is silent if the recording is shorter. */
  piece(begin, size) {
    const end = (begin + Math.max(size, 1)) * HOP + AROUND;
    return { samples: this.samples.subarray(begin * HOP, end), hops: Math.floor((Math.min(end, this.samples.length) - begin * HOP - AROUND) / HOP), loudest: this.loudest };
  }
}

/** Put samples before and after a recording: its reflection before it, silence after it. */
function withSurroundings(samples) {
  const whole = new Float32Array(BEFORE + Math.max(samples.length, 0) + AROUND), { length } = samples;
  if (length === 0) return whole;
  const period = Math.max(2 * (length - 1), 1), reflected = (i) => (i % period < length ? i % period : period - i % period);
  for (let i = 0; i < BEFORE; i++) whole[i] = samples[reflected(BEFORE - i)];
  whole.set(samples, BEFORE);
  return whole;
}

/** Return the largest mel energy of all hops. Table and samples are rounded to integers, so the sums are exact in any order. */
async function loudestEnergy(samples, numMels, pause) {
  const top = samples.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
  if (top === 0) return 0;
  const shift = SAMPLE_BITS - exponentOf(top), scale = 2 ** shift, filters = melFilters(numMels), { cosines, sines } = fourierTables();
  const even = new Float64Array(BEFORE + 1), odd = new Float64Array(BEFORE + 1), power = new Float64Array(BINS);
  let found = 0;
  for (let begin = 0; begin + WINDOW <= samples.length; begin += HOP) {
    if (begin % (BLOCK * HOP) === 0) await pause();
    const at = (n) => roundedEven(samples[begin + n] * scale);
    [even[0], even[BEFORE]] = [at(0), at(BEFORE)];
    for (let n = 1; n < BEFORE; n++) {   // both halves of a window meet the same cosines, and opposite sines
      const a = at(n), b = at(WINDOW - n);
      even[n] = a + b;
      odd[n] = a - b;
    }
    for (let k = 0, row = 0; k < BINS; k++, row += BEFORE + 1) {
      let real = 0, imaginary = 0;
      for (let n = 0; n <= BEFORE; n++) {
        real += cosines[row + n] * even[n];
        imaginary += sines[row + n] * odd[n];
      }
      power[k] = real * real + imaginary * imaginary;
    }
    for (const { first, weights } of filters) {
      let energy = 0;
      for (let i = 0; i < weights.length; i++) energy += weights[i] * power[first + i];
      if (energy > found) found = energy;
    }
  }
  return found * 2 ** (-2 * (20 + shift));
}

/** Return the exponent `e` with 2^(e-1) <= x < 2^e. */
function exponentOf(x) {
  let e = Math.floor(Math.log2(x)) + 1;
  while (2 ** e <= x) e++;
  while (2 ** (e - 1) > x) e--;
  return e;
}

/** Round to the nearest integer, and a half to the even one. */
function roundedEven(x) {
  const low = Math.floor(x), rest = x - low;
  return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
}

/** Return the first half of the rounded Fourier transform of a window weighted by Hann's function, [BINS, BEFORE + 1] each. The other half mirrors it. */
function fourierTables() {
  const cosines = new Float64Array(BINS * (BEFORE + 1)), sines = new Float64Array(BINS * (BEFORE + 1));
  for (let k = 0; k < BINS; k++) {
    for (let n = 0; n <= BEFORE; n++) {
      const hann = 0.5 - 0.5 * Math.cos(2 * Math.PI * n / WINDOW), turn = 2 * Math.PI * (k * n % WINDOW) / WINDOW, at = k * (BEFORE + 1) + n;
      cosines[at] = roundedEven(hann * Math.cos(turn) * TABLE_SCALE);
      sines[at] = roundedEven(hann * Math.sin(turn) * TABLE_SCALE);
    }
  }
  return { cosines, sines };
}

/** Return the mel filters: for each, its first bin and its weights from there on. */
function melFilters(numMels) {
  const last = melOf(RATE / 2), steps = Array.from({ length: numMels + 2 }, (_, i) => hertzOf(last * i / (numMels + 1)));
  return Array.from({ length: numMels }, (_, m) => {
    const [low, middle, high] = steps.slice(m, m + 3), weight = (bin) => Math.fround(
      Math.max(0, Math.min((bin * RATE / WINDOW - low) / (middle - low), (high - bin * RATE / WINDOW) / (high - middle))) * (2 / (high - low)));
    const weights = Array.from({ length: BINS }, (_, bin) => weight(bin)), first = weights.findIndex((w) => w > 0);
    return { first: Math.max(first, 0), weights: first < 0 ? [] : weights.slice(first, weights.findLastIndex((w) => w > 0) + 1) };
  });
}

const melOf = (hertz) => (hertz < BREAK_HZ ? hertz / MEL_HZ : BREAK_HZ / MEL_HZ + Math.log(hertz / BREAK_HZ) / LOG_STEP);

const hertzOf = (mel) => (mel < BREAK_HZ / MEL_HZ ? MEL_HZ * mel : BREAK_HZ * Math.exp(LOG_STEP * (mel - BREAK_HZ / MEL_HZ)));
