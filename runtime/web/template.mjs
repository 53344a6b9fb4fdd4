// Chat templates that run in the browser as in the server.

import './filters.mjs';
import { GLOBALS } from './statements.mjs';
import { made } from './values.mjs';
import { Environment, Interpreter, parse, tokenize } from './vendor/jinja.mjs';

const OPENING = { OpenParen: 'CloseParen', OpenSquareBracket: 'CloseSquareBracket', OpenCurlyBracket: 'CloseCurlyBracket' };
const FIRST = new Set(['Identifier', 'NumericLiteral', 'StringLiteral', ...Object.keys(OPENING)]);   // tokens with which an argument begins
const NEXT = new Set(['and', 'or', 'else', 'if', 'is', 'in', 'not']);   // words that follow a test without arguments

const tokenOf = (type, value) => ({ type, value });

/** A chat template. The constructor throws SyntaxError if the browser cannot read it. */
export class Template {
  constructor(source) {
    this.parsed = parse(withArguments(tokenize(source, { lstrip_blocks: true, trim_blocks: true })));
  }

  render(names) {
    const environment = new Environment();
    for (const [name, value] of Object.entries({ ...GLOBALS, ...names })) environment.setVariable(name, made(value));
    return new Interpreter(environment).run(this.parsed).value;
  }
}

/** Return tokens in which the name of a test after `is` has the test's arguments. The parser reads only a name there. */
function withArguments(tokens) {
  const found = [];
  for (let at = 0; at < tokens.length; at++) {
    const token = tokens[at], isWord = (one, value) => one?.type === 'Identifier' && one.value === value;
    found.push(token);
    if (!isWord(token, 'is')) continue;
    if (isWord(tokens[at + 1], 'not')) found.push(tokens[++at]);
    const name = tokens[at + 1], begin = at + 2;
    if (name?.type !== 'Identifier' || !FIRST.has(tokens[begin]?.type) || (tokens[begin].type === 'Identifier' && NEXT.has(tokens[begin].value))) continue;
    const isCall = tokens[begin].type === 'OpenParen', end = isCall ? closed(tokens, begin) : behindOperand(tokens, begin);
    const given = withArguments(isCall ? tokens.slice(begin + 1, end - 1) : tokens.slice(begin, end));
    const call = [tokenOf('Identifier', 'f'), tokenOf('OpenParen', '('), ...given, tokenOf('CloseParen', ')')];
    const [{ args }] = parse([tokenOf('OpenExpression', '{{'), ...call, tokenOf('CloseExpression', '}}')]).body;
    found.push({ type: 'Identifier', value: { name: name.value, args } });
    at = end - 1;
  }
  return found;
}

/** Return the index behind the bracket that closes the one at `begin`. */
function closed(tokens, begin) {
  const { type } = tokens[begin];
  let depth = 0;
  for (let at = begin; at < tokens.length; at++) {
    depth += Number(tokens[at].type === type) - Number(tokens[at].type === OPENING[type]);
    if (depth === 0) return at + 1;
  }
  throw new SyntaxError(`${tokens[begin].value} is not closed`);
}

/** Return the index behind the operand at `begin`, with its attributes, items and calls. */
function behindOperand(tokens, begin) {
  let at = OPENING[tokens[begin].type] ? closed(tokens, begin) : begin + 1;
  for (;;) {
    const type = tokens[at]?.type;
    if (type === 'Dot') at += 2;
    else if (type === 'OpenParen' || type === 'OpenSquareBracket') at = closed(tokens, at);
    else return at;
  }
}
