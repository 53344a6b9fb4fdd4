/* The compare page: several models side by side. Each gets every question with the same options and the same seed, and has its own conversation. */

import {announce, find, h, iconButton, toast} from "../core/dom.js";
import {keep, load} from "../core/settings.js";
import {Composer} from "../chat/composer.js";
import {noChat, noModel} from "../chat/empty.js";
import {add, newConversation, path} from "../chat/conversation.js";
import {answer, emptyAnswer} from "../chat/request.js";
import {Transcript} from "../chat/transcript.js";
import {pageHead, tool} from "../core/page.js";

const MOST = 4;
const SEEDS = 2 ** 31;

export class CompareView {
  #columns = [];
  #abort = null;
  #seed = 0;  // seed of this comparison, unless the options set one

  constructor(app) {
    this.app = app;
    this.root = find("#compare");
    this.seed = h("span", {class: "number"});
    this.more = tool("plus", "Add a model", {onclick: () => this.#addColumn()});
    this.columns = h("div", {class: "columns"});
    this.root.append(
      pageHead("Compare", this.more, tool("again", "Start over", {onclick: () => this.#restart()}),
        tool("options", "Options", {"data-action": "options", "aria-expanded": "false", "aria-controls": "options"})),
      this.columns,
      h("form", {class: "composer"}, h("div", {class: "box"},
        h("textarea", {rows: 1, placeholder: "Ask all of them", "aria-label": "Message to all models"}),
        h("button", {class: "send", "data-icon": "send", "aria-label": "Send", title: "Send", disabled: true})),
        h("div", {class: "below"}, h("span", {class: "hint"}, "Every model gets the same options and the same seed"), this.seed)));
    this.composer = new Composer(this.root.querySelector(".composer"), {send: text => this.#ask(text), stop: () => this.stop()});
    app.onModels(() => this.#refresh());
  }

  enter() {
    this.#refresh();
    this.composer.focus();
  }

  /* Begin with the models that were compared last, as soon as the server has told which it has. */
  #refresh() {
    const models = this.app.chatModels;
    if (this.app.place === "compare" && !this.#columns.length && models?.length) {
      const last = load("compared", []).filter(id => models.some(model => model.id === id));
      const chosen = last.length ? last : models.slice(0, 2).map(model => model.id);
      chosen.forEach(id => this.#columns.push(new Column(this, id)));
      this.#restart();
    }
    this.#show();
  }

  leave() {
    // keep answers running
  }

  stop() {
    this.#abort?.abort();
  }

  drop(column) {
    this.#columns = this.#columns.filter(other => other !== column);
    this.#show();
  }

  #addColumn() {
    const models = this.app.chatModels, used = new Set(this.#columns.map(column => column.model));
    this.#columns.push(new Column(this, (models.find(model => !used.has(model.id)) ?? models[0]).id));
    this.#show();
  }

  #restart() {
    this.stop();
    this.#seed = this.app.options.seed ?? crypto.getRandomValues(new Uint32Array(1))[0] % SEEDS;
    this.#columns.forEach(column => column.restart());
    this.#show();
  }

  #show() {
    const models = this.app.chatModels, isRunning = this.#abort !== null, isStarted = this.#columns.some(column => column.conversation.leaf);
    this.columns.replaceChildren(...this.#columns.map(column => column.element));
    if (!this.#columns.length) this.columns.replaceChildren(this.app.models?.length ? noChat(this.app.models[0]) : noModel());
    for (const column of this.#columns) column.show(models ?? [], {canLeave: this.#columns.length > 1 && !isRunning, isFixed: isRunning});
    this.seed.textContent = isStarted ? `seed ${this.#seed}` : "";
    this.more.disabled = isRunning || !models?.length || this.#columns.length >= MOST;
    this.composer.show({isRunning, isReady: this.#columns.length > 0});
  }

  async #ask(text) {
    keep("compared", this.#columns.map(column => column.model));
    this.#abort = new AbortController();
    const options = {...this.app.options, seed: this.app.options.seed ?? this.#seed};
    this.#seed = options.seed;
    const asked = this.#columns.map(column => column.ask(text, options, this.#abort.signal));
    this.#show();
    await Promise.all(asked);
    this.#abort = null;
    this.#show();
    announce("All answers are complete.");
  }
}

class Column {
  constructor(view, model) {
    this.view = view;
    this.model = model;
    this.select = h("select", {class: "quiet", "aria-label": "Model of this column", onchange: () => { this.model = this.select.value; }});
    this.leave = iconButton("close", "Remove column", () => view.drop(this));
    this.keep = iconButton("chat", "Continue in the chat", () => this.#adopt());
    const messages = h("div", {class: "messages", role: "log"});
    this.pane = h("div", {class: "scroll", tabindex: 0, role: "region"}, messages);
    this.element = h("div", {class: "column"}, h("header", {}, this.select, this.keep, this.leave), this.pane);
    this.transcript = new Transcript(this.pane, messages, {});
    this.restart();
  }

  restart() {
    this.conversation = newConversation({});
    this.transcript.clear();
  }

  show(models, {canLeave, isFixed}) {
    const names = new Set([...models.map(({id}) => id), this.model]);  // a model that is gone stays chosen
    this.select.replaceChildren(...[...names].map(id => new Option(id, id, false, id === this.model)));
    this.select.disabled = isFixed;
    this.pane.setAttribute("aria-label", `Messages of ${this.model}`);
    this.leave.disabled = !canLeave;
    this.keep.disabled = isFixed || !this.conversation.leaf;
  }

  async ask(text, options, signal) {
    const {conversation} = this, model = this.view.app.models.find(({id}) => id === this.model) ?? {id: this.model};
    conversation.options = options;
    const question = add(conversation, conversation.leaf, {role: "user", content: text}), node = add(conversation, question.id, emptyAnswer(this.model));
    let isRunning = true;
    this.transcript.show(conversation, path(conversation), {isRunning: one => one === node});
    this.transcript.toEnd();
    const draw = () => this.transcript.update(conversation, node, isRunning);
    await answer(conversation, node, model, {signal, changed: () => requestAnimationFrame(draw)});
    isRunning = false;
    draw();
  }

  #adopt() {
    this.view.app.adopt(this.conversation);
    toast("The conversation was added to your chats.");
    this.view.app.go(`#/chat/${this.conversation.id}`);
    this.restart();
  }
}
