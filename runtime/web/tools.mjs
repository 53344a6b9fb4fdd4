// Find tool calls in an answer while it streams. Syntaxes and parts are those of server/text/dialects/calls/json_parser.py.
//
// A part is {content}, {call: index, id, name}, or {arguments, call: index}.

import { SPACE, stripped } from './methods.mjs';

const SEPARATORS = ' \t\r\n,;[]', NAME_KEYS = ['name', 'tool_name'], ARGUMENT_KEYS = ['arguments', 'parameters'];
const KEYS = [...NAME_KEYS, ...ARGUMENT_KEYS, 'type', 'id', 'function'];   // keys of a call, also in OpenAI's shape
const SHORT = new RegExp(`^[^${SPACE}[{]+[${SPACE}]*([[{]|$)`, 'u');   // a call without a key for its name, up to what follows the name
const NO_JSON = /^(NaN|-?Infinity)$/;
const ALPHABET = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789';

/** Finds the calls in one answer. `form` describes how the model writes them, `names` are those of the tools that it may call. */
export class ToolParser {
  #form; #markers; #names; #mostCalls; #state; #held = ''; #scanner; #started = false;
  #id = '';           // the id that the model has written for the call
  #ids = new Set();   // of all calls
  #raw = '';          // text after the content so far; if it turns out not to be a call, it is content, too
  #marked = false;    // whether a marker announced the call; then a call of an unknown tool also counts as a call
  numCalls = 0;

  constructor(form, names, mostCalls = Infinity) {
    this.#form = form;
    this.#markers = [form.opening, form.closing, form.arguments_marker, form.id_marker].filter(Boolean);
    this.#names = new Set(names);
    this.#mostCalls = mostCalls;
    this.#state = form.bare ? 'start' : 'text';
  }

  /** True if all allowed calls have been made. */
  get done() { return this.#state === 'done'; }

  /** Take more text of the answer, and return the parts that are certain by now. */
  push(text) {
    this.#held += text;
    const parts = [];
    while (this.#advance(parts));
    return parts;
  }

  /** Return the text that was held back. A call that was cut off stays incomplete. Behind a marker, the beginning of a call is no content. */
  finish() {
    const held = this.#held, opening = this.#form.opening;
    const announced = this.#marked && opening !== '' && !/^[\p{L}\p{N}]+$/u.test(opening);
    this.#held = '';
    let text = '';
    if (this.#state === 'start' || this.#state === 'text') text = held;
    else if (this.#state === 'call' && !this.#started && !announced) text = this.#raw;
    else if (this.#state === 'between' && this.numCalls === 0 && !announced) text = this.#raw + held;
    if (this.numCalls > 0 && opening.startsWith(stripped(text))) text = '';   // white space, or the beginning of a marker
    return text === '' ? [] : [{ content: text }];
  }

  /** Make one change of state. Return false if more text is needed. */
  #advance(parts) {
    if (this.#held === '') return false;
    switch (this.#state) {
      case 'start': return this.#atStart();
      case 'text': return this.#inText(parts);
      case 'between': return this.#between(parts);
      case 'call': return this.#inCall(parts);
      default:
        this.#held = '';
        return false;
    }
  }

  #atStart() {
    const begun = stripped(this.#held);
    if (begun === '') return false;
    this.#state = '{['.includes(begun[0]) ? 'between' : 'text';
    return true;
  }

  /** Pass on content up to an opening marker. */
  #inText(parts) {
    const marker = this.#form.opening, at = marker === '' ? -1 : this.#held.indexOf(marker);
    let text;
    if (at >= 0) {
      const before = this.#held.slice(0, at);
      text = rightStripped(before);
      this.#state = 'between';
      this.#marked = true;
      this.#raw = before.slice(text.length) + marker;
      this.#held = this.#held.slice(at + marker.length);
    } else {
      text = rightStripped(this.#held.slice(0, this.#held.length - overlap(this.#held, marker)));   // white space before a call is not content
      this.#held = this.#held.slice(text.length);
    }
    if (text !== '') parts.push({ content: text });
    return at >= 0;
  }

  /** Read markers, separators and the beginning of a call. Any other text ends the calls. */
  #between(parts) {
    const form = this.#form, held = this.#held;
    for (const marker of this.#markers) {
      if (held.startsWith(marker)) {
        this.#read(marker.length);
        if (marker === form.closing) {
          this.#state = 'text';
          this.#raw = '';
        } else this.#marked = true;
        return true;
      }
      if (marker.startsWith(held)) return false;
    }
    if (SEPARATORS.includes(held[0])) {
      this.#read(1);
      return true;
    }
    if (held[0] === '{') return this.#begin(new CallScanner(null, this.#marked ? null : this.#names));
    if (form.arguments_marker && this.#marked && SHORT.test(held)) {
      const brace = held.indexOf('{');
      if (brace < 0) return false;
      this.#read(brace);
      const at = `${held.slice(0, brace)}[`.indexOf('[');
      return this.#begin(new CallScanner(stripped(held.slice(0, at))), this.#idIn(held.slice(at, brace)));
    }
    this.#giveBack(parts);
    return true;
  }

  /** Return the id of a call that the model has written before the arguments, or '' if there is none that templates take. */
  #idIn(text) {
    const { id_marker: marker, id_length: length } = this.#form;
    if (!marker || !text.startsWith(marker)) return '';
    const id = stripped(text.slice(marker.length).split('[')[0]);
    return /^[A-Za-z0-9]*$/.test(id) && id.length === length ? id : '';
  }

  #begin(scanner, id = '') {
    this.#scanner = scanner;
    this.#id = id;
    this.#started = false;
    this.#state = 'call';
    return true;
  }

  /** Read the call further, and pass on its name and arguments. Text that turns out to be no call becomes content. */
  #inCall(parts) {
    const scanner = this.#scanner, call = this.numCalls;
    this.#read(scanner.feed(this.#held));
    if (!this.#started && scanner.name !== null && (scanner.done || !scanner.inHead)) {
      this.#started = true;
      const id = this.#id === '' || this.#ids.has(this.#id) ? newId(this.#form.id_length) : this.#id;   // the model may repeat an id
      this.#ids.add(id);
      parts.push({ call, id, name: scanner.name });
    }
    const text = this.#started ? scanner.takeArguments() : '';
    if (text !== '') parts.push({ call, arguments: text });
    if (!scanner.done && !scanner.failed) return false;
    if (!this.#started) this.#giveBack(parts);
    else {
      this.numCalls++;
      this.#raw = '';
      this.#state = this.numCalls === this.#mostCalls ? 'done' : 'between';
    }
    return true;
  }

  #read(length) {
    this.#raw += this.#held.slice(0, length);
    this.#held = this.#held.slice(length);
  }

  /** Add the text read so far to the content, because it is not a call. After that, only a marker can begin a call. */
  #giveBack(parts) {
    let text = this.#raw;
    this.#raw = '';
    this.#state = 'text';
    if (this.numCalls > 0) while (text !== '' && SEPARATORS.includes(text[0])) text = text.slice(1);
    if (text !== '') parts.push({ content: text });
  }
}

/** Escapes control characters within the strings of a JSON object that is read character by character. Small models leave line ends there
    as they are. Text that is no object stays as it is. */
class StringEscaper {
  inside = false;     // the text so far ends inside a string
  #first = '';        // the first character that is no white space
  #isEscape = false;  // the text so far ends with the backslash of an escape

  /** Return a text with its control characters escaped. */
  escaped(text) { return Array.from(text, (char) => this.escapedChar(char)).join(''); }

  /**
   * Return the next character, or its escape if it is a control character in a string. If a backslash came before the control character,
   * return only the rest of the escape.
   */
  escapedChar(char) {
    this.#first ||= stripped(char);
    if (!this.inside) {
      this.inside = char === '"' && this.#first === '{';
      return char;
    }
    const isEscape = this.#isEscape;
    this.#isEscape = char === '\\' && !isEscape;
    this.inside = isEscape || char !== '"';
    return char < ' ' ? JSON.stringify(char).slice(isEscape ? 2 : 1, -1) : char;
  }
}

/** Reads the JSON object of one call character by character, and escapes control characters in its strings. If the name is known already,
    the whole object is the arguments. If no marker has announced a call, `offered` has the names of the tools: the object is no call if its
    name is another one, or if a key outside KEYS comes in its head, before the name and the key of the arguments. */
class CallScanner {
  done = false;
  failed = false;
  #depth = 0; #strings = new StringEscaper(); #key = ''; #span = ''; #arguments = ''; #anyArguments = false;
  #anyKey = false;   // the key of the arguments has come
  #atKey = true;   // at depth 1: a key comes next, else a value

  constructor(name = null, offered = null) {
    this.name = name;
    this.bare = name !== null;
    this.offered = offered;
  }

  /** True if no marker has announced a call, and the name or the key of the arguments is still missing. */
  get inHead() { return this.offered !== null && (this.name === null || !this.#anyKey); }

  /**
   * Read characters of the object. Return how many were read: all, or those up to the one that completes the object or shows that it is no
   * call.
   */
  feed(text) {
    for (let at = 0; at < text.length; at++) {
      this.#take(text[at]);
      if (this.done || this.failed) return at + 1;
    }
    return text.length;
  }

  /** Return the new text of the arguments. Arguments that are written as a JSON string are unpacked when the string is complete. If they
      are null, or absent from a complete object, return `{}`. */
  takeArguments() {
    if (this.#arguments.startsWith('"') && !this.#anyArguments) {
      if (this.#strings.inside && ARGUMENT_KEYS.includes(this.#key) && !this.#atKey) return '';   // the string is not complete
      try { this.#arguments = new StringEscaper().escaped(wholeCharacters(JSON.parse(this.#arguments))); } catch { return ''; }
    }
    if ('null'.startsWith(this.#arguments) && !this.#anyArguments) {
      if (!this.done && this.#arguments !== 'null') return '';
      this.#arguments = '{}';
    }
    const taken = this.#arguments;
    this.#arguments = '';
    this.#anyArguments ||= taken !== '';
    return taken;
  }

  /** Read the next character of the object. */
  #take(char) {
    const isInString = this.#strings.inside, written = this.#strings.escapedChar(char);
    if (isInString || char === '"') this.#keep(written);
    else if (char === '{' || char === '[') {
      this.#depth++;
      if (this.#depth > 1 || this.bare) this.#keep(char);
    } else if (char === '}' || char === ']') this.#close(char);
    else if (this.#depth > 1 || this.bare) this.#keep(char);
    else if (char === ':' && this.#atKey) this.#endKey();
    else if (char === ',') this.#endValue();
    else if (stripped(char) !== '') this.#keep(char);
  }

  #close(char) {
    this.#depth--;
    if (this.#depth > 0 || this.bare) this.#keep(char);
    else this.#endValue();
    this.done = this.#depth === 0 && !this.failed;
  }

  #keep(char) {
    if (this.bare || (ARGUMENT_KEYS.includes(this.#key) && !this.#atKey)) this.#arguments += char;
    else this.#span += char;
  }

  /**
   * Note the key that was just read. The object is no call if the key is no string, or if it is a key in the head that calls do not have.
   * A second key of arguments is ignored, and its value, too.
   */
  #endKey() {
    const key = this.#parsedSpan();
    this.#atKey = false;
    const isSecond = ARGUMENT_KEYS.includes(key) && (this.#anyArguments || this.#arguments !== '');
    this.#key = typeof key === 'string' && !isSecond ? key : '';
    this.failed ||= typeof key !== 'string' || (this.inHead && !KEYS.includes(key));
    this.#anyKey ||= ARGUMENT_KEYS.includes(key);
  }

  /**
   * Note the value that was just read, if it is the name of the tool. The object is no call if no marker has announced one and no tool has
   * this name. A key comes next.
   */
  #endValue() {
    if (!this.#atKey && !ARGUMENT_KEYS.includes(this.#key)) {
      const value = this.#parsedSpan();
      if (NAME_KEYS.includes(this.#key) && this.name === null) {
        if (typeof value === 'string' && (this.offered === null || this.offered.has(value))) this.name = wholeCharacters(value);
        else this.failed ||= this.offered !== null;
      }
    }
    this.#atKey = true;
    this.#key = this.#span = '';
  }

  /** Parse the text of the key or name that was just read. If it is no JSON, the object is no call: return null. */
  #parsedSpan() {
    const span = this.#span;
    this.#span = '';
    if (NO_JSON.test(span)) return Number(span);   // Python reads it
    try { return JSON.parse(span); } catch {
      this.failed = true;
      return null;
    }
  }
}

const rightStripped = (text) => stripped(text, null, false);

/** Return a text in which each half of a surrogate pair without the other half is replaced. */
const wholeCharacters = (text) => text.replace(/\p{Surrogate}/gu, '\ufffd');

/** Return the length of the longest suffix of a text that is a proper prefix of the marker. */
export function overlap(text, marker) {
  for (let length = Math.min(text.length, marker.length - 1); length > 0; length--) if (text.endsWith(marker.slice(0, length))) return length;
  return 0;
}

/** Return a random id of a call. Ids of 9 characters have no prefix. */
function newId(length) {
  const token = Array.from(crypto.getRandomValues(new Uint32Array(length)), (word) => ALPHABET[word % ALPHABET.length]).join('');
  return length === 9 ? token : `call_${token}`;
}
