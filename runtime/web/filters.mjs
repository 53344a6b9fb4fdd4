// Filters and tests of chat templates. They do what Jinja does, and take the place of those in the module of npm.

import { capitalized, isLower, isUpper, lines, replaced, stripped } from './methods.mjs';
import './statements.mjs';
import {
  compared, contains, equal, Fraction, isNumber, isTrue, items, json, kindOf, List, Mapping, Missing, made, Nothing, pairs, Text, text, Truth, Whole, whole,
} from './values.mjs';
import { Environment, Interpreter } from './vendor/jinja.mjs';

const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&#34;', "'": '&#39;' };

/** Return the attribute of a value at a path such as `function.name`; undefined if there is none. */
function attribute(value, path) {
  const found = path.split('.').reduce((from, part) => (from?.value instanceof Map ? from.value.get(part) : from?.value?.[part]), value);
  return found?.type === undefined ? new Missing() : found;
}

/** Return a check of two values that are in an order. */
const ordered = (sign, holds) => (a, b) => holds(compared(a, b, sign));
const less = ordered('<', (order) => order < 0), more = ordered('>', (order) => order > 0);
const atMost = ordered('<=', (order) => order <= 0), atLeast = ordered('>=', (order) => order >= 0);
const different = (a, b) => !equal(a, b), isBoolean = (value) => value instanceof Truth;
const remainder = (a, b = whole(2)) => {
  if (!isNumber(a) || !isNumber(b)) throw new TypeError(`a ${kindOf(isNumber(a) ? b : a)} is given where a number is expected`);
  return Math.abs(Number(a.value) % Number(b.value));
};
const TESTS = {
  '!=': different, '==': equal, eq: equal, equalto: equal, ne: different, sameas: (a, b) => a.constructor === b.constructor && equal(a, b),
  '<': less, lessthan: less, lt: less, '<=': atMost, le: atMost, '>': more, greaterthan: more, gt: more, '>=': atLeast, ge: atLeast,
  divisibleby: (a, b) => remainder(a, b) === 0,
  even: (a) => remainder(a) === 0,
  false: (a) => isBoolean(a) && !a.value,
  float: (a) => a instanceof Fraction,
  in: contains,
  integer: (a) => a instanceof Whole,
  iterable: (a) => [List, Text, Mapping, Missing].some((kind) => a instanceof kind),
  lower: (a) => isLower(text(a)),
  none: (a) => a instanceof Nothing,
  number: isNumber,
  odd: (a) => remainder(a) === 1,
  sequence: (a) => [List, Text, Mapping, Missing].some((kind) => a instanceof kind),
  upper: (a) => isUpper(text(a)),
};
for (const [name, found] of Object.entries(TESTS)) Environment.TESTS.set(name, found);

/**
 * Return a test with its further arguments as a function of an item, or of the item's attribute at a path. Without a name, the value is tested
 * for truth.
 */
function test([name, ...more], path = null) {
  const found = name === undefined ? isTrue : Environment.TESTS.get(name.value);
  if (!found) throw new Error(`there is no test ${name.value}`);
  return (item) => found(path === null ? item : attribute(item, path), ...more);
}

function noMapping(value) {
  throw new TypeError(`a ${kindOf(value)} is no mapping`);
}

const not = (found) => (item) => !found(item);

/** Return a number with so many digits after the point, as Python rounds: the even neighbour, if both are equally near. */
function rounded(value, digits) {
  if (digits < 0) {
    const unit = 10 ** -digits;
    return rounded(value / unit, 0) * unit;
  }
  const size = Math.abs(value), near = size.toFixed(digits), whole = size.toFixed(100), end = whole.indexOf('.') + 1 + digits;
  if (!/^[0-9]+\.[0-9]+$/.test(whole)) return value;   // it has no digits after the point
  const below = digits ? whole.slice(0, end) : whole.slice(0, end - 1), isTie = /^50*$/.test(whole.slice(end));
  return Math.sign(value) * Number(isTie && Number(below.at(-1)) % 2 === 0 ? below : near);
}

function round(value, precision, method) {
  const digits = precision?.value ?? 0, unit = 10 ** digits, how = method?.value ?? 'common';
  if (how === 'common' && value instanceof Whole) return digits < 0 ? new Whole(rounded(value.value, digits)) : value;
  if (how === 'common') return new Fraction(rounded(value.value, digits));
  if (how !== 'ceil' && how !== 'floor') throw new Error(`the method of round is ${how}; expected common, ceil or floor`);
  return new Fraction(Math[how](value.value * unit) / unit);
}

/** Return a function that gives the value by which an item is compared: itself or its attribute. Case does not count, unless `isExact`. */
const keyOf = (path, isExact) => (item) => {
  const found = path === null ? item : attribute(item, path);
  return found instanceof Text && !isExact ? new Text(found.value.toLowerCase()) : found;
};

/** Return an argument that is given by its place or its name; `usual` if it is absent. */
const given = (args, named, at, name, usual) => named.get(name) ?? args[at] ?? made(usual);

/** Return the item with the least (`sign` -1) or the greatest value. */
function extreme(value, args, named, sign) {
  const by = keyOf(given(args, named, 1, 'attribute', null).value ?? null, isTrue(given(args, named, 0, 'case_sensitive', false)));
  return items(value).reduce((best, item) => (sign * compared(by(item), by(best)) > 0 ? item : best), items(value)[0]) ?? new Missing();
}

/** Return items in the order of their keys. */
function sorted(found, by, isReverse) {
  return new List(found.slice().sort((a, b) => (isReverse ? -1 : 1) * compared(by(a), by(b))));
}

function sort(value, args, named) {
  const paths = (given(args, named, 2, 'attribute', null).value ?? null)?.toString().split(',') ?? [null];
  const isExact = isTrue(given(args, named, 1, 'case_sensitive', false)), keys = paths.map((path) => keyOf(path, isExact));
  return sorted(items(value), (item) => (keys.length === 1 ? keys[0](item) : new List(keys.map((key) => key(item)))), isTrue(given(args, named, 0, 'reverse', false)));
}

function dictsort(value, args, named) {
  const at = given(args, named, 1, 'by', 'key').value === 'key' ? 0 : 1, by = keyOf(null, isTrue(given(args, named, 0, 'case_sensitive', false)));
  return sorted(pairs(value).value, (pair) => by(pair.value[at]), isTrue(given(args, named, 2, 'reverse', false)));
}

function unique(value, args, named) {
  const by = keyOf(given(args, named, 1, 'attribute', null).value ?? null, isTrue(given(args, named, 0, 'case_sensitive', false)));
  const found = items(value), keys = found.map(by);
  return new List(found.filter((_, i) => keys.findIndex((key) => equal(key, keys[i])) === i));
}

function join(value, args, named) {
  const path = given(args, named, 1, 'attribute', null).value ?? null;
  return new Text(items(value).map((item) => text(path === null ? item : attribute(item, String(path)))).join(text(given(args, named, 0, 'd', ''))));
}

function length(value) {
  if (value instanceof Mapping) return whole(value.value.size);
  if (isNumber(value) || value instanceof Nothing) throw new TypeError(`object of type '${kindOf(value)}' has no len()`);
  return whole(items(value).length);
}

function indent(value, args, named) {
  const width = given(args, named, 0, 'width', 4), by = width instanceof Text ? width.value : ' '.repeat(Number(width.value));
  const [first, blank] = ['first', 'blank'].map((name, i) => isTrue(given(args, named, i + 1, name, false)));
  const made = lines(`${text(value)}\n`).map((line, i) => (i > 0 && (blank || line !== '') ? by + line : line)).join('\n');
  return new Text(first ? by + made : made);
}

const NUMBER = /^\s*[+-]?(\d+(_\d+)*(\.\d*)?|\.\d+)(e[+-]?\d+)?\s*$/i;

/** Return the number that a value is or writes; null if it is none. */
function numeric(value) {
  if (isNumber(value)) return Number(value.value);
  return value instanceof Text && NUMBER.test(value.value) ? Number(value.value.replaceAll('_', '')) : null;
}

function int(value, args, named) {
  if (value instanceof Whole) return value;
  if (value instanceof Text && given(args, named, 1, 'base', 10).value !== 10) throw new Error('int() with another base than 10 is not supported in the browser');
  const found = numeric(value);
  if (value instanceof Text && /^\s*[+-]?\d+\s*$/.test(value.value)) return whole(BigInt(value.value.trim().replace('+', '')));
  return found === null || !Number.isFinite(found) ? given(args, named, 0, 'default', 0) : whole(BigInt(Math.trunc(found)));
}

function float(value, args, named) {
  const found = numeric(value), usual = given(args, named, 0, 'default', 0);
  return found !== null ? new Fraction(found) : isNumber(usual) ? new Fraction(Number(usual.value)) : usual;
}

function tojson(value, args, named) {
  const [ascii, spaces, separators, keys] = [['ensure_ascii', false], ['indent', null], ['separators', null], ['sort_keys', false]]
    .map(([name, usual], i) => given(args, named, i, name, usual));
  const options = { ascii: isTrue(ascii), indent: spaces.value ?? null, sorted: isTrue(keys) };
  return new Text(json(value, { ...options, separators: separators instanceof List ? separators.value.map(text) : null }));
}

function usual(value, args, named) {
  const isOff = isTrue(given(args, named, 1, 'boolean', false)) && !isTrue(value);
  return value instanceof Missing || isOff ? given(args, named, 0, 'default_value', '') : value;
}

const escape = (value) => new Text(text(value).replace(/[&<>"']/g, (letter) => ESCAPES[letter]));

/** Return a filter that changes the text of a value. */
const onText = (change) => (value) => new Text(change(text(value)));
const asText = onText((given) => given);

/** Filters by name. Each gets the value, the further arguments, and the named arguments. */
const FILTERS = {
  abs: (value) => (value instanceof Fraction ? new Fraction(Math.abs(value.value)) : whole(value.value < 0 ? -value.value : value.value)),
  capitalize: onText((given) => capitalized(given)),
  count: length,
  d: usual,
  default: usual,
  dictsort,
  e: escape,
  escape,
  float,
  first: (value) => items(value)[0] ?? new Missing(),
  forceescape: escape,
  indent,
  int,
  items: (value) => (value instanceof Mapping ? pairs(value) : new List(items(value).map(noMapping))),
  join,
  last: (value) => items(value).at(-1) ?? new Missing(),
  length,
  lower: onText((given) => given.toLowerCase()),
  list: (value) => new List(items(value).slice()),
  max: (value, args, more) => extreme(value, args, more, 1),
  min: (value, args, more) => extreme(value, args, more, -1),
  replace: (value, [old, by, count], named) => new Text(replaced(text(value), text(old), text(by), Number((count ?? named.get('count'))?.value ?? -1))),
  reject: (value, args) => new List(items(value).filter(not(test(args)))),
  rejectattr: (value, [path, ...args]) => new List(items(value).filter(not(test(args, path.value)))),
  reverse: (value) => (value instanceof Text ? new Text(items(value).map((letter) => letter.value).reverse().join(''))
    : new List(items(value).slice().reverse())),
  round: (value, [precision, method], more) => round(value, more.get('precision') ?? precision, more.get('method') ?? method),
  safe: asText,
  sort,
  string: asText,
  title: onText((given) => given.split(/([-\s({[<]+)/u).map(capitalized).join('')),
  tojson,
  trim: (value, [chars]) => new Text(stripped(text(value), chars === undefined ? null : chars.value)),
  unique,
  upper: onText((given) => given.toUpperCase()),
  select: (value, args) => new List(items(value).filter(test(args))),
  selectattr: (value, [path, ...args]) => new List(items(value).filter(test(args, path.value))),
  sum: (value, [path, start], more) => {
    const by = (more.get('attribute') ?? path)?.value ?? null, first = more.get('start') ?? start ?? new Whole(0);
    const numbers = [first, ...items(value).map((item) => (by === null ? item : attribute(item, by)))];
    const total = numbers.reduce((sum, one) => sum + one.value, 0);
    return numbers.every((one) => one instanceof Whole) ? new Whole(total) : new Fraction(total);
  },
};

Interpreter.prototype.applyFilter = function applyFilter(operand, filter, environment) {
  const isCall = filter.type === 'CallExpression', name = (isCall ? filter.callee : filter).value, nodes = isCall ? filter.args : [];
  const [args, named] = this.evaluateArguments(nodes, environment);
  if (Object.hasOwn(FILTERS, name)) return FILTERS[name](operand, args, named);
  if (name !== 'map') throw new Error(`Unknown filter: ${name}`);
  if (named.has('attribute')) {
    const usual = named.get('default') ?? new Missing(), path = String(named.get('attribute').value);
    return new List(items(operand).map((item) => attribute(item, path)).map((found) => (found instanceof Missing ? usual : found)));
  }
  const callee = { type: 'Identifier', value: args[0].value }, each = { type: 'CallExpression', callee, args: nodes.slice(1) };
  return new List(items(operand).map((item) => this.applyFilter(item, each, environment)));   // by a filter, with its further arguments
};
