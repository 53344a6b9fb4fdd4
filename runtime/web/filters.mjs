// Filters and tests of chat templates that the module of npm lacks. They do what Jinja does. The module's own filters may then also be
// written with empty parentheses. After `is`, a test takes no arguments: the module reads only its name there. `select`, `reject` and their
// variants for attributes pass arguments on to a test.

import { Environment, Interpreter } from './vendor/jinja.mjs';

const made = (value) => new Environment().set('value', value), of = (value) => made(value).constructor;
const [Text, Whole, Fraction, List, Mapping, Missing] = ['', 0, 0.5, [], {}, undefined].map(of);
const ESCAPES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&#34;', "'": '&#39;' };

/** Return the items over which Jinja iterates: of a list, the characters of a text, or the keys of a mapping. */
function items(value) {
  if (value instanceof List) return value.value;
  if (value instanceof Text) return Array.from(value.value, (letter) => new Text(letter));
  if (value instanceof Mapping) return Array.from(value.value.keys(), (key) => new Text(key));
  if (value instanceof Missing) return [];
  throw new Error(`a ${value.type} has no items`);
}

/** Return the attribute of a value at a path such as `function.name`; undefined if there is none. */
function attribute(value, path) {
  const found = path.split('.').reduce((from, part) => (from?.value instanceof Map ? from.value.get(part) : from?.value?.[part]), value);
  return found?.type === undefined ? new Missing() : found;
}

const isTrue = (value) => value.__bool__().value;
const contains = (item, whole) => (whole instanceof Text ? whole.value.includes(item.value) : items(whole).some((one) => equal(one, item)));

function equal(a, b) {
  if (!(a instanceof List && b instanceof List)) return a.value === b.value;
  return a.value.length === b.value.length && a.value.every((item, i) => equal(item, b.value[i]));
}

const less = (a, b) => a.value < b.value, more = (a, b) => a.value > b.value;
const TESTS = {
  '!=': (a, b) => !equal(a, b), '==': equal, eq: equal, equalto: equal, ne: (a, b) => !equal(a, b), sameas: equal,
  '<': less, lessthan: less, lt: less, '<=': (a, b) => !more(a, b), le: (a, b) => !more(a, b),
  '>': more, greaterthan: more, gt: more, '>=': (a, b) => !less(a, b), ge: (a, b) => !less(a, b),
  divisibleby: (a, b) => a.value % b.value === 0,
  float: (a) => a instanceof Fraction,
  in: contains,
  iterable: (a) => [List, Text, Mapping, Missing].some((kind) => a instanceof kind),
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

/** Return the item with the least (`sign` -1) or the greatest value. Case does not count, unless `case_sensitive` is given. */
function extreme(value, [sensitive, path], given, sign) {
  const isExact = isTrue(given.get('case_sensitive') ?? sensitive ?? made(false)), by = (given.get('attribute') ?? path)?.value ?? null;
  const key = (item) => {
    const found = by === null ? item : attribute(item, by);
    return found instanceof Text && !isExact ? found.value.toLowerCase() : found.value;
  };
  const better = (one, other) => (sign < 0 ? key(one) < key(other) : key(one) > key(other));
  return items(value).reduce((best, item) => (better(item, best) ? item : best), items(value)[0]) ?? new Missing();
}

function escape(value) {
  if (!(value instanceof Text)) throw new Error(`a ${value.type} is no text to escape`);
  return new Text(value.value.replace(/[&<>"']/g, (letter) => ESCAPES[letter]));
}

/** Filters by name. Each gets the value, the further arguments, and the named arguments. */
const FILTERS = {
  e: escape,
  escape,
  first: (value) => items(value)[0] ?? new Missing(),
  forceescape: escape,
  last: (value) => items(value).at(-1) ?? new Missing(),
  list: (value) => new List(items(value).slice()),
  max: (value, args, more) => extreme(value, args, more, 1),
  min: (value, args, more) => extreme(value, args, more, -1),
  reject: (value, args) => new List(items(value).filter(not(test(args)))),
  rejectattr: (value, [path, ...args]) => new List(items(value).filter(not(test(args, path.value)))),
  reverse: (value) => (value instanceof Text ? new Text(items(value).map((letter) => letter.value).reverse().join(''))
    : new List(items(value).slice().reverse())),
  round: (value, [precision, method], more) => round(value, more.get('precision') ?? precision, more.get('method') ?? method),
  select: (value, args) => new List(items(value).filter(test(args))),
  selectattr: (value, [path, ...args]) => new List(items(value).filter(test(args, path.value))),
  sum: (value, [path, start], more) => {
    const by = (more.get('attribute') ?? path)?.value ?? null, first = more.get('start') ?? start ?? new Whole(0);
    const numbers = [first, ...items(value).map((item) => (by === null ? item : attribute(item, by)))];
    const total = numbers.reduce((sum, one) => sum + one.value, 0);
    return numbers.every((one) => one instanceof Whole) ? new Whole(total) : new Fraction(total);
  },
};
const OTHER_NAMES = { count: 'length', d: 'default' };

const apply = Interpreter.prototype.applyFilter;

Interpreter.prototype.applyFilter = function applyFilter(operand, filter, environment) {
  const isCall = filter.type === 'CallExpression', name = (isCall ? filter.callee : filter).value, nodes = isCall ? filter.args : [];
  if (Object.hasOwn(FILTERS, name)) return FILTERS[name](operand, ...this.evaluateArguments(nodes, environment));
  if (name === 'map' && nodes.length > 0 && nodes[0].type !== 'KeywordArgumentExpression') {   // by a filter, with its further arguments
    const callee = { type: 'Identifier', value: this.evaluate(nodes[0], environment).value };
    const each = { type: 'CallExpression', callee, args: nodes.slice(1) };
    return new List(items(operand).map((item) => this.applyFilter(item, each, environment)));
  }
  const known = { type: 'Identifier', value: OTHER_NAMES[name] ?? name };
  const takes = nodes.length > 0 || known.value === 'default';   // the module knows other filters without arguments by their names alone
  return apply.call(this, operand, takes ? { type: 'CallExpression', callee: known, args: nodes } : known, environment);
};
