/* The conversations of this browser: search, rename, share, import, delete. */

import {find, h, iconButton, toast} from "../core/dom.js";
import {matches} from "./conversation.js";
import {importConversation, openShare} from "./share.js";

const DAY_MS = 86_400_000;

export class Sidebar {
  constructor(app) {
    this.app = app;
    this.list = find("#conversations");
    this.search = find("#search");
    this.search.addEventListener("input", () => this.show());
    find("#import-chat").addEventListener("click", () => this.#import());
    find("#new-chat").addEventListener("click", () => app.go("#/chat", {again: true}));
  }

  show() {
    if (this.list.querySelector("input")) return;  // a title is being edited
    const all = [...this.app.conversations.values()].sort((a, b) => b.updated - a.updated);
    const found = all.filter(one => matches(one, this.search.value));
    const rows = [];
    let last = "";
    for (const one of found) {
      const when = since(one.updated);
      if (when !== last) rows.push(h("li", {class: "when"}, when));
      last = when;
      rows.push(this.#row(one));
    }
    if (!found.length) rows.push(h("li", {class: "none"}, all.length ? "Nothing found." : "Conversations stay in this browser."));
    this.list.replaceChildren(...rows);
  }

  #row(one) {
    const isShown = this.app.shown === one.id, link = h("a", {href: `#/chat/${one.id}`, "aria-current": isShown ? "page" : null, title: one.title}, one.title);
    const row = h("li", {class: "talk-link"}, link,
      this.app.isRunning(one.id) && h("span", {class: "busy", role: "img", "aria-label": "Being answered"}),
      h("span", {class: "tools"},
        small("pencil", "Rename", () => this.#rename(one, row, link)),
        small("share", "Share", () => openShare(one)),
        small("trash", "Delete", () => this.#remove(one))));
    return row;
  }

  #rename(one, row, link) {
    const field = h("input", {"aria-label": "Title", value: one.title, maxlength: 200});
    let isOver = false;
    const end = isKept => {
      if (isOver) return;
      isOver = true;
      if (isKept && field.value.trim()) one.title = field.value.trim();
      field.remove();
      this.app.changed(one);
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", event => {
      if (event.isComposing) return;
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    row.replaceChildren(field);
    field.select();
    field.focus();
  }

  async #import() {
    const one = await importConversation();
    if (one) this.app.show(one);
  }

  async #remove(one) {
    if (!await this.app.remove(one)) return;
    toast("The conversation is deleted.", {label: "Undo", run: () => this.app.adopt(one)});
  }
}

const small = (name, label, run) => iconButton(name, label, run, {class: "icon-button small"});

function since(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY_MS) return "Yesterday";
  if (time >= today - 7 * DAY_MS) return "This week";
  return new Date(time).toLocaleDateString("en", {month: "long", year: "numeric"});
}
