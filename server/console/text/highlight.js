/* Syntax highlighting: split code into pieces with a kind each. It is no parser and finds only comments, strings, numbers and keywords. */

const LONGEST = 100_000;  // characters; longer code stays plain

const words = text => text.split(" ");
const C_LIKE = {line: "//", block: true, quotes: "\"'"};
const SCRIPT = {...C_LIKE, quotes: "\"'`", keywords: words("as async await break case catch class const continue default delete do else export extends finally for from function get if implements import in instanceof interface let new of return set static super switch this throw try type typeof var void while with yield true false null undefined")};
const PYTHON = {line: "#", quotes: "\"'", triple: true, keywords: words("and as assert async await break case class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield True False None self")};
const SHELL = {line: "#", quotes: "\"'", keywords: words("if then else elif fi for while until do done case esac in function return export local set unset cd echo exit source sudo test true false")};
const CPP = {...C_LIKE, keywords: words("alignas auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false float for friend goto if inline int long namespace new noexcept nullptr operator private protected public return short signed sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile while include define ifdef ifndef endif pragma")};
const JAVA = {...C_LIKE, keywords: words("abstract boolean break byte case catch char class const continue default do double else enum extends final finally float for if implements import instanceof int interface long new null package private protected public record return short static super switch this throw throws true false try var void while fun val when object internal string using namespace")};
const GO = {...C_LIKE, quotes: "\"'`", keywords: words("break case chan const continue default defer else fallthrough for func go goto if import interface map package range return select struct switch type var nil true false string int error bool byte float64")};
const RUST = {...C_LIKE, quotes: "\"", keywords: words("as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use where while")};
const SQL = {line: "--", block: true, quotes: "'\"", isAnyCase: true, keywords: words("add all alter and as asc begin between by case commit create cross delete desc distinct drop else end exists foreign from full group having in index inner insert into is join key left like limit not null offset on or order outer primary references right rollback select set table then union unique update values view when where with")};
const DATA = {line: "#", quotes: "\"'", keywords: words("true false null yes no on off")};
const STYLE = {block: true, quotes: "\"'", keywords: words("important media supports import keyframes layer container root var calc")};
const MARKUP = {markup: true};

const LANGUAGES = {
  js: SCRIPT, javascript: SCRIPT, mjs: SCRIPT, jsx: SCRIPT, ts: SCRIPT, tsx: SCRIPT, typescript: SCRIPT, json: DATA, jsonc: SCRIPT, json5: SCRIPT,
  py: PYTHON, python: PYTHON, python3: PYTHON, sh: SHELL, bash: SHELL, shell: SHELL, zsh: SHELL, console: SHELL, dockerfile: SHELL, makefile: SHELL,
  c: CPP, h: CPP, cpp: CPP, "c++": CPP, cc: CPP, cuda: CPP, java: JAVA, kotlin: JAVA, cs: JAVA, csharp: JAVA, "c#": JAVA, swift: JAVA, php: JAVA,
  go: GO, golang: GO, rust: RUST, rs: RUST, sql: SQL, yaml: DATA, yml: DATA, toml: DATA, ini: DATA, css: STYLE, scss: STYLE,
  html: MARKUP, xml: MARKUP, svg: MARKUP, vue: MARKUP,
};

const patterns = new Map();

/* Return [{kind, text}], whose texts concatenate to the code. `kind` is "" for plain text. */
export function highlight(text, language) {
  const rules = LANGUAGES[language];
  if (!rules || text.length > LONGEST) return [{kind: "", text}];
  if (!patterns.has(rules)) patterns.set(rules, pattern(rules));
  const pieces = [];
  let at = 0;
  for (const found of text.matchAll(patterns.get(rules))) {
    const [kind] = Object.entries(found.groups).find(([, group]) => group !== undefined);
    if (found.index > at) pieces.push({kind: "", text: text.slice(at, found.index)});
    pieces.push({kind, text: found[0]});
    at = found.index + found[0].length;
  }
  if (at < text.length) pieces.push({kind: "", text: text.slice(at)});
  return pieces;
}

function pattern(rules) {
  if (rules.markup) return /(?<comment><!--[\s\S]*?(?:-->|$))|(?<string>"[^"<>]*"|'[^'<>]*')|(?<keyword><\/?[A-Za-z][\w:-]*|\/?>)/g;
  const comments = [], strings = [];
  if (rules.block) comments.push("/\\*[\\s\\S]*?(?:\\*/|$)");
  if (rules.line) comments.push(`${rules.line === "#" ? "(?<![\\w$&])#" : rules.line}[^\\n]*`);
  if (rules.triple) strings.push('"""[\\s\\S]*?(?:"""|$)', "'''[\\s\\S]*?(?:'''|$)");
  for (const quote of rules.quotes) {
    const inside = quote === "`" ? "[^`\\\\]" : `[^${quote}\\\\\\n]`;
    strings.push(`${quote}(?:${inside}|\\\\[\\s\\S])*${quote}?`);
  }
  const parts = [
    comments.length ? `(?<comment>${comments.join("|")})` : "",
    `(?<string>${strings.join("|")})`,
    "(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)",
    `(?<keyword>\\b(?:${rules.keywords.join("|")})\\b)`,
    "(?<name>\\b[A-Za-z_]\\w*(?=\\())",
  ];
  return new RegExp(parts.filter(Boolean).join("|"), rules.isAnyCase ? "gi" : "g");
}
