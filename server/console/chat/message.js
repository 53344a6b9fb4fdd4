/* The element of one node of a conversation, which is updated while the answer streams. */

import {copyButton} from "../core/clipboard.js";
import {h, iconButton} from "../core/dom.js";
import {coloured, Rendered} from "../text/render.js";
import {fileList} from "./attachments.js";
import {figuresOf} from "./figures.js";

const SMALL = {class: "icon-button small act"};

/* Return the message of a node. `actions` may have edit(node, text), again(node), choose(node), fixKey(); an action that is absent has no button.
   `edit` returns false if the edited text cannot be sent now: it then stays in its field. */
export function messageOf(node, actions) {
  return new {user: UserMessage, assistant: AssistantMessage, tool: ToolMessage}[node.role](node, actions);
}

class UserMessage {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.branches = h("span", {class: "branches"});
    this.footer = h("footer", {},
      actions.edit && act("pencil", "Edit", () => this.edit()), copyButton("Copy", () => node.content, SMALL), this.branches);
    this.element = h("article", {class: "user", "aria-label": "You"}, node.files?.length && fileList(node.files), h("div", {class: "said", hidden: !node.content}, node.content), this.footer);
  }

  update(beside) {
    showBranches(this.branches, this.node, beside, this.actions);
  }

  edit() {
    const said = this.element.querySelector(".said");
    if (!said) return this.element.querySelector("textarea").focus();  // it is being edited already
    const field = h("textarea", {"aria-label": "Edited message", rows: Math.min(12, this.node.content.split("\n").length + 1), value: this.node.content});
    const close = () => form.replaceWith(said, this.footer);
    const form = h("form", {class: "edit", onsubmit: event => {
      event.preventDefault();
      if (!field.value.trim() && !this.node.files?.length) return;
      if (this.actions.edit(this.node, field.value.trim())) close();
    }, onkeydown: event => {
      if (event.key === "Escape" && !event.isComposing) { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    }}, field, h("div", {class: "row end"},
      h("button", {type: "button", class: "plain", onclick: close}, "Cancel"),
      h("button", {class: "primary"}, "Send")));
    this.footer.remove();
    said.replaceWith(form);
    field.focus();
  }
}

class AssistantMessage {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.notice = h("p", {class: "notice", hidden: true});
    this.thoughts = h("div");
    this.thinking = h("details", {hidden: true}, h("summary", {}, "Thoughts"), this.thoughts);
    this.prose = h("div", {class: "prose"});
    this.rendered = new Rendered(this.prose);
    this.waiting = h("span", {class: "waiting", role: "img", "aria-label": "Waiting for the answer"}, h("i"), h("i"), h("i"));
    this.calls = h("div");
    this.fault = h("div", {class: "fault-box", role: "alert", hidden: true});
    this.branches = h("span", {class: "branches"});
    this.figures = h("span", {class: "figures"});
    this.footer = h("footer", {}, copyButton("Copy", () => node.content, SMALL), actions.again && act("again", "Ask again", () => actions.again(node)), this.branches, this.figures);
    this.element = h("article", {class: "assistant", "aria-label": node.model},
      h("h2", {class: "who"}, node.model), this.notice, this.thinking, this.prose, this.waiting, this.calls, this.fault, this.footer);
  }

  update(beside, isRunning) {
    const {node} = this;
    this.rendered.show(node.content);
    this.thoughts.textContent = node.reasoning;
    this.thinking.hidden = !node.reasoning;
    this.waiting.hidden = !isRunning || node.content !== "";
    this.calls.replaceChildren(...node.calls.map(callBox));
    this.notice.hidden = !node.dropped;
    this.notice.textContent = `The conversation is longer than the model's context. The ${node.dropped === 1 ? "first message was" : `first ${node.dropped} messages were`} left out.`;
    this.footer.hidden = isRunning;
    this.figures.textContent = figuresOf(node);
    this.#showFault();
    showBranches(this.branches, node, beside, this.actions);
  }

  #showFault() {
    const {error, needsKey} = this.node;
    this.fault.hidden = !error;
    if (!error) return;
    const remedy = needsKey ? this.actions.fixKey && ["Enter key", this.actions.fixKey] : this.actions.again && ["Try again", () => this.actions.again(this.node)];
    this.fault.replaceChildren(h("span", {}, error));
    if (remedy) this.fault.append(h("button", {type: "button", class: "outline", onclick: remedy[1]}, remedy[0]));
  }
}

class ToolMessage {
  constructor(node) {
    this.element = h("article", {class: "tool", "aria-label": "Tool result"}, h("h2", {class: "who"}, `Result of ${node.name ?? "the tool"}`), h("div", {class: "said"}, node.content));
  }

  update() {
    // a result never changes
  }
}

function callBox(call) {
  return h("section", {class: "call", "aria-label": `Call of ${call.name}`},
    h("header", {}, h("span", {class: "faint"}, call.waits ? "wants to call" : "calls"), h("strong", {}, call.server ? `${call.server}: ${call.name}` : call.name)),
    h("pre", {tabindex: "0", "aria-label": "Arguments"}, h("code", {}, coloured(indented(call.arguments), "json"))),
    call.output !== undefined && h("pre", {tabindex: "0", "aria-label": "Result"}, call.output),
    call.error && h("p", {class: "fault"}, call.error));
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;  // the JSON is incomplete while the call streams
  }
}

function showBranches(into, node, beside, actions) {
  into.replaceChildren();
  if (!actions.choose || !beside || beside.length < 2) return;
  const at = beside.indexOf(node);
  into.append(
    iconButton("left", "Previous version", () => actions.choose(beside[at - 1]), {class: "icon-button small", disabled: at === 0}),
    `${at + 1}/${beside.length}`,
    iconButton("right", "Next version", () => actions.choose(beside[at + 1]), {class: "icon-button small", disabled: at === beside.length - 1}));
}

const act = (name, label, run) => iconButton(name, label, run, SMALL);
