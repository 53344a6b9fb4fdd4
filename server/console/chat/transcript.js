/* The messages of a branch in a scrolling pane. Long conversations are drawn in slices, the last messages first, so that no task is long.
   While an answer streams, the pane stays at its end, unless the reader has scrolled away. */

import {siblings} from "./conversation.js";
import {messageOf} from "./message.js";

const SLICE_MS = 12;
const NEAR_END = 64;  // pixels

export class Transcript {
  #shown = new Map();  // messages by the id of their node
  #drawing = 0;
  #follows = true;
  #resizes = new ResizeObserver(() => this.#keepPlace());  // a message gets its real height only when it comes into view
  #top = 0;  // scroll position when the pane was last known to be at its end

  constructor(pane, into, actions, jump = null) {
    this.pane = pane;
    this.into = into;
    this.actions = actions;
    pane.addEventListener("scroll", () => {
      const gap = pane.scrollHeight - pane.scrollTop - pane.clientHeight;
      if (gap < NEAR_END) this.#follow(true);
      else if (pane.scrollTop < this.#top) this.#follow(false);  // messages that grow open a gap too, but do not move the pane upwards
      if (jump) jump.hidden = this.#follows;
    }, {passive: true});
    jump?.addEventListener("click", () => this.toEnd());
    this.#resizes.observe(pane);
    this.#follow(true);
  }

  /* Show the nodes, and the element `last` below them. Nodes that are shown already keep their elements. */
  async show(conversation, nodes, {isRunning, last = null}) {
    const drawing = ++this.#drawing, wanted = new Set(nodes.map(node => node.id));
    for (const [id, message] of this.#shown) {
      if (wanted.has(id)) continue;
      message.element.remove();
      this.#resizes.unobserve(message.element);
      this.#shown.delete(id);
    }
    for (const other of [...this.into.children]) if (other.localName !== "article" && other !== last) other.remove();
    if (last && this.into.lastChild !== last) this.into.append(last);
    let next = last, since = performance.now();
    for (const node of nodes.toReversed()) {
      const message = this.#shown.get(node.id) ?? this.#add(node);
      message.update(siblings(conversation, node), isRunning(node));
      if (message.element.nextSibling !== next || !message.element.isConnected) this.into.insertBefore(message.element, next);
      next = message.element;
      if (performance.now() - since < SLICE_MS) continue;
      this.#keepPlace();
      await new Promise(resolve => setTimeout(resolve));
      if (drawing !== this.#drawing) return;
      since = performance.now();
    }
    this.#keepPlace();
  }

  update(conversation, node, isRunning) {
    this.#shown.get(node.id)?.update(siblings(conversation, node), isRunning);
    this.#keepPlace();
  }

  edit(node) {
    this.#shown.get(node.id)?.edit();
  }

  clear(...children) {
    this.#drawing += 1;
    for (const message of this.#shown.values()) this.#resizes.unobserve(message.element);
    this.#shown.clear();
    this.into.replaceChildren(...children);
  }

  #add(node) {
    const message = messageOf(node, this.actions);
    this.#shown.set(node.id, message);
    this.#resizes.observe(message.element);
    return message;
  }

  toEnd() {
    this.#follow(true);
    this.#keepPlace();
  }

  #follow(follows) {
    this.#follows = follows;
    this.#top = this.pane.scrollTop;
    this.pane.style.overflowAnchor = follows ? "none" : "auto";  // with an anchor, the browser moves the pane upwards when messages shrink
  }

  #keepPlace() {
    if (!this.#follows) return;
    this.pane.scrollTop = this.pane.scrollHeight;
    this.#top = this.pane.scrollTop;
  }
}
