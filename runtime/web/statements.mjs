// Let templates run as in Jinja: operators, attributes, loops and blocks of the module of npm get the meaning that they have there.

import { method } from './methods.mjs';
import {
  Callable, compared, contains, equal, Fraction, isNumber, isTrue, items, kindOf, List, made, Mapping, Missing, Space, Text, text, truth, Tuple,
  whole,
} from './values.mjs';
import { Environment, Interpreter } from './vendor/jinja.mjs';

const DAYS = ['Sunday', 'Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday'];
const MONTHS = ['January', 'February', 'March', 'April', 'May', 'June', 'July', 'August', 'September', 'October', 'November', 'December'];
const padded = (number, size = 2) => String(number).padStart(size, '0');
const TIMES = {   // by the letter of a format: the text for a time
  a: (time) => DAYS[time.getDay()].slice(0, 3),
  A: (time) => DAYS[time.getDay()],
  b: (time) => MONTHS[time.getMonth()].slice(0, 3),
  B: (time) => MONTHS[time.getMonth()],
  d: (time) => padded(time.getDate()),
  e: (time) => String(time.getDate()).padStart(2),
  F: (time) => `${time.getFullYear()}-${padded(time.getMonth() + 1)}-${padded(time.getDate())}`,
  H: (time) => padded(time.getHours()),
  I: (time) => padded((time.getHours() + 11) % 12 + 1),
  m: (time) => padded(time.getMonth() + 1),
  M: (time) => padded(time.getMinutes()),
  p: (time) => (time.getHours() < 12 ? 'AM' : 'PM'),
  S: (time) => padded(time.getSeconds()),
  T: (time) => `${padded(time.getHours())}:${padded(time.getMinutes())}:${padded(time.getSeconds())}`,
  y: (time) => padded(time.getFullYear() % 100),
  Y: (time) => String(time.getFullYear()),
  '%': () => '%',
};

/** Return the time in a format of Python, with English names in every browser. A dash after the `%` leaves out zeros. */
export function written(time, format) {
  return format.replace(/%(-?)(.)/gs, (whole, dash, letter) => {
    if (!Object.hasOwn(TIMES, letter)) throw new Error(`strftime_now() has the field ${whole}, which is not supported in the browser`);
    const found = TIMES[letter](time);
    return dash === '' ? found : found.replace(/^[0 ]+(?=.)/, '');
  });
}

/** A template refuses the messages. */
export class TemplateRejection extends Error {}

const named = (args) => (args.at(-1)?.type === 'KeywordArgumentsValue' ? args.at(-1).value : new Map());
const positional = (args) => args.filter((one) => one.type !== 'KeywordArgumentsValue');
const called = (run) => new Callable((args) => run(positional(args), named(args)));

function range(args) {
  const [begin, end, step] = args.length > 1 ? args : [whole(0), args[0]], by = Number(step?.value ?? 1), found = [];
  if (by === 0) throw new Error('range() arg 3 must not be zero');
  for (let i = Number(begin.value); by > 0 ? i < end.value : i > end.value; i += by) found.push(whole(i));
  return new List(found);
}

function joiner([separator = new Text(', ')]) {
  let isFirst = true;
  return called(() => {
    const found = isFirst ? '' : separator.value;
    isFirst = false;
    return new Text(found);
  });
}

/** Variables that every template has. */
export const GLOBALS = {
  true: true, True: true, false: false, False: false, none: null, None: null,
  dict: called(([base], more) => new Mapping(new Map([...(base?.value ?? []), ...more]))),
  joiner: called(joiner),
  raise_exception: called(([message]) => { throw new TemplateRejection(text(message)); }),
  range: called(range),
  strftime_now: called(([format]) => new Text(written(new Date(), format.value))),
};

// --- operators -----------------------------------------------------------------------------------------------------------------

const UNITS = {   // of whole numbers, as BigInt; undefined: the result is a fraction
  '+': (a, b) => a + b,
  '-': (a, b) => a - b,
  '*': (a, b) => a * b,
  '//': (a, b) => (a - ((a % b) + b) % b) / b,
  '%': (a, b) => ((a % b) + b) % b,
  '**': (a, b) => (b < 0n ? undefined : a ** b),
};
const FRACTIONS = {
  '+': (a, b) => a + b, '-': (a, b) => a - b, '*': (a, b) => a * b, '/': (a, b) => a / b, '//': (a, b) => Math.floor(a / b),
  '%': (a, b) => a - b * Math.floor(a / b), '**': (a, b) => a ** b,
};

function arithmetic(sign, a, b) {
  if (isNumber(a) && isNumber(b)) {
    if (['/', '//', '%'].includes(sign) && Number(b.value) === 0) throw new Error('division by zero');
    const areWhole = !(a instanceof Fraction || b instanceof Fraction), found = areWhole ? UNITS[sign]?.(BigInt(a.value), BigInt(b.value)) : undefined;
    return found === undefined ? new Fraction(FRACTIONS[sign](Number(a.value), Number(b.value))) : whole(found);
  }
  if (a instanceof Missing || b instanceof Missing) throw new Error(`a value of ${sign} is undefined`);
  if (sign === '+' && a instanceof Text && b instanceof Text) return new Text(a.value + b.value);
  if (sign === '+' && a instanceof List && b instanceof List && a.constructor === b.constructor) return new a.constructor(a.value.concat(b.value));
  if (sign === '*' && a instanceof Text && isNumber(b)) return new Text(a.value.repeat(Math.max(0, Number(b.value))));
  if (sign === '*' && a instanceof List && isNumber(b)) return new a.constructor(Array(Math.max(0, Number(b.value))).fill(a.value).flat());
  if (sign === '*' && isNumber(a) && !isNumber(b)) return arithmetic(sign, b, a);
  if (sign === '%' && a instanceof Text) return new Text(percent(a.value, b));
  throw new TypeError(`unsupported operand types for ${sign}: '${kindOf(a)}' and '${kindOf(b)}'`);
}

/** Fill in `%s` and `%d`. */
function percent(format, values) {
  const rest = values instanceof Tuple ? values.value.slice() : [values];
  return format.replace(/%(.)/gs, (field, letter) => {
    if (letter === '%') return '%';
    if (!'sd'.includes(letter)) throw new Error(`the field ${field} is not supported in the browser`);
    if (rest.length === 0) throw new TypeError('not enough arguments for format string');
    return text(rest.shift());
  });
}

const COMPARED = { '<': (order) => order < 0, '<=': (order) => order <= 0, '>': (order) => order > 0, '>=': (order) => order >= 0 };

function operated(sign, a, b) {
  switch (sign) {
    case '==': return truth(equal(a, b));
    case '!=': return truth(!equal(a, b));
    case 'in': return truth(contains(a, b));
    case 'not in': return truth(!contains(a, b));
    case '~': return new Text(text(a) + text(b));
  }
  if (!Object.hasOwn(COMPARED, sign)) return arithmetic(sign, a, b);
  if (a instanceof Missing || b instanceof Missing) throw new Error(`a value of ${sign} is undefined`);
  return truth(COMPARED[sign](compared(a, b, sign)));
}

Interpreter.prototype.evaluateBinaryExpression = function evaluateBinaryExpression({ operator: { value: sign }, left, right }, environment) {
  const a = this.evaluate(left, environment);
  if (sign === 'and' || sign === 'or') return isTrue(a) === (sign === 'and') ? this.evaluate(right, environment) : a;
  return operated(sign, a, this.evaluate(right, environment));
};

// --- attributes and items ------------------------------------------------------------------------------------------------------

/** Return `owner.name`. A method comes before an item of that name. */
function attribute(owner, name) {
  if (owner instanceof Missing) throw new Error(`a value is undefined; it has no ${name}`);
  const found = method(owner, name) ?? (owner instanceof Mapping || owner instanceof Space ? owner.value.get(name) : undefined);
  return found ?? new Missing();
}

/** Return `owner[key]`. An item comes before a method of that name. */
function item(owner, key) {
  if (owner instanceof Mapping && owner.value.has(key.value) && !(key instanceof List)) return owner.value.get(key.value);
  if ((owner instanceof List || owner instanceof Text) && isNumber(key)) return items(owner).at(Number(key.value)) ?? new Missing();
  return key instanceof Text || owner instanceof Missing ? attribute(owner, text(key)) : new Missing();
}

Interpreter.prototype.evaluateMemberExpression = function evaluateMemberExpression({ object, property, computed }, environment) {
  const owner = this.evaluate(object, environment);
  if (property.type === 'SliceExpression') return this.evaluateSliceExpression(owner, property, environment);
  if (computed) return item(owner, this.evaluate(property, environment));
  return property.type === 'IntegerLiteral' ? item(owner, whole(property.value)) : attribute(owner, property.value);
};

const { evaluate } = Interpreter.prototype;

Interpreter.prototype.evaluate = function evaluateAny(node, environment) {
  if (node?.type !== 'ObjectLiteral') return evaluate.call(this, node, environment);
  return new Mapping(new Map(Array.from(node.value, ([key, value]) => [this.evaluate(key, environment).value, this.evaluate(value, environment)])));
};

// --- blocks and loops ----------------------------------------------------------------------------------------------------------

const [Break, Continue] = ['Break', 'Continue'].map((type) => {
  try { return evaluate.call(new Interpreter(new Environment()), { type }); } catch (control) { return control.constructor; }
});
const SILENT = new Set(['Set', 'Macro', 'Comment']);

/** Return the text that statements write. `break` and `continue` keep the text before them. */
Interpreter.prototype.evaluateBlock = function evaluateBlock(statements, environment) {
  let made = '';
  try {
    for (const statement of statements) {
      const value = this.evaluate(statement, environment);
      if (!SILENT.has(statement.type)) made += text(value);
    }
  } catch (error) {
    if (error instanceof Break || error instanceof Continue) error.written = made + (error.written ?? '');
    throw error;
  }
  return new Text(made);
};

/** Set the variables of a loop to an item. */
function bind(target, value, scope) {
  if (target.type === 'Identifier') {
    scope.setVariable(target.value, value);
    return;
  }
  const found = items(value);
  if (found.length !== target.value.length) throw new Error(`expected ${target.value.length} values to unpack, not ${found.length}`);
  target.value.forEach((part, i) => bind(part, found[i], scope));
}

const ABSENT = Symbol('no value yet');

/** Return the variable `loop` of each turn. */
function turns(all) {
  let last = ABSENT;
  const changed = called((args) => {
    const now = new List(args), isSame = last !== ABSENT && equal(last, now);
    last = now;
    return truth(!isSame);
  });
  return all.map((_, i) => new Space(new Map(Object.entries({
    index: i + 1, index0: i, revindex: all.length - i, revindex0: all.length - i - 1, first: i === 0, last: i === all.length - 1, length: all.length,
    depth: 1, depth0: 0, previtem: all[i - 1], nextitem: all[i + 1], changed, cycle: called((args) => args[i % args.length]),
  }).map(([name, value]) => [name, made(value)]))));
}

/** Run a loop. Each turn has its own variables, which the next one does not see. */
Interpreter.prototype.evaluateFor = function evaluateFor({ iterable, loopvar, body, defaultBlock }, environment) {
  const isSelected = iterable.type === 'SelectExpression', inTurn = (value) => {
    const scope = new Environment(environment);
    bind(loopvar, value, scope);
    return scope;
  };
  const found = items(this.evaluate(isSelected ? iterable.lhs : iterable, environment));
  const all = isSelected ? found.filter((value) => isTrue(this.evaluate(iterable.test, inTurn(value)))) : found, loops = turns(all);
  let made = '', isWhole = false;   // a turn has come to its end
  for (const [i, value] of all.entries()) {
    const scope = inTurn(value);
    scope.setVariable('loop', loops[i]);
    try {
      made += this.evaluateBlock(body, scope).value;
      isWhole = true;
    } catch (error) {
      if (!(error instanceof Break || error instanceof Continue)) throw error;
      made += error.written ?? '';
      if (error instanceof Break) break;
    }
  }
  return new Text(isWhole ? made : made + this.evaluateBlock(defaultBlock, environment).value);
};

const { evaluateMacro } = Interpreter.prototype;

/** Define a macro. It sees the variables of the place where it is defined, not those of its callers. */
Interpreter.prototype.evaluateMacro = function evaluateMacroHere(node, environment) {
  const done = evaluateMacro.call(this, node, environment), { value: run } = environment.lookupVariable(node.name.value);
  environment.setVariable(node.name.value, new Callable((args, scope) => {
    const within = new Environment(environment);
    if (scope?.variables.has('caller')) within.setVariable('caller', scope.variables.get('caller'));
    return run(args, within);
  }));
  return done;
};

/** Run a test. Its name has its arguments if there are any: template.mjs puts them there. */
Interpreter.prototype.evaluateTestExpression = function evaluateTestExpression({ operand, negate, test: { value: test } }, environment) {
  const name = test.name ?? test, found = environment.tests.get(name);
  if (!found) throw new Error(`there is no test ${name}`);
  const args = (test.args ?? []).map((node) => this.evaluate(node, environment));
  return truth(Boolean(found(this.evaluate(operand, environment), ...args)) !== negate);
};
