/* Create elements from values and never from markup, so that a model's text can only become a text node. */

const SVG = "http://www.w3.org/2000/svg";

/* Paths of icons on a grid of 20 by 20. */
const ICONS = {
  menu: "M3 6h14M3 10h14M3 14h14",
  upload: "M10 12.5V3M6 6.5L10 2.5l4 4M3.5 16.5h13",
  share: "M14 4a2 2 0 1 0 .01 0M6 8.5a2 2 0 1 0 .01 0M14 13a2 2 0 1 0 .01 0M7.8 9.5l4.5-2.6M7.8 11.5l4.5 2.6",
  clip: "M14.5 9.5l-5 5a3.2 3.2 0 0 1-4.6-4.6l6-6a2.2 2.2 0 0 1 3.1 3.1l-6 6a1 1 0 0 1-1.5-1.5l5-5",
  camera: "M3 6.5h3l1.5-2h5l1.5 2h3v9.5H3zM10 8.2a2.9 2.9 0 1 0 .01 0",
  microphone: "M10 2.8a2.3 2.3 0 0 1 2.3 2.3v4.6a2.3 2.3 0 0 1-4.6 0V5.1A2.3 2.3 0 0 1 10 2.8zM5 9.5a5 5 0 0 0 10 0M10 14.5v3M7.5 17.5h5",
  plus: "M10 4v12M4 10h12",
  chat: "M4 4.5h12a1.5 1.5 0 0 1 1.5 1.5v7a1.5 1.5 0 0 1-1.5 1.5H9l-4 3v-3H4A1.5 1.5 0 0 1 2.5 13V6A1.5 1.5 0 0 1 4 4.5z",
  compare: "M3 4h5.5v12H3zM11.5 4H17v12h-5.5z",
  models: "M10 2.5l6.5 3.75v7.5L10 17.5l-6.5-3.75v-7.5zM3.5 6.25L10 10m0 0l6.5-3.75M10 10v7.5",
  live: "M2.5 10.5h3.5l2-6 4 11 2-5h3.5",
  book: "M10 5.5C8.5 4 6 3.5 3 3.5v11.5c3 0 5.5.5 7 2 1.5-1.5 4-2 7-2V3.5c-3 0-5.5.5-7 2zm0 0V17",
  options: "M3 6h7m4 0h3M3 14h3m4 0h7M12 4v4M8 12v4",
  trash: "M3.5 5.5h13M8 5.5V3.5h4v2M5 5.5l.8 11h8.4l.8-11M8.5 8.5v5M11.5 8.5v5",
  pencil: "M3.5 16.5l.8-3.5L13.5 3.8l2.7 2.7L7 15.7z",
  copy: "M7 7h9.5v9.5H7zM13 7V3.5H3.5V13H7",
  check: "M4 10.5l4 4 8-9",
  again: "M16.5 4v4h-4M16 8a6.5 6.5 0 1 0 .5 3.5",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  download: "M10 3v9.5M6 9l4 4 4-4M3.5 16.5h13",
  search: "M9 3.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11zM13 13l4 4",
  theme: "M10 3.5a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM10 3.5v13M10 6.5h5.4M10 10h6.5M10 13.5h5.4",
  key: "M7 8.5a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM9.8 9.7l6.7-6.7M13 6.5l3 3",
  close: "M5 5l10 10M15 5L5 15",
  send: "M10 16V4.5M5 9.5l5-5 5 5",
  stop: "M5.5 5.5h9v9h-9z",
};

/* Return a new element with attributes and children: `h("button", {class: "plain", onclick: stop}, icon("stop"), "Stop")`. An attribute that
   begins with `on` is a listener. Attributes and children that are null, undefined or false are left out. */
export function h(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "disabled") element[key] = value;
    else element.setAttribute(key === "class" ? "class" : key, value === true ? "" : value);
  }
  element.append(...children.flat().filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export function icon(name) {
  return svg("svg", {viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true"}, svg("path", {d: ICONS[name]}));
}

/* Return a button with only an icon. Its label is for screen readers and is its tooltip. */
export function iconButton(name, label, onclick, attributes = {}) {
  return h("button", {type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes}, icon(name));
}

export const find = selector => document.querySelector(selector);

/* Draw the icons that the static markup names. */
export function drawIcons(root = document) {
  for (const place of root.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
}

let announcing = 0;

/* Announce a text to screen readers only. */
export function announce(text) {
  find("#announcer").textContent = text;
  clearTimeout(announcing);
  announcing = setTimeout(() => { find("#announcer").textContent = ""; }, 5000);
}

/* Show a short message at the lower edge for some seconds, optionally with a button for one action: {label, run}. */
export function toast(text, action = null) {
  const box = h("div", {class: "toast"}, h("span", {}, text));
  const close = () => box.remove();
  if (action) box.append(h("button", {type: "button", class: "plain", onclick: () => { close(); action.run(); }}, action.label));
  box.append(iconButton("close", "Dismiss", close));
  find("#toasts").append(box);
  setTimeout(close, action ? 10000 : 6000);
}

/* Let the browser save a text as a file. */
export function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], {type}));
  h("a", {href: address, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/* Let the user choose a file. Return it, or null. */
export function chooseFile(accept) {
  return new Promise(resolve => {
    const field = h("input", {type: "file", accept, class: "unseen", "aria-label": "File", onchange: () => end(field.files[0] ?? null), oncancel: () => end(null)});
    const end = file => { field.remove(); resolve(file); };
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.click();
  });
}

/* Ask before an action that cannot be undone, or that somebody else has prepared. Return whether the user agrees. */
export function confirmed(question, verb, look = "danger") {
  return new Promise(resolve => {
    const dialog = h("dialog", {class: "confirm", "aria-label": question, onclose: () => { dialog.remove(); resolve(dialog.returnValue === "yes"); }},
      h("p", {}, question),
      h("div", {class: "row end"},
        h("button", {type: "button", class: "plain", onclick: () => dialog.close("")}, "Cancel"),
        h("button", {type: "button", class: look, onclick: () => dialog.close("yes")}, verb)));
    document.body.append(dialog);
    dialog.showModal();
  });
}
