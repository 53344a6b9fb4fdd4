/* The list of models that the server can download: those of the catalogue by name, every other by its name on the hub. */

import {ask} from "../core/api.js";
import {h, icon, toast} from "../core/dom.js";

export class Downloads {
  /* `begun` is called with the operation of each download, `use` with the source of a model that is on the server's machine. */
  constructor({begun, use}) {
    this.begun = begun;
    this.use = use;
    this.list = h("ul", {class: "catalogue"});
    this.source = h("input", {"aria-label": "Name on the hub", placeholder: "org/name or org/name:q4_k_m", required: true, maxlength: 1024, autocomplete: "off", spellcheck: "false"});
    this.form = h("form", {class: "row", onsubmit: event => { event.preventDefault(); this.download(this.source.value.trim()); }},
      this.source, h("button", {class: "outline"}, icon("download"), "Download"));
    this.closed = h("p", {class: "notice"}, "This server downloads no models. Start it with ", h("code", {}, "--allow-hub"), " to download them here, or run ", h("code", {}, "relaxserve pull NAME"), " on its machine.");
    this.element = h("details", {class: "card"}, h("summary", {}, h("h2", {}, "Download a model")), this.closed, this.form, this.list);
  }

  /* `downloads`: an answer of /admin/downloads. */
  show({allowed, catalogue, data}) {
    this.closed.hidden = allowed;
    this.form.hidden = !allowed;
    const named = new Set(catalogue.map(({name}) => name)), others = data.filter(({source}) => !named.has(source));
    this.list.replaceChildren(
      ...catalogue.map(({name, about, licence, here}) => this.#row(name, `${about} · ${licence}`, here, allowed)),
      ...others.map(({source}) => this.#row(source, "from the hub", true, allowed)));
  }

  async download(source) {
    try {
      this.begun(await ask("/admin/downloads", {method: "POST", body: {source}}));
      this.source.value = "";
    } catch (error) {
      toast(error.message);
    }
  }

  #row(source, about, isHere, isAllowed) {
    const act = isHere
      ? h("button", {type: "button", class: "outline", "aria-label": `Load ${source}`, onclick: () => this.use(source)}, "Load")
      : h("button", {type: "button", class: "outline", "aria-label": `Download ${source}`, onclick: () => this.download(source)}, "Download");
    return h("li", {}, h("div", {class: "grow"}, h("strong", {}, source), h("p", {class: "faint small"}, about)), isHere && h("span", {class: "pill is-well"}, "here"), isAllowed && act);
  }
}
