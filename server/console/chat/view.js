/* The chat page. It shows one conversation, while answers in others may still stream. */

import {copy} from "../core/clipboard.js";
import {announce, find, h, toast} from "../core/dom.js";
import {load} from "../core/settings.js";
import {answersForm} from "./answers.js";
import {Attachments} from "./attachments.js";
import {Composer} from "./composer.js";
import {add, choose, hasEnded, newConversation, openCalls, path, takeOver} from "./conversation.js";
import {continues, noModel, trouble, welcome} from "./empty.js";
import {Dictation} from "./dictation.js";
import {openKeys} from "./keys.js";
import {openPrompts} from "./prompts.js";
import {Recorder} from "./recorder.js";
import {answer, countTokens, emptyAnswer} from "./request.js";
import {openShare} from "./share.js";
import {Transcript} from "./transcript.js";

const COUNT_AFTER_MS = 400;  // milliseconds from the last keystroke to the count of tokens
const SAVE_EVERY_MS = 2000;  // milliseconds between saves of a streaming answer, because the page may be closed

export class ChatView {
  #runs = new Map();  // running answers, by conversation: {node, abort}
  #counting = null;
  #changes = 0;  // changes of what is counted: an older count that arrives late is not shown
  #place = {conversation: null};  // where a dictation belongs: it gets the conversation that begins here
  #late = new Map();  // transcripts of recordings that were made in conversations that are not shown, by conversation
  #form = {conversation: null, calls: [], element: null};  // the form for the results of the open calls

  constructor(app) {
    this.app = app;
    this.root = find("#chat");
    this.conversation = null;
    this.composer = new Composer(this.root.querySelector(".composer"), {
      send: text => this.send(text, this.attachments.send()),
      stop: () => this.stop(),
      draft: () => this.#countSoon(),
      isEmpty: () => !this.attachments?.files.length,
      isReading: () => Boolean(this.attachments?.isReading || this.recorder?.isRecording),
      up: () => this.#editLast(),
    });
    this.attachments = new Attachments(this.root.querySelector(".composer"), this.root, {
      model: () => app.model,
      isRecording: () => this.recorder.isRecording,
      changed: () => { this.composer.enable(); this.recorder.show(); this.#countSoon(); },
    });
    this.dictation = new Dictation(this.root.querySelector("[data-action=dictate]"), {
      model: () => app.model?.listens ? null : app.hearing,  // a model that hears gets the recording itself
      place: () => this.#place,
      write: (text, place) => this.#write(text, place.conversation),
    });
    this.recorder = new Recorder(this.root.querySelector("[data-action=record]"), this.root.querySelector(".recording"), {
      model: () => app.model,
      room: () => this.attachments.roomSeconds,
      isReading: () => this.attachments.isReading,
      take: (file, model) => this.attachments.take([file], model),
      changed: () => this.composer.enable(),
    });
    find("#prompts").addEventListener("click", () => openPrompts({use: text => this.composer.insert(text), draft: this.composer.text}));
    find("#share").addEventListener("click", () => openShare(this.conversation));
    find("#show-keys").addEventListener("click", openKeys);
    this.transcript = new Transcript(this.root.querySelector(".scroll"), this.root.querySelector(".messages"), {
      edit: (node, text) => this.#ask(node.parent, text, node.files),
      again: node => this.#answer(node.parent),
      choose: node => this.#choose(node),
      fixKey: () => app.enterKey(),
    }, this.root.querySelector(".jump"));
    app.onModels(() => this.show());
  }

  get options() {
    return this.conversation?.options ?? load("options", {});
  }

  isRunning(id = this.conversation?.id) {
    return this.#runs.has(id);
  }

  enter(id) {
    const found = id ? this.app.conversations.get(id) : null;
    if (id && !found) return this.app.go("#/chat");
    this.conversation = found;
    this.#place = {conversation: found};
    this.transcript.clear();
    this.show();
    this.#write(this.#late.get(found) ?? "", found);
    this.#late.delete(found);
    this.transcript.toEnd();
    this.composer.focus();
  }

  leave() {
    clearTimeout(this.#counting);
    this.recorder.stop();  // nobody records behind a page that does not show it
    this.dictation.stop();
  }

  send(text, files = []) {
    const parent = this.conversation?.leaf ?? null;
    if (!this.conversation) {
      this.conversation = this.#place.conversation = newConversation(load("options", {}));
      this.app.adopt(this.conversation);
      history.replaceState(null, "", `#/chat/${this.conversation.id}`);
    }
    this.#ask(parent, text, files);
  }

  stop(id = this.conversation?.id) {
    this.#runs.get(id)?.abort.abort();
  }

  show() {
    this.#draw();
    this.#countSoon();
  }

  /* Take over what another tab has stored of a conversation, and show it. Return whether the conversation must be stored again. */
  follow(conversation, stored) {
    const counted = () => JSON.stringify([conversation.leaf, path(conversation).filter(hasEnded).length, conversation.options]);
    const before = counted(), isBehind = takeOver(conversation, stored, this.#runs.get(conversation.id)?.node);
    if (this.app.shown === conversation.id) {
      this.#draw();
      if (counted() !== before) this.#countSoon();  // an answer that streams there is stored every two seconds: count its end
    }
    return isBehind;
  }

  #draw() {
    const {app, conversation} = this;
    const run = this.#runs.get(conversation?.id), nodes = conversation ? path(conversation) : [];
    this.composer.show({isRunning: run !== undefined, isReady: app.model !== null, continues: app.model?.chats === false});
    this.attachments.show();
    this.dictation.show();
    this.recorder.show();
    find("#share").hidden = !nodes.length;
    this.root.querySelector(".messages").setAttribute("aria-busy", String(run !== undefined));
    if (!nodes.length) {
      this.transcript.clear(this.#emptyState());
    } else {
      const calls = run ? [] : openCalls(conversation);
      const last = calls.length ? this.#formOf(calls) : null;
      this.transcript.show(conversation, nodes, {isRunning: node => node === run?.node, last});
    }
  }

  /* Obey a key that acts on the last answer. */
  obey(key) {
    const last = this.conversation && path(this.conversation).findLast(node => node.role === "assistant");
    if (!last) return;
    if (key === "again") this.#answer(last.parent);
    else copy(last.content).then(isDone => toast(isDone ? "The answer is copied." : "The browser does not allow copying."));
  }

  /* Write a transcript into the message of a conversation, which may be shown later. */
  #write(text, conversation) {
    if (!text) return;
    const isThere = conversation === null || this.app.conversations.has(conversation.id);
    if (conversation === this.conversation || !isThere) return this.composer.insert(text);
    this.#late.set(conversation, [this.#late.get(conversation), text].filter(Boolean).join(" "));
    toast("The transcript is in the conversation in which you dictated it.");
  }

  #editLast() {
    const last = this.conversation && path(this.conversation).findLast(node => node.role === "user");
    if (last) this.transcript.edit(last);
  }

  #emptyState() {
    const {app} = this;
    if (app.fault) return trouble(app.fault, {retry: () => app.findModels(), enterKey: () => app.enterKey()});
    if (!app.models) return h("span");  // the models have not been requested yet
    if (!app.model) return noModel();
    return app.model.chats === false ? continues(app.model) : welcome(app.model, text => this.send(text));
  }

  /* Add a question and request its answer. If no answer can be requested now, say why and return false; the conversation stays as it is. */
  #ask(parent, text, files = []) {
    if (!this.#mayAnswer()) return false;
    const node = add(this.conversation, parent, {role: "user", content: text, ...files.length ? {files} : {}});
    this.#answer(node.id);
    return true;
  }

  #mayAnswer() {
    const why = !this.app.model ? "No model is loaded." : this.isRunning() ? "An answer is still being written: wait for its end, or stop it." : "";
    if (why) toast(why);
    return !why;
  }

  #answerCalls(results) {
    if (!this.#mayAnswer()) return;
    let parent = this.conversation.leaf;
    for (const {call, content, approve} of results) {
      parent = add(this.conversation, parent, {role: "tool", call: call.id, name: call.name, content, ...approve === undefined ? {} : {approve}}).id;
    }
    this.#answer(parent);
  }

  /* Return the form for the results of calls. While the same calls are open, it is the same form, with what was entered. */
  #formOf(calls) {
    const {conversation} = this, known = this.#form.calls;
    const isSame = ({id, waits}, at) => id === known[at].id && Boolean(waits) === Boolean(known[at].waits);  // another tab may store copies
    if (conversation !== this.#form.conversation || calls.length !== known.length || !calls.every(isSame)) {
      this.#form = {conversation, calls, element: answersForm(calls, results => this.#answerCalls(results))};
    }
    return this.#form.element;
  }

  #choose(node) {
    choose(this.conversation, node.id);
    this.app.changed(this.conversation);
    this.show();
  }

  async #answer(parent) {
    const {app, conversation} = this, model = app.model;
    if (!this.#mayAnswer()) return;
    const node = add(conversation, parent, emptyAnswer(model.id)), abort = new AbortController();
    this.#runs.set(conversation.id, {node, abort});
    app.changed(conversation);
    this.show();
    this.transcript.toEnd();
    const saving = setInterval(() => app.save(conversation), SAVE_EVERY_MS);
    await answer(conversation, node, model, {signal: abort.signal, changed: this.#drawer(conversation, node)});
    clearInterval(saving);
    this.#runs.delete(conversation.id);
    app.changed(conversation);
    if (conversation !== this.conversation) return;
    this.show();
    announce(node.error ? `Error: ${node.error}` : "The answer is complete.");
    if (document.activeElement === document.body || this.composer.form.contains(document.activeElement)) this.composer.focus();  // who writes elsewhere goes on
  }

  /* Return a function that redraws a node at most once a frame, and less often if drawing takes long. */
  #drawer(conversation, node) {
    let isStale = false, spent = 0;
    return () => {
      if (isStale) return;
      isStale = true;
      setTimeout(() => requestAnimationFrame(() => {
        isStale = false;
        if (conversation !== this.conversation) return;
        const began = performance.now();
        this.transcript.update(conversation, node, this.isRunning());
        spent = performance.now() - began;
      }), 4 * spent);
    };
  }

  #countSoon() {
    this.#changes += 1;
    clearTimeout(this.#counting);
    this.#counting = setTimeout(() => this.#count(), COUNT_AFTER_MS);
  }

  async #count() {
    const changes = this.#changes;
    const {app, conversation} = this, {files} = this.attachments, draft = this.composer.text.trim(), isDraft = draft || files.length;
    if (!app.model || this.isRunning() || !(conversation?.leaf || isDraft)) return this.composer.showContext(null);
    const nodes = [...conversation ? path(conversation) : [], ...isDraft ? [{role: "user", content: draft, files}] : []];
    let count = null;
    try {
      count = await countTokens(app.model, nodes, this.options);
    } catch {
      // a chat template may refuse an incomplete exchange
    }
    if (changes === this.#changes) this.composer.showContext(count, app.model.max_model_len);
  }
}
