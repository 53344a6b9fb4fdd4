/* Build the console: its pages, models and conversations. */

import {ask, key} from "./core/api.js";
import {drawIcons, find, toast} from "./core/dom.js";
import {keep, load} from "./core/settings.js";
import {Store} from "./core/store.js";
import {markInterrupted} from "./chat/conversation.js";
import {openKeys} from "./chat/keys.js";
import {OptionsPanel} from "./chat/panel.js";
import {acceptLink} from "./chat/share.js";
import {Sidebar} from "./chat/sidebar.js";
import {ChatView} from "./chat/view.js";
import {CompareView} from "./compare/view.js";
import {LiveView} from "./live/view.js";
import {ModelsView} from "./models/view.js";

const ACTS = {Comma: "copy", Period: "again"};  // keys that act on the last answer, held with Ctrl and Shift
const MODELS_EVERY_MS = 15_000;  // other clients may load and unload models

class App {
  conversations = new Map();
  models = null;  // the generating models; null until the server has answered
  model = null;  // the selected model
  hearing = null;  // a model that transcribes speech; null if there is none
  fault = null;  // the error that kept the list of models from loading
  #listeners = [];
  #seen = "";  // what the listeners were last told of: the selected model, the list of models, the error
  #asked = 0;  // requests for the list of models
  #answered = 0;  // the number of the request whose answer is shown

  constructor() {
    this.store = new Store(id => this.#follow(id));
    this.views = {chat: new ChatView(this), compare: new CompareView(this), models: new ModelsView(this), live: new LiveView(this)};
    drawIcons();
    this.sidebar = new Sidebar(this);
    this.panel = new OptionsPanel(this);
    this.place = "";
    find("#model").addEventListener("change", event => this.#choose(event.target.value));
    find("#open-key").addEventListener("click", () => this.enterKey());
    find("#key").addEventListener("close", event => this.#takeKey(event.target));
    find("#key [data-action=cancel]").addEventListener("click", () => find("#key").close(""));
    find("#scrim").addEventListener("click", () => this.#close());
    for (const button of document.querySelectorAll("[data-action=menu]")) button.addEventListener("click", () => this.openMenu(true));
    addEventListener("keydown", event => this.#obey(event));
  }

  async start() {
    await Promise.all([this.#openStore(), this.findModels()]);
    this.#enter();
    addEventListener("hashchange", () => /^#(\/|$)/.test(location.hash || "#") && this.#enter());  // other hashes are anchors within the page
    setInterval(() => document.hidden || this.findModels(), MODELS_EVERY_MS);
  }

  // --- models ---

  async findModels() {
    const asked = this.#asked += 1, heard = this.hearing?.id;
    let data = null, fault = null;
    try {
      ({data} = await ask("/v1/models"));
    } catch (error) {
      fault = error;
    }
    if (asked < this.#answered) return;  // an answer to a later request, maybe with another key, has come first
    this.#answered = asked;
    if (data) {
      this.models = data.filter(model => model.generates !== false);
      this.hearing = data.find(model => model.hears) ?? null;
      this.fault = null;
    } else {
      this.models = fault.needsKey ? [] : this.models ?? [];
      if (!this.models.length) this.fault = fault;
    }
    this.#choose(load("model", ""));
    if (this.hearing?.id !== heard) this.views.chat.dictation.show();
  }

  /* Select the model that is wanted, if it is loaded. Tell the listeners if they would show something else. */
  #choose(wanted) {
    this.model = this.models.find(model => model.id === wanted) ?? this.chatModels[0] ?? this.models[0] ?? null;
    if (this.model && wanted && this.model.id === wanted) keep("model", wanted);
    const seen = JSON.stringify([this.model?.id, this.fault?.message, this.models.map(({id, chats, sees, listens, max_model_len}) => [id, chats, sees, listens, max_model_len])]);
    if (seen === this.#seen) return;
    this.#seen = seen;
    find("#model").replaceChildren(...this.models.map(({id}) => new Option(id, id, false, id === this.model?.id)));
    find("#model").hidden = !this.models.length;
    find("#light").classList.toggle("ready", this.model !== null);
    this.#listeners.forEach(listener => listener());
  }

  /* The models that answer conversations; null until the server has answered. */
  get chatModels() {
    return this.models?.filter(model => model.chats !== false) ?? null;
  }

  onModels(listener) {
    this.#listeners.push(listener);
  }

  // --- conversations ---

  get shown() {
    return this.place === "chat" ? this.views.chat.conversation?.id : undefined;
  }

  isRunning(id) {
    return this.views.chat.isRunning(id);
  }

  async #openStore() {
    await this.store.open();
    for (const conversation of await this.store.all()) this.conversations.set(conversation.id, markInterrupted(conversation));
    if (!this.store.isLasting) toast("This browser stores nothing: conversations are lost when the page is closed.");
  }

  /* Show what another tab has changed. */
  async #follow(id) {
    const stored = await this.store.get(id), known = this.conversations.get(id);
    if (!stored) {
      if (known) this.#forget(known);
      return;
    }
    const {title, updated, options} = known ?? {};
    if (!known) this.conversations.set(id, stored);
    else if (this.views.chat.follow(known, stored)) this.save(known);
    if (title !== stored.title || updated !== stored.updated) this.sidebar.show();  // drawing it anew takes the focus from it
    const isOther = JSON.stringify(options) !== JSON.stringify(stored.options);
    if (isOther && this.shown === id && !this.panel.root.contains(document.activeElement)) this.panel.refresh();
  }

  adopt(conversation) {
    this.conversations.set(conversation.id, conversation);
    this.changed(conversation);
  }

  /* Keep a conversation that came from elsewhere, and open it. */
  show(conversation) {
    this.adopt(conversation);
    this.go(`#/chat/${conversation.id}`);
  }

  changed(conversation) {
    this.sidebar.show();
    this.save(conversation);
  }

  save(conversation) {
    if (!this.conversations.has(conversation.id)) return;  // it was deleted while an answer streamed
    this.store.put(conversation).catch(error => toast(`The conversation could not be saved: ${error.message}`));
  }

  /* Return whether the conversation is deleted. */
  async remove(conversation) {
    this.views.chat.stop(conversation.id);
    this.conversations.delete(conversation.id);
    try {
      await this.store.remove(conversation.id);
    } catch (error) {
      this.conversations.set(conversation.id, conversation);
      toast(`The conversation could not be deleted: ${error.message}`);
      return false;
    }
    this.#forget(conversation);
    return true;
  }

  /* Show no longer what this tab or another has deleted. */
  #forget(conversation) {
    this.views.chat.stop(conversation.id);
    this.conversations.delete(conversation.id);
    if (this.shown === conversation.id) this.go("#/chat");
    this.sidebar.show();
  }

  // --- options: each conversation has its own; a new one starts with those set last ---

  get options() {
    return this.place === "compare" ? load("options", {}) : this.views.chat.options;
  }

  setOptions(options) {
    keep("options", options);
    const {conversation} = this.views.chat;
    if (!conversation || this.place === "compare") return;
    conversation.options = options;
    this.changed(conversation);
  }

  // --- pages ---

  go(hash, {again = false} = {}) {
    if (location.hash !== hash) location.hash = hash;
    else if (again) this.#enter();
  }

  #enter() {
    const [, place = "chat", argument] = location.hash.split("/"), view = Object.hasOwn(this.views, place) ? this.views[place] : null;
    if (place === "shared") return this.#receive(argument);
    if (!view) {
      history.replaceState(null, "", "#/chat");  // the browser's Back does not lead to the wrong address again
      return this.#enter();
    }
    if (this.place && this.place !== place) this.views[this.place].leave();
    this.place = place;
    for (const [name, other] of Object.entries(this.views)) other.root.hidden = name !== place;
    for (const link of document.querySelectorAll("[data-place]")) {
      if (link.dataset.place === place) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = place === "chat" ? "relaxserve" : `${place[0].toUpperCase()}${place.slice(1)} · relaxserve`;
    this.openMenu(false);
    view.enter(argument);
    this.sidebar.show();
    if (["chat", "compare"].includes(place)) this.panel.refresh();
    else this.panel.toggle(false);
  }

  /* Offer to keep the conversation of a link. */
  async #receive(data = "") {
    history.replaceState(null, "", "#/chat");  // a reload asks only once
    this.#enter();
    const conversation = await acceptLink(data);
    if (conversation) this.show(conversation);
  }

  #obey(event) {
    if (event.key === "Escape" && !event.isComposing) {
      if (document.body.classList.contains("is-menu")) this.openMenu(false);
      else if (!document.querySelector("dialog[open]")) this.views[this.place]?.stop?.();
    } else if ((event.ctrlKey || event.metaKey) && event.key === "k") {
      event.preventDefault();
      this.openMenu(matchMedia("(max-width: 860px)").matches);
      find("#search").focus();
    } else if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
      event.preventDefault();
      this.go("#/chat", {again: true});
    } else if ((event.ctrlKey || event.metaKey) && event.key === "/") {
      event.preventDefault();
      openKeys();
    } else if ((event.ctrlKey || event.metaKey) && event.shiftKey && this.place === "chat" && ACTS[event.code]) {
      event.preventDefault();
      this.views.chat.obey(ACTS[event.code]);
    }
  }

  openMenu(isOpen) {
    document.body.classList.toggle("is-menu", isOpen);
    for (const button of document.querySelectorAll("[data-action=menu]")) button.setAttribute("aria-expanded", String(isOpen));
    this.showScrim();
    if (isOpen) find("#sidebar a").focus();
  }

  showScrim() {
    find("#scrim").hidden = !document.body.classList.contains("is-menu") && find("#options").hidden;
  }

  #close() {
    this.panel.toggle(false);
    this.openMenu(false);
  }

  // --- the key ---

  enterKey() {
    const dialog = find("#key");
    dialog.querySelector("input").value = key.get();
    dialog.returnValue = "";
    dialog.showModal();
  }

  #takeKey(dialog) {
    if (dialog.returnValue !== "save") return;
    key.set(dialog.querySelector("input").value.trim());
    this.findModels();
    if (this.place !== "chat") this.views[this.place].enter();
  }
}

new App().start();
