/* The form beside the chat for the options of answers. */

import {find, h, iconButton} from "../core/dom.js";
import {keep, load} from "../core/settings.js";
import {asFields, NUMBERS, OptionFault, PRESETS, TEXTS} from "./options.js";

const AREAS = {
  system: {label: "System prompt", rows: 4, hint: "How the model should answer", code: false},
  schema: {label: "JSON schema of the answer", rows: 4, hint: '{"type": "object", "properties": …}', code: true},
  mcp: {label: "MCP servers", rows: 1, hint: "Names that the operator has allowed: docs, files", code: false},
  tools: {label: "Tools", rows: 5, hint: '[{"name": "weather", "parameters": …}]', code: true},
};

const OWN = "own ";  // begins the values of the user's presets, whose names may be those of the others

export class OptionsPanel {
  constructor(app) {
    this.app = app;
    this.root = find("#options");
    this.fields = {};
    for (const button of document.querySelectorAll("[data-action=options]")) button.addEventListener("click", () => this.toggle());
    document.addEventListener("keydown", event => {
      if (event.key === "Escape" && !event.isComposing && !this.root.hidden && this.root.contains(document.activeElement)) {
        event.stopPropagation();
        this.toggle(false);
      }
    }, true);
  }

  toggle(isOpen = this.root.hidden) {
    const hadFocus = this.root.contains(document.activeElement);
    if (isOpen) this.#draw();
    this.root.hidden = !isOpen;
    for (const button of document.querySelectorAll("[data-action=options]")) button.setAttribute("aria-expanded", String(isOpen));
    this.app.showScrim();
    if (isOpen) this.root.querySelector("select").focus();
    else if (hadFocus) [...document.querySelectorAll("[data-action=options]")].find(button => button.checkVisibility())?.focus();
  }

  /* Show the options of the conversation that is now open. */
  refresh() {
    if (!this.root.hidden) this.#draw();
  }

  #draw() {
    const options = this.app.options;
    this.presets = h("select", {"aria-label": "Preset", onchange: () => this.#apply(this.presets.value)});
    this.#listPresets();
    for (const name of TEXTS) this.fields[name] = this.#area(name, options);
    for (const number of NUMBERS) this.fields[number.name] = this.#number(number, options);
    this.truncate = h("input", {type: "checkbox", checked: options.truncate !== false, onchange: () => this.#read()});
    this.faults = Object.fromEntries(["schema", "tools"].map(name => [name, h("span", {class: "fault", role: "alert"})]));
    const field = (name, label) => h("label", {class: "field"}, label, this.fields[name], this.faults[name] ?? null);
    this.root.replaceChildren(h("form", {class: "options", onsubmit: event => event.preventDefault()},
      h("div", {class: "row"}, h("h2", {class: "grow"}, "Options"), iconButton("close", "Close options", () => this.toggle(false))),
      h("div", {class: "row"}, this.presets,
        iconButton("plus", "Save as preset", () => this.#save()), iconButton("trash", "Delete preset", () => this.#drop())),
      field("system", AREAS.system.label),
      h("div", {class: "numbers"}, NUMBERS.map(({name, label, hint}) => h("label", {class: "field", title: hint}, label, this.fields[name]))),
      h("label", {class: "check"}, this.truncate, "Leave out the oldest messages when the context is full"),
      field("schema", AREAS.schema.label), field("tools", AREAS.tools.label), field("mcp", AREAS.mcp.label),
      h("p", {class: "hint"}, "Empty fields use the model's defaults. You enter the results of tool calls yourself; the server calls tools of MCP servers, after you have approved each call.")));
    this.#check();
  }

  #area(name, options) {
    const {rows, hint, code} = AREAS[name];
    return h("textarea", {name, rows, placeholder: hint, class: code ? "code" : null, spellcheck: code ? "false" : null, value: options[name] ?? "", onchange: () => this.#read()});
  }

  #number({name, min, max, step}, options) {
    return h("input", {name, type: "number", min, max, step: step === 1 ? 1 : "any", inputmode: "decimal", value: options[name] ?? "", onchange: () => this.#read()});
  }

  #read() {
    const options = {truncate: this.truncate.checked};
    for (const name of TEXTS) if (this.fields[name].value.trim()) options[name] = this.fields[name].value;
    for (const {name} of NUMBERS) {
      const field = this.fields[name], isRight = field.checkValidity();
      field.setAttribute("aria-invalid", String(!isRight));
      if (field.value !== "" && isRight) options[name] = Number(field.value);
    }
    this.#check(options);
    this.app.setOptions(options);
  }

  /* Show the error of a field below it. */
  #check(options = this.app.options) {
    for (const name of ["schema", "tools"]) {
      let message = "";
      try {
        asFields({[name]: options[name]});
      } catch (error) {
        if (!(error instanceof OptionFault)) throw error;
        message = error.message;
      }
      this.faults[name].textContent = message;
      this.fields[name].setAttribute("aria-invalid", String(message !== ""));
    }
  }

  #listPresets(chosen = "") {
    const own = load("presets", {});
    this.presets.replaceChildren(new Option("Presets", "", true, !chosen),
      ...Object.keys(PRESETS).map(name => new Option(name, name)), ...Object.keys(own).map(name => new Option(`${name} (yours)`, OWN + name, false, name === chosen)));
  }

  #apply(value) {
    const chosen = value.startsWith(OWN) ? load("presets", {})[value.slice(OWN.length)] : PRESETS[value];
    if (!chosen) return;
    this.app.setOptions({...chosen});
    this.#draw();
    this.presets.value = value;
  }

  #save() {
    const name = h("input", {required: true, maxlength: 60, "aria-label": "Name of the preset", placeholder: "Name"});
    const dialog = h("dialog", {"aria-label": "Save preset", onclose: () => dialog.remove()},
      h("form", {method: "dialog", onsubmit: () => {
        keep("presets", {...load("presets", {}), [name.value.trim()]: this.app.options});
        this.#listPresets(name.value.trim());
      }},
      h("h2", {}, "Save preset"), h("p", {}, "Save all options of this chat under a name."), name,
      h("div", {class: "row end"},
        h("button", {type: "button", class: "plain", onclick: () => dialog.close()}, "Cancel"), h("button", {class: "primary"}, "Save"))));
    document.body.append(dialog);
    dialog.showModal();
  }

  #drop() {
    const {value} = this.presets;
    if (!value.startsWith(OWN)) return;
    const {[value.slice(OWN.length)]: _, ...rest} = load("presets", {});
    keep("presets", rest);
    this.#listPresets();
  }
}
