/* The form for loading a model. It says what the load would take as soon as the source is one that the server offers. */

import {ask} from "../core/api.js";
import {h} from "../core/dom.js";
import {bytes} from "../core/format.js";
import {FORMS, Planner} from "./plan.js";

const CACHES = ["auto", "bf16", "f32", "f16", "int8"];

export class LoadForm {
  #known = new Set();  // sources on the server's machine

  /* `begun` is called with the operation of each load. */
  constructor(begun) {
    this.begun = begun;
    this.sources = h("datalist", {id: "sources"});
    this.offers = h("p", {class: "faint small"});
    this.verdict = h("div", {role: "status"});
    this.fields = {
      source: h("input", {required: true, maxlength: 1024, list: "sources", autocomplete: "off", spellcheck: "false"}),
      quantize: h("select"),
      name: h("input", {maxlength: 128, placeholder: "same as the source", autocomplete: "off"}),
      kv_dtype: h("select", {}, CACHES.map(form => new Option(form))),
      max_context: h("input", {type: "number", min: 1, placeholder: "the model's, if it fits"}),
      max_batch: h("input", {type: "number", min: 1, placeholder: "64"}),
      aliases: h("input", {placeholder: "separated by commas", autocomplete: "off"}),
    };
    this.pin = h("input", {type: "checkbox"});
    this.embeddings = h("input", {type: "checkbox"});
    this.planner = new Planner(this.fields.quantize, this.verdict);
    const field = (name, label) => h("label", {class: "field"}, label, this.fields[name]);
    this.submit = h("button", {class: "primary"}, "Load");
    this.element = h("form", {class: "card load", "aria-label": "Load a model", oninput: () => this.#planLater(),
      onsubmit: event => { event.preventDefault(); this.#load(); }},
    h("h2", {}, "Load a model"),
    h("div", {class: "fields"}, field("source", "Source"), field("quantize", "Weights")),
    this.sources, this.offers,
    h("details", {}, h("summary", {}, "More settings"),
      h("div", {class: "fields"}, field("name", "Name"), field("aliases", "Aliases"), field("kv_dtype", "KV cache"),
        field("max_context", "Longest context"), field("max_batch", "Most sequences")),
      h("label", {class: "check"}, this.pin, "Pin: never suggest to unload it"),
      h("label", {class: "check"}, this.embeddings, "Serve embeddings even if the model was not trained for them")),
    this.verdict,
    h("div", {class: "row end"}, h("button", {type: "button", class: "outline", onclick: () => this.#check()}, "What would it take?"), this.submit));
  }

  /* `local`: an answer of /admin/sources. `downloads`: an answer of /admin/downloads. */
  showOffers(local, downloads) {
    const idle = local.data.filter(offer => !offer.loaded_as.length), stored = downloads.allowed ? downloads.data : [];
    const found = [...idle, ...stored];
    this.#known = new Set([...local.data, ...stored].map(({source}) => source));
    const told = found.map(({source}) => source).join("\n");
    if (told !== this.told) this.sources.replaceChildren(...found.map(({source, bytes: size}) => h("option", {value: source}, bytes(size))));
    this.told = told;
    this.fields.source.placeholder = downloads.allowed ? "folder, file or org/name" : "folder or file";
    const {length} = local.data, where = `below ${local.model_root}`;
    const counted = !length ? `There is no model ${where}.` : idle.length ? `${idle.length} of ${length} models ${where} can be loaded.` : `All ${length} models ${where} are loaded.`;
    this.offers.replaceChildren(counted, ...(downloads.allowed ? [" Names of the hub and of the catalogue are downloaded."]
      : [" This server downloads no models: start it with ", h("code", {class: "whole"}, "--allow-hub"), " for that."]));
  }

  fill(source, name = "") {
    this.fields.source.value = source;
    this.fields.name.value = name;
    this.fields.source.focus();
    this.element.scrollIntoView({block: "nearest"});
    this.#planLater();
  }

  get #body() {
    const {source, name, aliases, ...rest} = Object.fromEntries(Object.entries(this.fields).map(([field, input]) => [field, input.value.trim()]));
    const body = {source, quantize: rest.quantize, kv_dtype: rest.kv_dtype, pin: this.pin.checked, embeddings: this.embeddings.checked};
    if (name) body.name = name;
    for (const number of ["max_context", "max_batch"]) if (rest[number]) body[number] = Number(rest[number]);
    if (aliases) body.aliases = aliases.split(",").map(alias => alias.trim()).filter(Boolean);
    return body;
  }

  /* A plan reads the model's files, so wait until they are named completely. The button plans any other source. */
  #planLater() {
    const isReady = this.#known.has(this.fields.source.value.trim()) && this.element.checkValidity();
    this.planner.later(isReady ? this.#body : null);
  }

  async #check() {
    if (this.element.reportValidity()) await this.planner.now(this.#body);
  }

  async #load() {
    const body = this.#body;
    this.planner.later(null);
    this.submit.disabled = true;
    try {
      const operation = await ask("/admin/models", {method: "POST", body});
      for (const name of ["source", "name", "aliases"]) this.fields[name].value = "";
      this.fields.quantize.value = FORMS[0];
      this.begun(operation);
    } catch (error) {
      this.planner.refuse(error);
    }
    this.submit.disabled = false;
  }
}
