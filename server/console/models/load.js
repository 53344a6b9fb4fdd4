/* The form for loading a model, and for a plan of the memory it would take. */

import {ask} from "../core/api.js";
import {h} from "../core/dom.js";
import {bytes} from "../core/format.js";

const FORMS = ["auto", "bf16", "f32", "int8", "int8-fast", "int8-32", "int8-64", "int8-128", "6bit", "5bit", "4bit", "int4-32", "int4-64", "int4-128"];
const CACHES = ["auto", "bf16", "f32", "f16", "int8"];

export class LoadForm {
  /* `begun` is called with the operation of each load. */
  constructor(begun) {
    this.begun = begun;
    this.sources = h("datalist", {id: "sources"});
    this.offers = h("p", {class: "faint small"});
    this.verdict = h("div", {role: "status"});
    this.fields = {
      source: h("input", {required: true, maxlength: 1024, list: "sources", placeholder: "folder, file or org/name", autocomplete: "off", spellcheck: "false"}),
      name: h("input", {maxlength: 128, placeholder: "same as the source", autocomplete: "off"}),
      quantize: h("select", {}, FORMS.map(form => new Option(form))),
      kv_dtype: h("select", {}, CACHES.map(form => new Option(form))),
      max_context: h("input", {type: "number", min: 1, placeholder: "the model's, if it fits"}),
      max_batch: h("input", {type: "number", min: 1, placeholder: "64"}),
      aliases: h("input", {placeholder: "separated by commas", autocomplete: "off"}),
    };
    this.pin = h("input", {type: "checkbox"});
    this.embeddings = h("input", {type: "checkbox"});
    const field = (name, label) => h("label", {class: "field"}, label, this.fields[name]);
    this.submit = h("button", {class: "primary"}, "Load");
    this.element = h("form", {class: "card load", "aria-label": "Load a model", onsubmit: event => { event.preventDefault(); this.#load(); }},
      h("h2", {}, "Load a model"),
      h("div", {class: "fields"}, field("source", "Source"), field("name", "Name"), field("quantize", "Weights"), field("kv_dtype", "KV cache"),
        field("max_context", "Longest context"), field("max_batch", "Most sequences"), field("aliases", "Aliases")),
      this.sources, this.offers,
      h("label", {class: "check"}, this.pin, "Pin: never suggest to unload it"),
      h("label", {class: "check"}, this.embeddings, "Serve embeddings even if the model was not trained for them"),
      this.verdict,
      h("div", {class: "row end"}, h("button", {type: "button", class: "outline", onclick: () => this.#check()}, "What would it take?"), this.submit));
  }

  /* `offers`: the entries of /admin/sources. */
  showOffers(offers) {
    const idle = offers.filter(offer => !offer.loaded_as.length);
    this.sources.replaceChildren(...idle.map(offer => h("option", {value: offer.source}, bytes(offer.bytes))));
    this.offers.textContent = offers.length ? `${idle.length} of ${offers.length} models below the model root are not loaded; the source field offers them.` : "";
  }

  fill(source, name) {
    this.fields.source.value = source;
    this.fields.name.value = name;
    this.fields.source.focus();
  }

  get #body() {
    const {source, name, aliases, ...rest} = Object.fromEntries(Object.entries(this.fields).map(([field, input]) => [field, input.value.trim()]));
    const body = {source, quantize: rest.quantize, kv_dtype: rest.kv_dtype, pin: this.pin.checked, embeddings: this.embeddings.checked};
    if (name) body.name = name;
    for (const number of ["max_context", "max_batch"]) if (rest[number]) body[number] = Number(rest[number]);
    if (aliases) body.aliases = aliases.split(",").map(alias => alias.trim()).filter(Boolean);
    return body;
  }

  async #check() {
    if (!this.element.reportValidity()) return;
    this.verdict.replaceChildren(h("p", {class: "faint small"}, "Planning …"));
    try {
      const plan = await ask("/admin/models", {method: "POST", body: {...this.#body, dry_run: true}});
      const rows = [["Weights", plan.weights_bytes], ["KV cache", plan.kv_cache_bytes], ["Work space", plan.arena_bytes], ["Total", plan.required_bytes], ["Free now", plan.free_bytes]];
      this.verdict.replaceChildren(h("div", {class: "verdict"},
        h("p", {}, h("strong", {}, `${plan.model} fits.`), plan.cache_hit ? " Its code is in the cache." : " It will be compiled."),
        h("dl", {class: "facts"}, rows.filter(([, size]) => size !== null).map(([name, size]) => h("div", {}, h("dt", {}, name), h("dd", {class: "number"}, bytes(size)))))));
    } catch (error) {
      this.#refuse(error);
    }
  }

  async #load() {
    this.submit.disabled = true;
    try {
      const operation = await ask("/admin/models", {method: "POST", body: this.#body});
      this.verdict.replaceChildren();
      for (const name of ["source", "name", "aliases"]) this.fields[name].value = "";
      this.begun(operation);
    } catch (error) {
      this.#refuse(error);
    }
    this.submit.disabled = false;
  }

  #refuse(error) {
    this.verdict.replaceChildren(h("div", {class: "fault-box", role: "alert"}, h("span", {}, error.message)));
  }
}
