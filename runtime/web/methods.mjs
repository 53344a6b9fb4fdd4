// Methods of texts, lists and mappings in chat templates, as in Python.

import { withoutEnds } from './spaces.mjs';
import { Callable, equal, items, kindOf, List, made, Mapping, Nothing, pairs, text, Text, truth, Tuple, whole } from './values.mjs';

export const SPACE = '\\p{White_Space}\\x1c-\\x1f', ENDS = /\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]/;   // what Python takes for white space and for line ends
const BLANK = new RegExp(`[${SPACE}]`, 'u'), WORD = new RegExp(`[^${SPACE}]+`, 'gu');

/** Return the text without white space, or without the characters of another text, at its ends. */
export function stripped(given, chars = null, left = true, right = true) {
  if (chars === null) return withoutEnds(given, (unit) => BLANK.test(unit), left, right);
  const set = new Set(chars);
  return withoutEnds(Array.from(given), (letter) => set.has(letter), left, right).join('');
}

/** Return the lines of a text, without their ends. */
export function lines(given) {
  const found = given.split(ENDS);
  return found.at(-1) === '' ? found.slice(0, -1) : found;
}

/** Replace a text, at most `count` times if that is not negative. */
export function replaced(given, old, by, count = -1) {
  const parts = old === '' ? ['', ...Array.from(given), ''] : given.split(old), most = count < 0 ? parts.length : count;
  return parts.reduce((made, part, i) => (i === 0 ? part : made + (i <= most ? by : old) + part), '');
}

export const capitalized = ([first = '', ...rest]) => first.toUpperCase() + rest.join('').toLowerCase();
const titled = (given) => given.toLowerCase().replace(/\p{L}[\p{L}\p{M}]*/gu, capitalized);
const hasCase = (given) => given.toLowerCase() !== given.toUpperCase();
export const isLower = (given) => hasCase(given) && given === given.toLowerCase();
export const isUpper = (given) => hasCase(given) && given === given.toUpperCase();

/** Split a text at another one or, without one, at white space, at most `count` times. */
function split(given, at, count) {
  if (at === '') throw new Error('empty separator');
  if (at !== null) {
    const parts = given.split(at);
    return count < 0 || parts.length <= count ? parts : [...parts.slice(0, count), parts.slice(count).join(at)];
  }
  const words = Array.from(given.matchAll(WORD));
  if (count < 0 || words.length <= count) return words.map(([word]) => word);
  return [...words.slice(0, count).map(([word]) => word), given.slice(words[count].index)];
}

/** Split a text at another one, at most `count` times, from its end. */
function splitFromEnd(given, at, count) {
  if (at === null && count >= 0) throw new Error('rsplit() at white space takes no number in the browser');
  const parts = split(given, at, -1), most = Math.max(1, parts.length - count);
  return count < 0 ? parts : [parts.slice(0, most).join(at), ...parts.slice(most)];
}

/** Return the index of a text in characters, or -1. */
const indexOf = (given, at) => (at < 0 ? -1 : Array.from(given.slice(0, at)).length);

function partition(given, by, at) {
  if (at < 0) return null;
  return [given.slice(0, at), by, given.slice(at + by.length)];
}

/** Fill in the fields of a format such as `{}`, `{0}` or `{name}`. */
function format(given, args, named) {
  let next = 0;
  return given.replace(/\{\{|\}\}|\{([^{}]*)\}/g, (field, name) => {
    if (name === undefined) return field[0];
    if (!/^\w*$/.test(name)) throw new Error(`format() has the field ${field}, which is not supported in the browser`);
    const value = name === '' ? args[next++] : /^\d+$/.test(name) ? args[Number(name)] : named.get(name);
    if (value === undefined) throw new Error(`format() has no value for ${field}`);
    return text(value);
  });
}

/** Return a text that a method expects. Throw TypeError for another value. */
function needed(value) {
  if (!(value instanceof Text)) throw new TypeError(`a ${value === undefined ? 'missing value' : kindOf(value)} is given where a text is expected`);
  return value.value;
}
const orNone = (value) => (value === undefined || value instanceof Nothing ? null : needed(value));
const anyOf = (value) => (value instanceof Tuple ? value.value.map(needed) : [needed(value)]);
const range = (given, [, begin, end]) => (begin === undefined ? given : Array.from(given).slice(begin.value ?? 0, end?.value).join(''));
const number = (value, usual) => (value === undefined ? usual : Number(value.value));
const texts = (found) => new List(found.map((one) => new Text(one)));
const matches = (pattern) => (given) => truth(pattern.test(given));

/** Methods of texts by name. Each gets the text, the arguments, and the named arguments. */
const OF_TEXT = {
  capitalize: (given) => capitalized(given),
  casefold: (given) => given.toLowerCase(),
  count: (given, [part]) => whole(given.split(needed(part)).length - 1),
  endswith: (given, args) => truth(anyOf(args[0]).some((end) => range(given, args).endsWith(end))),
  find: (given, [part]) => whole(indexOf(given, given.indexOf(needed(part)))),
  format: (given, args, named) => format(given, args, named),
  index: (given, [part]) => {
    if (!given.includes(needed(part))) throw new Error('substring not found');
    return whole(indexOf(given, given.indexOf(part.value)));
  },
  isalnum: matches(/^[\p{L}\p{N}]+$/u),
  isalpha: matches(/^\p{L}+$/u),
  isdecimal: matches(/^\p{Nd}+$/u),
  isdigit: matches(/^\p{Nd}+$/u),
  islower: (given) => truth(isLower(given)),
  isnumeric: matches(/^\p{N}+$/u),
  isspace: matches(new RegExp(`^[${SPACE}]+$`, 'u')),
  isupper: (given) => truth(isUpper(given)),
  join: (given, [parts]) => items(parts).map(needed).join(given),
  lower: (given) => given.toLowerCase(),
  lstrip: (given, [chars]) => stripped(given, orNone(chars), true, false),
  partition: (given, [by]) => new Tuple(texts(partition(given, needed(by), given.indexOf(by.value)) ?? [given, '', '']).value),
  removeprefix: (given, [begin]) => (given.startsWith(needed(begin)) ? given.slice(begin.value.length) : given),
  removesuffix: (given, [end]) => (end.value !== '' && given.endsWith(needed(end)) ? given.slice(0, -end.value.length) : given),
  replace: (given, [old, by, count], named) => replaced(given, needed(old), needed(by), number(count ?? named.get('count'), -1)),
  rfind: (given, [part]) => whole(indexOf(given, given.lastIndexOf(needed(part)))),
  rpartition: (given, [by]) => new Tuple(texts(partition(given, needed(by), given.lastIndexOf(by.value)) ?? ['', '', given]).value),
  rsplit: (given, [at, count], named) => texts(splitFromEnd(given, orNone(at ?? named.get('sep')), number(count ?? named.get('maxsplit'), -1))),
  rstrip: (given, [chars]) => stripped(given, orNone(chars), false, true),
  split: (given, [at, count], named) => texts(split(given, orNone(at ?? named.get('sep')), number(count ?? named.get('maxsplit'), -1))),
  splitlines: (given) => texts(lines(given)),
  startswith: (given, args) => truth(anyOf(args[0]).some((begin) => range(given, args).startsWith(begin))),
  strip: (given, [chars]) => stripped(given, orNone(chars)),
  title: (given) => titled(given),
  upper: (given) => given.toUpperCase(),
  zfill: (given, [width]) => (/^[+-]/.test(given) ? given[0] + given.slice(1).padStart(width.value - 1, '0') : given.padStart(width.value, '0')),
};
const OF_MAPPING = {
  copy: (value) => new Mapping(new Map(value.value)),
  get: (value, [key, usual]) => value.value.get(key.value) ?? usual ?? new Nothing(),
  items: (value) => pairs(value),
  keys: (value) => new List(items(value)),
  values: (value) => new List(Array.from(value.value.values())),
};
const OF_LIST = {
  copy: (value) => new List(value.value.slice()),
  count: (value, [item]) => whole(value.value.filter((one) => equal(one, item)).length),
  index: (value, [item]) => {
    const at = value.value.findIndex((one) => equal(one, item));
    if (at < 0) throw new Error('the value is not in the list');
    return whole(at);
  },
};

/** Return a method of a value, or undefined if it has none of this name. */
export function method(owner, name) {
  const table = owner instanceof Text ? OF_TEXT : owner instanceof Mapping ? OF_MAPPING : owner instanceof List ? OF_LIST : {};
  if (!Object.hasOwn(table, name)) return undefined;
  return new Callable((given) => {
    const named = given.at(-1)?.type === 'KeywordArgumentsValue' ? given.at(-1).value : new Map(), args = named.size > 0 ? given.slice(0, -1) : given;
    return made(table[name](owner instanceof Text ? owner.value : owner, args, named));
  });
}
