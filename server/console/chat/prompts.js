/* The prompt library: texts that the user writes once and uses often. They stay in this browser, and go elsewhere as a JSON file. */

import {chooseFile, h, icon, iconButton, save, toast} from "../core/dom.js";
import {keep, load} from "../core/settings.js";

const MOST = 500;
const MOST_CHARS = 100_000;

export const prompts = () => load("prompts", []);

/* Return the prompts of a file. Throw an Error that says what is wrong with it. */
export function parsePrompts(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is not JSON: ${error.message}`);
  }
  if (!Array.isArray(found)) throw new Error('the file has no list of prompts; expected [{"name": …, "text": …}]');
  if (found.length > MOST) throw new Error(`the file has ${found.length} prompts; expected at most ${MOST}`);
  return found.map((one, at) => {
    const {name, text: body} = one ?? {};
    const isRight = typeof name === "string" && name.trim() && typeof body === "string" && body.trim() && body.length <= MOST_CHARS;
    if (!isRight) throw new Error(`prompt ${at + 1} of the file has no name or no text`);
    return {name: name.trim().slice(0, 100), text: body};
  });
}

/* Return the prompts, sorted by name, in which those of `added` replace others of the same name. Those beyond MOST are left out. */
export function merged(known, added) {
  const names = new Set(added.map(({name}) => name));
  return [...known.filter(({name}) => !names.has(name)), ...added].sort((a, b) => a.name.localeCompare(b.name)).slice(0, MOST);
}

/* Show the library. `use` is called with the text of the chosen prompt, `draft` is the text of the message that is being written. */
export function openPrompts({use, draft}) {
  const list = h("ul", {class: "prompts"}), search = h("input", {type: "search", "aria-label": "Search prompts", placeholder: "Search prompts", oninput: () => show()});
  const name = h("input", {required: true, maxlength: 100, "aria-label": "Name of the prompt", placeholder: "Name"});
  const text = h("textarea", {required: true, rows: 4, maxlength: MOST_CHARS, "aria-label": "Text of the prompt", placeholder: "Text", value: draft});
  const set = all => { keep("prompts", all); show(); };
  const form = h("form", {class: "stack", onsubmit: event => {
    event.preventDefault();
    if (!name.value.trim() || !text.value.trim()) return;
    set(merged(prompts(), [{name: name.value.trim(), text: text.value}]));
    form.reset();
    text.value = "";
  }}, name, text, h("div", {class: "row end"}, h("button", {class: "outline"}, "Keep prompt")));

  function show() {
    const wanted = search.value.trim().toLowerCase(), all = prompts();
    const found = all.filter(one => `${one.name}\n${one.text}`.toLowerCase().includes(wanted));
    list.replaceChildren(...found.map(one => h("li", {},
      h("button", {type: "button", class: "pick", title: one.name, onclick: () => { dialog.close(); use(one.text); }}, h("strong", {}, one.name), h("span", {class: "faint small"}, one.text.slice(0, 300))),
      iconButton("pencil", `Edit ${one.name}`, () => { name.value = one.name; text.value = one.text; text.focus(); }, {class: "icon-button small"}),
      iconButton("trash", `Delete ${one.name}`, () => set(prompts().filter(other => other.name !== one.name)), {class: "icon-button small"}))));
    if (!found.length) list.append(h("li", {class: "faint small"}, all.length ? "Nothing found." : "No prompt is kept yet. Prompts stay in this browser."));
    search.hidden = all.length < 2;
  }

  async function take() {
    const file = await chooseFile(".json,application/json");
    if (!file) return;
    try {
      const added = parsePrompts(await file.text());
      set(merged(prompts(), added));
      toast(added.length === 1 ? "1 prompt is imported." : `${added.length} prompts are imported.`);
    } catch (error) {
      toast(`${file.name} cannot be imported: ${error.message}.`);
    }
  }

  const dialog = h("dialog", {class: "library", "aria-label": "Prompts", onclose: () => dialog.remove()},
    h("header", {class: "row"}, h("h2", {class: "grow"}, "Prompts"), iconButton("close", "Close prompts", () => dialog.close())),
    search, list, form,
    h("div", {class: "row end"},
      h("button", {type: "button", class: "plain", onclick: take}, icon("upload"), "Import"),
      h("button", {type: "button", class: "plain", onclick: () => save("prompts.json", JSON.stringify(prompts(), null, 2), "application/json")}, icon("download"), "Export")));
  show();
  document.body.append(dialog);
  dialog.showModal();
}
