/* What a load would take: the formats of its weights with bytes and quality, as soon as a source is named, and then the plan of its memory. */

import {ask} from "../core/api.js";
import {h} from "../core/dom.js";
import {bytes} from "../core/format.js";

const AFTER_MS = 500;  // milliseconds from the last change to the request

export const FORMS = ["auto", "auto-fast", "bf16", "f32", "int8", "int8-fast", "int8-32", "int8-64", "int8-128", "6bit", "5bit", "4bit", "int4-32", "int4-64", "int4-128"];

/* Plans at most one load at a time, because a plan compiles the model, unless its program is in the cache. */
export class Planner {
  #soon = null;
  #isBusy = false;
  #wanted = null;  // the body to plan next
  #compared = "";  // the source of the formats in `formats`

  /* `formats`: the select of formats. `verdict`: the element for the plan. */
  constructor(formats, verdict) {
    this.formats = formats;
    this.verdict = verdict;
    this.#offer([]);
  }

  /* Plan a load soon. Without a body show nothing. */
  later(body) {
    clearTimeout(this.#soon);
    this.#wanted = body;
    if (!body) this.show();
    else this.#soon = setTimeout(() => this.#run(), AFTER_MS);
  }

  async now(body) {
    this.later(null);
    this.#wanted = body;
    await this.#run();
  }

  show(...children) {
    this.verdict.replaceChildren(...children);
  }

  refuse(error) {
    this.show(h("div", {class: "fault-box", role: "alert"}, h("span", {}, error.message)));
  }

  async #run() {
    if (this.#isBusy) return;  // the running plan begins the next one when it ends
    this.#isBusy = true;
    while (this.#wanted) {
      const body = this.#wanted;
      this.#wanted = null;
      this.show(h("p", {class: "faint small"}, "Planning …"));
      try {
        if (body.source !== this.#compared) await this.#compare(body.source);
        const plan = await ask("/admin/models", {method: "POST", body: {...body, dry_run: true}});
        if (!this.#wanted) this.show(verdictOf(plan));
      } catch (error) {
        if (!this.#wanted) this.refuse(error);
      }
    }
    this.#isBusy = false;
  }

  /* Label the formats with the bytes and the quality that they have for this source. */
  async #compare(source) {
    this.#compared = source;
    try {
      this.#offer((await ask(`/admin/forms?source=${encodeURIComponent(source)}`)).data);
    } catch {
      this.#offer([]);  // the plan then says what is wrong
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
