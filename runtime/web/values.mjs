// Values of chat templates, with the meaning that they have in Python. The module of npm gives them that of JavaScript in many places.

import { Float, writtenFloat } from './json.mjs';
import { Environment, Interpreter } from './vendor/jinja.mjs';

const of = (value) => new Environment().set('value', value).constructor;
const own = new Interpreter(new Environment());
export const [Text, Whole, Fraction, List, Mapping, Missing, Nothing, Truth, Callable] = ['', 0, 0.5, [], {}, undefined, null, true, () => {}].map(of);
export const Tuple = own.evaluate({ type: 'TupleLiteral', value: [] }, own.global).constructor;
export const Space = own.global.lookupVariable('namespace').value([]).constructor;   // a namespace; `loop` is one, too

const NAMES = [[Text, 'str'], [Truth, 'bool'], [Whole, 'int'], [Fraction, 'float'], [Tuple, 'tuple'], [List, 'list'], [Space, 'namespace'],
  [Mapping, 'dict'], [Missing, 'Undefined'], [Nothing, 'NoneType'], [Callable, 'function']];

/** Return the name of a value's type in Python. */
export const kindOf = (value) => NAMES.find(([kind]) => value instanceof kind)?.[1] ?? value.type;

export const isNumber = (value) => value instanceof Whole || value instanceof Fraction || value instanceof Truth;
export const isTrue = (value) => (value instanceof Nothing || value instanceof Missing ? false : value.__bool__().value);
export const truth = (value) => new Truth(value);
export const whole = (value) => new Whole(typeof value === 'bigint' && Number.isSafeInteger(Number(value)) ? Number(value) : value);

/** Return the value of a template for one of JavaScript. */
export function made(value) {
  if (typeof value?.__bool__ === 'function') return value;
  if (value instanceof Float) return new Fraction(value.value);
  if (typeof value === 'bigint') return new Whole(value);
  if (Array.isArray(value)) return new List(value.map(made));
  if (value instanceof Map) return new Mapping(new Map(Array.from(value, ([key, one]) => [key, made(one)])));
  if (value !== null && typeof value === 'object') return new Mapping(new Map(Object.entries(value).map(([key, one]) => [key, made(one)])));
  return new Environment().set('value', value);
}

/** Return the value of a mapping's key. Mappings keep their keys as values of JavaScript. */
const keyed = (key) => (typeof key === 'bigint' ? new Whole(key) : made(key));

/** Return the items over which Python iterates: of a list, the characters of a text, or the keys of a mapping. */
export function items(value) {
  if (value instanceof List) return value.value;
  if (value instanceof Text) return Array.from(value.value, (letter) => new Text(letter));
  if (value instanceof Mapping) return Array.from(value.value.keys(), keyed);
  if (value instanceof Missing) return [];
  throw new TypeError(`'${kindOf(value)}' object is not iterable`);
}

/** Return the keys of a mapping, each with its value. */
export const pairs = ({ value }) => new List(Array.from(value, ([key, one]) => new Tuple([keyed(key), one])));

export function equal(a, b) {
  if (isNumber(a) && isNumber(b)) return a.value == b.value;   // also a BigInt and a number
  if (a instanceof Text && b instanceof Text) return a.value === b.value;
  if (a instanceof Nothing || a instanceof Missing) return a.constructor === b.constructor;
  if (a instanceof List && b instanceof List) {
    return a instanceof Tuple === b instanceof Tuple && a.value.length === b.value.length && a.value.every((item, i) => equal(item, b.value[i]));
  }
  if (!(a instanceof Mapping && b instanceof Mapping)) return a === b;
  return a.value.size === b.value.size && Array.from(a.value).every(([key, one]) => b.value.has(key) && equal(one, b.value.get(key)));
}

/** Return whether a value is among the items of another one, or a part of a text. */
export function contains(item, within) {
  if (within instanceof Text && !(item instanceof Text)) throw new TypeError(`'in <string>' requires string as left operand, not ${kindOf(item)}`);
  if (within instanceof Text) return within.value.includes(item.value);
  return within instanceof Mapping ? within.value.has(item.value) : items(within).some((one) => equal(one, item));
}

/** Compare two texts by their characters, also beyond 16 bits. */
function inOrder(a, b) {
  const [one, other] = [a, b].map((text) => Array.from(text, (letter) => letter.codePointAt(0)));
  const at = one.findIndex((code, i) => code !== other[i]);
  return at < 0 ? one.length - other.length : other[at] === undefined ? 1 : one[at] - other[at];
}

/** Return a number below, of or above 0, as the first value is less than, equal to or greater than the second one. */
export function compared(a, b, sign = '<') {
  if (a instanceof Text && b instanceof Text) return inOrder(a.value, b.value);
  if (isNumber(a) && isNumber(b)) return a.value < b.value ? -1 : Number(a.value > b.value);
  if (a instanceof List && b instanceof List && a instanceof Tuple === b instanceof Tuple) {
    const at = a.value.findIndex((item, i) => b.value[i] === undefined || !equal(item, b.value[i]));
    return at < 0 ? a.value.length - b.value.length : b.value[at] === undefined ? 1 : compared(a.value[at], b.value[at], sign);
  }
  throw new TypeError(`'${sign}' not supported between instances of '${kindOf(a)}' and '${kindOf(b)}'`);
}

/** Return the text of a value, as Python's `str` does. */
export function text(value) {
  if (value instanceof Text) return value.value;
  return value instanceof Missing ? '' : shown(value);
}

/** Return a value as Python's `repr` writes it. */
function shown(value) {
  if (value instanceof Text) return quoted(value.value);
  if (value instanceof Missing) return 'Undefined';
  if (value instanceof Nothing) return 'None';
  if (value instanceof Truth) return value.value ? 'True' : 'False';
  if (value instanceof Fraction) return writtenFloat(value.value);
  if (value instanceof Tuple) return `(${value.value.map(shown).join(', ')}${value.value.length === 1 ? ',' : ''})`;
  if (value instanceof List) return `[${value.value.map(shown).join(', ')}]`;
  if (value instanceof Mapping) return `{${Array.from(value.value, ([key, one]) => `${shown(keyed(key))}: ${shown(one)}`).join(', ')}}`;
  return String(value.value);
}

const SHORT = { '\\': '\\\\', '\n': '\\n', '\r': '\\r', '\t': '\\t' };

function quoted(given) {
  const quote = given.includes("'") && !given.includes('"') ? '"' : "'";
  return quote + given.replace(/[\p{C}\p{Z}\\'"]/gu, (letter) => {
    const code = letter.codePointAt(0), hex = code.toString(16);
    if (letter === quote) return `\\${letter}`;
    if (letter === ' ' || letter === "'" || letter === '"') return letter;
    return SHORT[letter] ?? (code < 256 ? `\\x${hex.padStart(2, '0')}` : code < 65536 ? `\\u${hex.padStart(4, '0')}` : `\\U${hex.padStart(8, '0')}`);
  }) + quote;
}

/** Return a value as JSON in the form of Python's module. Throw TypeError for a value that JSON does not have. */
export function json(value, { indent = null, ascii = false, sorted = false, separators = null } = {}, depth = 0) {
  const [comma, colon] = separators ?? [indent === null ? ', ' : ',', ': '], options = { indent, ascii, sorted, separators };
  const line = (level) => (indent === null ? '' : `\n${' '.repeat(indent * level)}`);
  const inside = (parts, open, close) => (parts.length === 0 ? open + close : open + line(depth + 1) + parts.join(comma + line(depth + 1)) + line(depth) + close);
  const string = (given) => (ascii ? JSON.stringify(given).replace(/[\x7f-\uffff]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, '0')}`) : JSON.stringify(given));
  if (value instanceof Text) return string(value.value);
  if (value instanceof Nothing) return 'null';
  if (value instanceof Fraction && !Number.isFinite(value.value)) return String(value.value);
  if (value instanceof Fraction) return writtenFloat(value.value);
  if (value instanceof Whole || value instanceof Truth) return String(value.value);
  if (value instanceof List) return inside(value.value.map((one) => json(one, options, depth + 1)), '[', ']');
  if (!(value instanceof Mapping)) throw new TypeError(`Object of type ${kindOf(value)} is not JSON serializable`);
  const entries = Array.from(value.value);
  if (sorted) entries.sort(([a], [b]) => inOrder(String(a), String(b)));
  return inside(entries.map(([key, one]) => string(String(key)) + colon + json(one, options, depth + 1)), '{', '}');
}
