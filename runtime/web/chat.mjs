// The script of chat.html: chat with the model of this export, or let it write down speech. No message, image or sound leaves the browser.

import { listen } from './listen.mjs';
import { look } from './look.mjs';
import { RelaxServe } from './relaxserve.mjs';

const part = (id) => document.getElementById(id);
const [log, status, prompt, send, stop, progress] = ['log', 'status', 'prompt', 'send', 'stop', 'progress'].map(part);
const messages = [];
const KEY = 'relaxserve.key';
let abort = null, key = stored();

/** Return the API key that the console stored in this tab, or null. A browser may forbid storage. */
function stored() {
  try { return sessionStorage.getItem(KEY); } catch { return null; }
}

/** Append a message to the conversation that the page shows, and return its element. */
function shown(role, text) {
  const message = document.createElement('div');
  message.className = `message ${role}`;
  message.textContent = text;
  log.append(message);
  message.scrollIntoView({ block: 'end' });
  return message;
}

/** Return a new element for the thoughts before an answer. */
function thoughtsBefore(message) {
  const thoughts = document.createElement('div');
  thoughts.className = 'thoughts';
  message.before(thoughts);
  return thoughts;
}

/** Show the answer to the messages, and add it to them. Return false if a fault has left no text of an answer. */
async function answered(client) {
  const message = shown('assistant', ''), began = performance.now();
  let count = 0, failed = false, thoughts = null;
  const onProgress = ({ crops, all }) => { status.textContent = `Looking: ${crops} of ${all} parts of images …`; };
  abort = new AbortController();
  stop.hidden = false;
  send.disabled = true;
  try {
    const chunks = await client.chat.completions.create({ messages, stream: true, stream_options: { include_usage: true } }, { signal: abort.signal, onProgress });
    for await (const { choices: [choice], usage } of chunks) {
      if (choice?.delta.reasoning_content) {
        thoughts ??= thoughtsBefore(message);
        thoughts.textContent += choice.delta.reasoning_content;
      }
      message.textContent += choice?.delta.content ?? '';
      count = usage?.completion_tokens ?? count;
    }
    status.textContent = `${count} tokens, ${(1000 * count / (performance.now() - began)).toFixed(1)} per second, ${client.target}`;
  } catch (error) {
    failed = error.name !== 'AbortError';
    status.textContent = failed ? error.message : 'Stopped.';
  }
  stop.hidden = true;
  send.disabled = false;
  abort = null;
  const has = !failed || message.textContent !== '';
  if (has) messages.push({ role: 'assistant', content: message.textContent, ...(thoughts && { reasoning_content: thoughts.textContent }) });
  else for (const element of [thoughts, message]) element?.remove();
  return has;
}

/** Load the model with the stored API key, and show how far the load is. */
async function load() {
  progress.hidden = false;
  status.textContent = 'Loading the model …';
  return RelaxServe.load({
    headers: key ? { authorization: `Bearer ${key}` } : {},
    onProgress: (loaded, total) => { progress.value = loaded / total; },
    onSize: ({ memory, weights }) => { status.textContent = `Loading the model: ${inMiB(weights)} of weights, ${inMiB(memory)} of memory …`; },
    onDamage: (file) => { status.textContent = `${file} is damaged and is fetched again …`; },
  });
}

const inMiB = (bytes) => `${Math.ceil(bytes / 2 ** 20)} MiB`;

/** Load the model, and let the user talk to it. If the API key is missing or wrong, ask for one; show any other fault. */
async function begin() {
  try {
    const client = await load();
    part('key').hidden = progress.hidden = true;
    ready(client);
  } catch (error) {
    progress.hidden = true;
    part('key').hidden = error.code !== 401;
    status.textContent = error.message;
  }
}

/** Show the form that goes with the model: for a conversation, or for speech. */
function ready(client) {
  part('name').textContent = client.model.name;
  status.textContent = `Ready, ${client.target}, ${client.threads === 1 ? 'one thread' : `${client.threads} threads`}.`;
  if (client.model.kind !== 'transcriber') return converse(client);
  part('form').hidden = true;
  listen(client, { part, shown });
}

/** Let the form send messages. If a fault has left no text of an answer, the message goes back to the form. */
function converse(client) {
  const { take, giveBack } = look(client.model, { part });
  prompt.disabled = send.disabled = false;
  prompt.focus();
  part('form').addEventListener('submit', async (event) => {
    event.preventDefault();
    if (send.disabled) return;
    send.disabled = true;
    const images = await take(), text = prompt.value.trim();
    send.disabled = false;
    if (text === '' && images.length === 0) return;
    const parts = images.map((image) => image.part);
    messages.push({ role: 'user', content: parts.length === 0 ? text : [...parts, ...(text === '' ? [] : [{ type: 'text', text }])] });
    const question = shown('user', text);
    question.prepend(...images.map(({ picture }) => picture));
    prompt.value = '';
    if (parts.length > 0) status.textContent = 'Reading images …';
    if (await answered(client)) return;
    messages.pop();   // so that the next question does not fail for the same reason
    question.remove();
    prompt.value = [text, prompt.value].filter((part) => part !== '').join('\n');
    giveBack(images);
  });
  prompt.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      part('form').requestSubmit();
    }
  });
  stop.addEventListener('click', () => abort?.abort());
}

part('key').addEventListener('submit', (event) => {
  event.preventDefault();
  key = part('secret').value;
  try { sessionStorage.setItem(KEY, key); } catch { /* storage is forbidden: the key lasts as long as the page */ }
  begin();
});
begin();
