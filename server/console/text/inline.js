/* Parse the inline part of Markdown into plain values, in time linear in the text:
     "text"   {type: "code", text}   {type: "strong" | "em" | "del", children}   {type: "link", href, children}   {type: "break"}
   A picture becomes a link to it, so that nothing is fetched from other servers. Only links with harmless schemes are kept as links. */

const DEEPEST = 24;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SCHEME = /^(?:https?:\/\/|mailto:)/i;
const ADDRESS = /https?:\/\/[^\s<>"`]+/y;
const TRAILING = /[.,:;!?'\])*_~]/;  // these characters end the sentence around an address, not the address
const ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": "\u00a0"};
const ENTITY = /&(?:amp|lt|gt|quot|#39|nbsp);/y;
const BREAK = /<br ?\/?>/iy;
const DESTINATION = /\(\s*(?!\s)(?:<([^<>\n]*)>|([^\s()]*(?:\([^\s()]*\)[^\s()]*)*))(?:\s+(?!\s)(?:"[^"]*"|'[^']*'))?\s*\)/y;  // (?!\s): a run of spaces is matched in one way only

export function parseInline(text) {
  const scanner = new Scanner(text);
  scanner.scan();
  pair(scanner.runs);
  return build(scanner.tokens);
}

/* Tokens are strings, finished values, runs of emphasis marks, and the two ends of links. */
class Scanner {
  constructor(text) {
    this.text = text;
    this.tokens = [];
    this.runs = [];  // runs of *, _ and ~ that may still be paired
    this.brackets = [];  // opening brackets that may still begin a link
    this.pending = "";
    this.unclosed = new Map();  // by number of backticks: the position after which no run of that many backticks exists
  }

  scan() {
    const {text} = this;
    for (let at = 0; at < text.length;) at = this.step(text[at], at);
    this.flush();
  }

  step(char, at) {
    const {text} = this;
    switch (char) {
      case "\\":
        if (text[at + 1] === "\n") return this.push({type: "break"}, at + 2);
        if (PUNCTUATION.test(text[at + 1] ?? "")) return this.take(text[at + 1], at + 2);
        break;
      case "\n": {
        const isHard = this.pending.endsWith("  ");
        this.pending = this.pending.trimEnd();
        if (isHard) return this.push({type: "break"}, at + 1);
        this.flush();  // the next line end then looks only at its own line
        return this.take("\n", at + 1);
      }
      case "`":
        return this.code(at);
      case "*":
      case "_":
      case "~":
        return this.run(char, at);
      case "!":
        if (text[at + 1] === "[") return at + 1;  // a picture is shown as a link
        break;
      case "[":
        this.flush();
        this.brackets.push({token: this.tokens.push("[") - 1, run: this.runs.length});
        return at + 1;
      case "]":
        return this.link(at);
      case "<": {
        const end = match(BREAK, text, at);
        if (end) return this.push({type: "break"}, at + end.length);
        break;
      }
      case "&": {
        const entity = match(ENTITY, text, at);
        if (entity) return this.take(ENTITIES[entity], at + entity.length);
        break;
      }
      case "h":
        if (!/[A-Za-z0-9]/.test(text[at - 1] ?? "") && !this.brackets.length) return this.address(at);
        break;
    }
    return this.take(char, at + 1);
  }

  take(characters, end) {
    this.pending += characters;
    return end;
  }

  push(token, end) {
    this.flush();
    this.tokens.push(token);
    return end;
  }

  flush() {
    if (this.pending) this.tokens.push(this.pending);
    this.pending = "";
  }

  code(at) {
    const {text} = this;
    const ticks = /`+/y;
    const fence = match(ticks, text, at), from = at + fence.length;
    if (at >= (this.unclosed.get(fence.length) ?? Infinity)) return this.take(fence, from);
    for (let next = text.indexOf(fence, from); next >= 0;) {
      const found = match(ticks, text, next);
      if (found.length === fence.length) {
        const inner = text.slice(from, next).replaceAll("\n", " ");
        return this.push({type: "code", text: /^ .*\S.* $/.test(inner) ? inner.slice(1, -1) : inner}, next + fence.length);
      }
      next = text.indexOf(fence, next + found.length);
    }
    this.unclosed.set(fence.length, at);
    return this.take(fence, from);
  }

  run(char, at) {
    const {text} = this;
    let end = at;
    while (text[end] === char) end += 1;
    const before = text[at - 1] ?? " ", after = text[end] ?? " ";
    const opens = !/\s/.test(after) && (!isMark(after) || /\s/.test(before) || isMark(before));
    const closes = !/\s/.test(before) && (!isMark(before) || /\s/.test(after) || isMark(after));
    const isInside = char === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);  // snake_case
    const count = end - at;
    if (isInside || (char === "~" && count !== 2) || !(opens || closes)) return this.take(text.slice(at, end), end);
    const run = {type: "run", char, left: count, opens, closes, begins: [], ends: []};
    this.runs.push(run);
    return this.push(run, end);
  }

  link(at) {
    const bracket = this.brackets.pop();
    if (bracket === undefined) return this.take("]", at + 1);
    DESTINATION.lastIndex = at + 1;
    const found = this.text[at + 1] === "(" ? DESTINATION.exec(this.text) : null, href = found && (found[1] ?? found[2]);
    if (!found || !SCHEME.test(href)) return this.take("]", at + 1);
    this.flush();
    pair(this.runs.splice(bracket.run));
    this.tokens[bracket.token] = {type: "begin", of: {type: "link", href}};
    this.brackets = [];  // links cannot be nested
    return this.push({type: "end"}, at + 1 + found[0].length);
  }

  address(at) {
    let found = match(ADDRESS, this.text, at);
    if (!found) return this.take("h", at + 1);
    let end = found.length, surplus = found.split(")").length - found.split("(").length;  // surplus closing brackets belong to the text around
    for (; end > 0 && TRAILING.test(found[end - 1]); end -= 1) {
      if (found[end - 1] === ")" && surplus-- <= 0) break;
    }
    found = found.slice(0, end);
    return this.push({type: "link", href: found, children: [found]}, at + found.length);
  }
}

/* Pair runs of emphasis marks that open and close, the innermost first, in linear time. Runs between two partners stay text. */
function pair(runs) {
  const open = {"*": [], "_": [], "~": []};
  const order = [];  // all open runs in order, to drop those that a match encloses
  for (const run of runs) {
    while (run.closes && run.left) {
      const partner = open[run.char].at(-1);
      if (!partner) break;
      while (order.at(-1) !== partner) open[order.pop().char].pop();  // enclosed runs stay text
      const width = run.char === "~" || (run.left >= 2 && partner.left >= 2) ? 2 : 1;
      const type = run.char === "~" ? "del" : width === 2 ? "strong" : "em";
      partner.begins.push(type);
      run.ends.push(type);
      partner.left -= width;
      run.left -= width;
      if (!partner.left) open[order.pop().char].pop();
    }
    if (run.opens && run.left) {
      open[run.char].push(run);
      order.push(run);
    }
  }
}

/* Return the values of the tokens: paired runs and ends of links become values with children, and all other marks text. Values that are nested
   deeper than DEEPEST stand beside one another. */
function build(tokens) {
  const root = [], stack = [root];
  const begin = value => {
    value.children = [];
    stack.at(-1).push(value);
    stack.push(stack.length < DEEPEST ? value.children : stack.at(-1));
  };
  const say = text => {
    const into = stack.at(-1);
    if (!text) return;
    if (typeof into.at(-1) === "string") into.push(into.pop() + text);
    else into.push(text);
  };
  for (const token of tokens) {
    if (typeof token === "string") say(token);
    else if (token.type === "begin") begin({...token.of});
    else if (token.type === "end") stack.pop();
    else if (token.type !== "run") stack.at(-1).push(token);
    else {
      token.ends.forEach(() => stack.pop());
      say(token.char.repeat(token.left));
      token.begins.reverse().forEach(type => begin({type}));
    }
  }
  return root;
}

const isMark = char => PUNCTUATION.test(char) || /\p{P}/u.test(char);

/* Return what a sticky pattern matches at this position, or an empty text. */
function match(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text)?.[0] ?? "";
}
