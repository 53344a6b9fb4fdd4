/* Requests to the server. */

import {events} from "./events.js";

const KEY = "relaxserve.key";  // kept for this tab only

export class ApiFault extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }

  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

let unsaved = "";  // a browser may forbid storage: the key then lasts as long as the page

export const key = {
  get() {
    try {
      return sessionStorage.getItem(KEY) ?? unsaved;
    } catch {
      return unsaved;
    }
  },
  set(value) {
    unsaved = value;
    try {
      if (value) sessionStorage.setItem(KEY, value);
      else sessionStorage.removeItem(KEY);
    } catch {
      // storage is forbidden
    }
  },
};

/* Return the address of a path of the server. Behind a proxy, all its paths may have a prefix, which the page's address has too. */
export const address = path => new URL(path.replace(/^\//, ""), document.baseURI).href;

/* Return the response to a request. Throw its error as an ApiFault. */
async function respond(path, {method = "GET", body, signal} = {}) {
  const headers = {};
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const isForm = body instanceof FormData;  // whose type has a boundary, which the browser writes
  if (body !== undefined && !isForm) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {method, headers, body: body === undefined || isForm ? body : JSON.stringify(body), signal});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFault(0, "unreachable", "The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const error = (await response.json().catch(() => ({}))).error ?? {};
  throw new ApiFault(response.status, error.code ?? "", error.message ?? `${response.status} ${response.statusText}`);
}

export async function ask(path, options) {
  return (await respond(path, options)).json();
}

export async function askText(path, options) {
  return (await respond(path, options)).text();
}

/* Yield the events of a stream as values, up to [DONE]. Throw an ApiFault at an error event, or if the stream ends before [DONE]. */
export async function* stream(path, options) {
  const {body} = await respond(path, options);
  try {
    for await (const data of events(body)) {
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error && !event.object) throw new ApiFault(event.error.status ?? 500, event.error.code, event.error.message);
      yield event;
    }
  } catch (error) {
    if (error instanceof ApiFault || error.name === "AbortError") throw error;
    throw lost();
  }
  throw lost();
}

const lost = () => new ApiFault(0, "connection_lost", "The connection was lost before the end.");
