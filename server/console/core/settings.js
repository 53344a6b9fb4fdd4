/* The settings stored in this browser: the theme, the options of new chats, presets. */

const PREFIX = "relaxserve.";

/* A browser may forbid storage. Settings then last as long as the page. */
const unsaved = new Map();

export function load(name, otherwise) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? unsaved.get(name) ?? otherwise : JSON.parse(text);
  } catch {
    return unsaved.get(name) ?? otherwise;
  }
}

export function keep(name, value) {
  unsaved.set(name, value);
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // storage is forbidden, so the setting lasts as long as the page
  }
}
