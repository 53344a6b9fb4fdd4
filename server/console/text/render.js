/* Render Markdown as elements. While a text grows, unchanged blocks keep their elements. */

import {copyButton} from "../core/clipboard.js";
import {h} from "../core/dom.js";
import {highlight} from "./highlight.js";
import {parse} from "./markdown.js";

/* Shows a Markdown text in the element `into`. */
export class Rendered {
  #sources = [];

  constructor(into) {
    this.into = into;
  }

  show(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && blocks[same].source === this.#sources[same]) same += 1;
    for (const old of [...this.into.children].slice(same)) old.remove();
    this.into.append(...blocks.slice(same).map(block));
    this.#sources = blocks.map(one => one.source);
  }
}

function block(one) {
  switch (one.type) {
    case "heading":
      return h(`h${Math.min(6, Math.max(3, one.level + 1))}`, {}, inline(one.inline));  // headings in an answer are smaller than the heading of its message
    case "paragraph":
      return h("p", {}, inline(one.inline));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, one.blocks.map(block));
    case "code":
      return codeBlock(one);
    case "list":
      return h(one.start === null ? "ul" : "ol", one.start > 1 ? {start: one.start} : {}, one.items.map(item));
    case "table":
      return table(one);
  }
  throw new Error(`unknown type of block: ${one.type}`);
}

function item({checked, blocks}) {
  const isTight = blocks[0]?.type === "paragraph";  // the text is on the line of the bullet
  const content = isTight ? [...inline(blocks[0].inline), ...blocks.slice(1).map(block)] : blocks.map(block);
  if (checked === null) return h("li", {}, content);
  return h("li", {class: "task"}, h("input", {type: "checkbox", disabled: true, checked, "aria-label": checked ? "done" : "to do"}), content);
}

function table({align, head, rows}) {
  const cell = name => (content, column) => h(name, {class: align[column]}, inline(content));
  const body = rows.map(row => h("tr", {}, row.map(cell("td"))));
  return h("div", {class: "table", tabindex: "0", role: "region", "aria-label": "Table"},
    h("table", {}, h("thead", {}, h("tr", {}, head.map(cell("th")))), h("tbody", {}, body)));
}

function codeBlock({language, text}) {
  return h("figure", {class: "code"},
    h("figcaption", {}, h("span", {}, language || "text"), copyButton("Copy code", () => text)),
    h("pre", {tabindex: "0", "aria-label": language ? `Code in ${language}` : "Code"}, h("code", {}, coloured(text, language))));
}

export function coloured(text, language) {
  return highlight(text, language).map(piece => piece.kind ? h("span", {class: `is-${piece.kind}`}, piece.text) : piece.text);
}

export function inline(values) {
  return values.map(value => {
    if (typeof value === "string") return value;
    switch (value.type) {
      case "code":
        return h("code", {}, value.text);
      case "break":
        return h("br");
      case "link":  // parseInline accepts only harmless schemes
        return h("a", {href: value.href, target: "_blank", rel: "noopener noreferrer"}, inline(value.children));
      case "strong":
      case "em":
      case "del":
        return h(value.type, {}, inline(value.children));
    }
    throw new Error(`unknown type of inline value: ${value.type}`);
  });
}
