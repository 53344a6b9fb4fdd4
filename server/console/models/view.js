/* The models page: the form for loading a model, downloads, running loads, and the loaded models with their memory. */

import {ask, stream} from "../core/api.js";
import {confirmed, find, h, icon, toast} from "../core/dom.js";
import {pageFault, pageHead} from "../core/page.js";
import {failedCard, failedDownload, loadCard, modelCard, stages} from "./card.js";
import {Downloads} from "./downloads.js";
import {LoadForm} from "./load.js";
import {memoryBar} from "./memory.js";

const EVERY_MS = 3000;

export class ModelsView {
  #timer = null;
  #watched = new Map();  // elements that show running loads, by operation
  #written = "";

  constructor(app) {
    this.app = app;
    this.root = find("#models");
    this.trouble = h("div");
    this.memory = h("div");
    this.loads = h("div", {class: "stack"});
    this.list = h("div", {class: "stack"});
    this.form = new LoadForm(operation => this.#watch(operation));
    this.downloads = new Downloads({begun: operation => this.#watch(operation), use: source => this.form.fill(source)});
    this.search = h("input", {type: "search", "aria-label": "Search models", placeholder: "Search models", autocomplete: "off", oninput: () => this.#filter()});
    this.searchField = h("label", {class: "search"}, icon("search"), this.search);
    this.content = h("div", {class: "stack", hidden: true}, this.form.element, this.downloads.element, this.loads, this.memory, this.searchField, this.list);
    this.root.append(pageHead("Models"), h("div", {class: "body"}, this.trouble, this.content));
    this.acts = {
      unload: model => this.#unload(model),
      addAlias: (model, alias) => this.#change(`/admin/aliases/${encodeURIComponent(alias)}`, {method: "PUT", body: {model: model.id}}),
      removeAlias: alias => this.#change(`/admin/aliases/${encodeURIComponent(alias)}`, {method: "DELETE"}),
      log: model => this.#showLog(model),
    };
  }

  enter() {
    this.#findDownloads();
    this.#refresh();
  }

  leave() {
    clearTimeout(this.#timer);
    this.form.planner.later(null);
  }

  async #refresh() {
    clearTimeout(this.#timer);
    try {
      const [models, memory, sources, operations] = await Promise.all(
        [ask("/admin/models"), ask("/admin/memory"), ask("/admin/sources"), ask("/admin/operations")]);
      this.trouble.replaceChildren();
      this.content.hidden = false;
      this.#draw(models, memory);
      this.sources = sources;
      this.#offer();
      for (const operation of operations.data) if (operation.state === "running") this.#watch(operation);
    } catch (error) {
      this.trouble.replaceChildren(pageFault(this.app, error, () => this.#refresh()));
      if (error.needsKey) {
        this.content.hidden = true;
        return;
      }
    }
    if (this.app.place === "models") this.#timer = setTimeout(() => this.#refresh(), EVERY_MS);
  }

  /* The list of downloads changes only with a download, and reading it takes a while. */
  async #findDownloads() {
    try {
      this.found = await ask("/admin/downloads");
      this.downloads.show(this.found);
      this.#offer();
    } catch (error) {
      if (!error.needsKey) toast(error.message);  // #refresh asks for the key
    }
  }

  #offer() {
    if (this.sources && this.found) this.form.showOffers(this.sources, this.found);
  }

  /* Show the cards whose model, alias or source contains what is searched for. */
  #filter() {
    const wanted = this.search.value.trim().toLowerCase();
    for (const card of this.list.querySelectorAll("article")) card.hidden = !card.dataset.words.toLowerCase().includes(wanted);
  }

  /* Redraw the list, unless nothing has changed or the user is writing in it. */
  #draw({data, failed}, memory) {
    const written = JSON.stringify([data, failed, memory.models, memory.limit_bytes]);
    if (written === this.#written || this.list.contains(document.activeElement) && document.activeElement.value) return;
    this.#written = written;
    const held = data.filter(model => model.state !== "loading");
    this.memory.replaceChildren(memoryBar(memory));
    const focused = document.activeElement?.getAttribute("aria-label");
    this.list.replaceChildren(
      ...held.map(model => modelCard(model, this.acts)),
      ...failed.map(operation => failedCard(operation, () => this.form.fill(operation.model))),
      ...held.length || failed.length ? [] : [h("div", {class: "card none"}, h("h2", {}, "No model is loaded"), h("p", {class: "faint"}, "Load one above. Its stages are shown while it loads."))]);
    this.searchField.hidden = held.length < 2;
    this.#filter();
    if (focused && document.activeElement === document.body) this.list.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }

  /* Show the progress of a load from its events until it has ended. */
  async #watch(operation) {
    if (this.#watched.has(operation.id)) return;
    const {card, show} = loadCard(operation, () => this.#change(`/admin/operations/${operation.id}`, {method: "DELETE"}));
    this.#watched.set(operation.id, card);
    this.loads.append(card);
    let last = operation;
    try {
      for await (const event of stream(`/admin/operations/${operation.id}/events`)) show(last = event);
    } catch (error) {
      if (last.state === "running") toast(`The progress of ${operation.model} is unknown: ${error.message}`);
    }
    card.remove();
    this.#watched.delete(operation.id);
    if (operation.kind === "download") return this.#downloaded(last);
    if (last.state === "succeeded") toast(`${operation.model} is loaded.`);
    await Promise.all([this.#refresh(), this.app.findModels()]);
  }

  async #downloaded(operation) {
    await this.#findDownloads();
    if (operation.state === "succeeded") toast(`${operation.model} is downloaded.`, {label: "Load it", run: () => this.form.fill(operation.model)});
    const again = {label: "Continue", run: () => this.downloads.download(operation.model)};
    if (operation.state === "cancelled") toast(`The download of ${operation.model} is stopped.`, again);
    if (operation.state === "failed") this.loads.append(failedDownload(operation, again.run));
  }

  async #unload(model) {
    if (!await confirmed(`Unload ${model.id}? Running requests are finished first; new ones are refused.`, "Unload")) return;
    if (await this.#change(`/admin/models/${encodeURIComponent(model.id)}`, {method: "DELETE"})) toast(`${model.id} is unloaded.`);
    await this.app.findModels();
  }

  async #change(path, options) {
    try {
      await ask(path, options);
      document.activeElement?.form?.reset();
      return true;
    } catch (error) {
      toast(error.message);
      return false;
    } finally {
      await this.#refresh();
    }
  }

  async #showLog(model) {
    const dialog = h("dialog", {"aria-label": `Load log of ${model.id}`, onclose: () => dialog.remove()});
    const close = h("div", {class: "row end"}, h("button", {type: "button", class: "outline", onclick: () => dialog.close()}, "Close"));
    try {
      const operation = await ask(`/admin/operations/${model.operation}`);
      dialog.append(h("h2", {}, `Load of ${model.id}`), h("p", {}, new Date(operation.started_at * 1000).toLocaleString([], {dateStyle: "medium", timeStyle: "medium"})), stages(operation), close);
    } catch (error) {
      const isOld = error.status === 404;  // operations are forgotten after an hour
      dialog.append(h("h2", {}, `Load of ${model.id}`), h("p", {}, isOld ? "It was loaded more than an hour ago; the server's log has the rest." : error.message), close);
    }
    document.body.append(dialog);
    dialog.showModal();
  }
}
