// Measures models in a page. `open(name, ...)` loads an export or a peer; `prefill(name)` and `decode(name)` return seconds per token, of one
// thread. `firstToken(folder)` returns the seconds from the first request for the runtime to the first token of an answer.

// Few tokens suffice: a peer takes up to two seconds for each.
const PROMPT = 128, DECODED = 8, FIRST_ID = 3;   // the ids before it are special
const LOGGED = 20;   // maximum number of lines of a peer's log that its error messages quote
const opened = {};

const ids = (count) => Array.from({ length: count }, (_, i) => FIRST_ID + i);

const loaders = {
  async relaxserve(folder) {
    const { fetched, loadModel } = await import(`./${folder}/loader.mjs`);
    const { network } = await loadModel({ ...fetched(new URL(`./${folder}/`, location.href)), threads: 1 });
    const timed = (count, run) => {
      const began = performance.now();
      run();
      return (performance.now() - began) / 1000 / count;
    };
    return {
      prefill() {
        network.reset();
        return timed(PROMPT, () => network.append(ids(PROMPT)));
      },
      decode() {
        network.reset();
        network.append(ids(PROMPT));
        return timed(DECODED, () => { for (let i = 0; i < DECODED; i++) network.append([network.draw({ temperature: 0 }).token]); });
      },
    };
  },

  async 'transformers.js'(folder, model) {
    const { AutoModelForCausalLM, Tensor, env } = await import(`./${folder}/transformers.js`);
    const at = (file) => new URL(`./${folder}/${file}`, location.href).href, runtime = 'ort-wasm-simd-threaded.asyncify';
    env.allowRemoteModels = false;
    env.allowLocalModels = true;
    env.localModelPath = './';
    env.useBrowserCache = env.useWasmCache = false;
    Object.assign(env.backends.onnx.wasm, { numThreads: 1, wasmPaths: { mjs: at(`${runtime}.mjs`), wasm: at(`${runtime}.wasm`) } });
    const decoder = await AutoModelForCausalLM.from_pretrained(model, { dtype: 'q4', device: 'wasm' });
    const numbers = (values) => new Tensor('int64', BigInt64Array.from(values, BigInt), [1, values.length]);
    const ones = (count) => numbers(new Array(count).fill(1));
    const append = async (tokens, length, cache) => {
      const { logits, ...present } = await decoder({ input_ids: numbers(tokens), attention_mask: ones(length), past_key_values: cache });
      const last = logits.data.subarray(-logits.dims.at(-1));
      const kept = Object.entries(present).map(([name, tensor]) => [name.replace('present', 'past_key_values'), tensor]);
      return { token: last.indexOf(last.reduce((most, value) => Math.max(most, value), -Infinity)), cache: Object.fromEntries(kept) };
    };
    return {
      async prefill() {
        const began = performance.now();
        await append(ids(PROMPT), PROMPT, null);
        return (performance.now() - began) / 1000 / PROMPT;
      },
      async decode() {
        let { token, cache } = await append(ids(PROMPT), PROMPT, null);
        const began = performance.now();
        for (let i = 1; i <= DECODED; i++) ({ token, cache } = await append([token], PROMPT + i, cache));
        return (performance.now() - began) / 1000 / DECODED;
      },
    };
  },

  async wllama(folder, file) {
    const { Wllama } = await import(`./${folder}/index.js`);
    const kept = [], keep = (...parts) => kept.push(parts.join(' '));
    const logger = { debug: keep, log: keep, warn: keep, error: keep };
    const model = new Wllama({ default: new URL(`./${folder}/wasm/wllama.wasm`, location.href).href }, { logger });
    const settings = { n_ctx: 2 * PROMPT, n_batch: PROMPT, n_threads: 1, n_gpu_layers: 0, n_parallel: 1 };
    const told = async (promise) => {
      try { return await promise; } catch (error) { throw new Error(`wllama: ${error.message}\n${kept.slice(-LOGGED).join('\n')}`); }
    };
    await told(model.loadModel([await (await fetch(file)).blob()], settings));
    const timings = async (count, most) => {
      const prompt = ids(count).map((id) => `w${id}`).join('');   // wllama takes only texts
      const body = { prompt, max_tokens: most, temperature: 0, cache_prompt: false, ignore_eos: true };
      return (await told(model.createCompletion(body))).timings;
    };
    return {
      prefill: async () => (await timings(PROMPT, 1)).prompt_per_token_ms / 1000,
      decode: async () => (await timings(PROMPT, DECODED)).predicted_per_token_ms / 1000,
    };
  },
};

export async function open(name, ...given) { opened[name] = await loaders[name](...given); }

export const prefill = async (name) => opened[name].prefill();

export const decode = async (name) => opened[name].decode();

export async function firstToken(folder) {
  const began = performance.now(), { RelaxServe } = await import(`./${folder}/relaxserve.mjs`);
  const client = await RelaxServe.load();
  const messages = [{ role: 'user', content: 'What is the capital of France?' }];
  for await (const { choices: [choice] } of await client.chat.completions.create({ messages, stream: true })) {
    if (!choice?.delta.content) continue;
    client.close();
    return (performance.now() - began) / 1000;
  }
  throw new Error('the answer is empty');
}
