/* Show what a load would take: the formats of its weights with bytes and quality, as soon as a source is named, and then the plan of its memory.
   A plan compiles the model, unless its program is in the cache; such a plan is made only if the user asks for it. */

import {ask} from "../core/api.js";
import {h} from "../core/dom.js";
import {bytes} from "../core/format.js";

const AFTER_MS = 500;  // milliseconds from the last change to the request

export const FORMS = ["auto", "auto-fast", "bf16", "f32", "int8", "int8-fast", "int8-32", "int8-64", "int8-128", "6bit", "5bit", "4bit", "int4-32", "int4-64", "int4-128"];

/* Plans at most one load at a time. */
export class Planner {
  #soon = null;
  #running = null;  // aborts the running plan, which then ends on the server, too
  #compared = "";  // the source of the formats in `formats`
  #isCached = false;  // whether a load of that source has stored what it compiled

  /* `formats`: the select of formats. `verdict`: the element for the plan. */
  constructor(formats, verdict) {
    this.formats = formats;
    this.verdict = verdict;
    this.#offer([]);
  }

  /* Stop the running plan, and plan a load soon. If `body` is null, show nothing instead. */
  later(body) {
    this.stop();
    if (!body) this.show();
    else this.#soon = setTimeout(() => this.#run(body, false), AFTER_MS);
  }

  stop() {
    clearTimeout(this.#soon);
    this.#running?.abort();
  }

  async now(body) {
    this.stop();
    await this.#run(body, true);
  }

  show(...children) {
    this.verdict.replaceChildren(...children);
  }

  refuse(error) {
    this.show(h("div", {class: "fault-box", role: "alert"}, h("span", {}, error.message)));
  }

  /* `mayCompile`: whether to plan a load whose program is not in the cache. */
  async #run(body, mayCompile) {
    const {signal} = this.#running = new AbortController();
    this.show(h("p", {class: "faint small"}, "Planning …"));
    try {
      if (body.source !== this.#compared) await this.#compare(body.source, signal);
      if (mayCompile || this.#isCached) this.show(verdictOf(await ask("/admin/models", {method: "POST", body: {...body, dry_run: true}, signal})));
      else this.show(h("p", {class: "faint small"}, "Its code is not in the cache. “What would it take?” compiles it and plans the whole memory."));
    } catch (error) {
      if (error.name !== "AbortError") this.refuse(error);
    }
  }

  /* Label the formats with the bytes and the quality that they have for this source. If the server cannot tell them, let the plan be made, so that
     it says what is wrong. */
  async #compare(source, signal) {
    this.#compared = "";
    this.#isCached = false;
    this.#offer([]);
    try {
      const {cached, data} = await ask(`/admin/forms?source=${encodeURIComponent(source)}`, {signal});
      this.#compared = source;
      this.#isCached = cached;
      this.#offer(data);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      this.#isCached = true;
    }
  }

  #offer(found) {
    const chosen = this.formats.value || FORMS[0], known = new Map(found.map(form => [form.quantize, form]));
    this.formats.replaceChildren(...FORMS.map(name => new Option(known.has(name) ? `${name}: ${bytes(known.get(name).weights_bytes)}, ${quality(known.get(name).loss)}` : name, name, false, name === chosen)));
  }
}

const quality = loss => loss ? `error of weights ${(100 * loss).toPrecision(2)} %` : "exact";

function verdictOf(plan) {
  const rows = [["Weights", plan.weights_bytes], ["Work space", plan.arena_bytes], ["Without requests", plan.weights_bytes + plan.arena_bytes + plan.graphs_bytes],
    ["KV cache up to", plan.kv_cache_bytes], ["At most", plan.required_bytes], ["Free now", plan.free_bytes]];
  return h("div", {class: "verdict"},
    h("p", {}, h("strong", {}, `${plan.model} fits.`), plan.cache_hit ? " Its code is in the cache." : " It will be compiled."),
    h("dl", {class: "facts"}, rows.filter(([, size]) => size !== null).map(([name, size]) => h("div", {}, h("dt", {}, name), h("dd", {class: "number"}, bytes(size))))));
}
