/* The dialog in which a conversation becomes a link or a file, and what reads it back. Nothing leaves the machine by itself. */

import {copy} from "../core/clipboard.js";
import {chooseFile, confirmed, h, icon, save, toast} from "../core/dom.js";
import {path} from "./conversation.js";
import {asJson, asMarkdown, fileName, fromLink, linkOf, parseConversation} from "./exchange.js";

export function openShare(conversation) {
  const close = () => dialog.close(), name = fileName(conversation);
  const way = (picture, label, about, act) => h("li", {}, h("button", {type: "button", class: "pick", title: label, onclick: act}, h("strong", {class: "row"}, icon(picture), label), h("span", {class: "faint small"}, about)));
  const dialog = h("dialog", {"aria-label": "Share", onclose: () => dialog.remove()},
    h("h2", {}, "Share"),
    h("ul", {class: "prompts"},
      way("copy", "Copy a link", "The shown messages are in the link itself, and no server stores them. Whoever reaches this server can open it.", () => { close(); copyLink(conversation); }),
      way("download", "Save as Markdown", "The shown messages, for people.", () => { close(); save(`${name}.md`, asMarkdown(conversation), "text/markdown"); }),
      way("download", "Save as JSON", "All versions, with options. It can be imported.", () => { close(); save(`${name}.json`, asJson(conversation), "application/json"); })),
    h("div", {class: "row end"}, h("button", {type: "button", class: "plain", onclick: close}, "Cancel")));
  document.body.append(dialog);
  dialog.showModal();
}

async function copyLink(conversation) {
  const link = await linkOf(conversation);
  if (link === null) toast("The conversation is too long for a link: save it as JSON.");
  else toast(await copy(link) ? "The link is copied." : "The browser does not allow copying.");
}

/* Return the conversation of a file that the user chooses, or null. */
export async function importConversation() {
  const file = await chooseFile(".json,application/json");
  if (!file) return null;
  try {
    return parseConversation(await file.text());
  } catch (error) {
    toast(`${file.name} holds no conversation: ${error.message}`);
    return null;
  }
}

/* Return the conversation of a link if the user wants to keep it, or null. Anybody may have made the link. */
export async function acceptLink(data) {
  try {
    const conversation = await fromLink(data), count = path(conversation).length;
    const question = `Keep the shared conversation “${conversation.title}” with ${count === 1 ? "1 message" : `${count} messages`} in this browser?`;
    return await confirmed(question, "Keep", "primary") ? conversation : null;
  } catch (error) {
    toast(`${error.message[0].toUpperCase()}${error.message.slice(1)}.`);
    return null;
  }
}
