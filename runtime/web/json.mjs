// Read and write JSON as the server does, with the numbers and the order of keys that the text has.

/** A mapping in the order of its keys. Objects in JavaScript put keys that are numbers first. */
export class Ordered extends Map {
  toJSON() { return Object.fromEntries(this); }
}

/** A number that is written with a point or an exponent. */
export class Float {
  constructor(value) { this.value = value; }

  toJSON() { return this.value; }
}

const TOKENS = /[{}[\]:,]|"[^"\\]*(?:\\.[^"\\]*)*"|[^\s{}[\]:,"]+/g;
const MOST_DEPTH = 64;   // the server's limit

/**
 * Return the value of a JSON text: objects as Ordered, numbers with a fraction as Float, and integers that a number does not hold as BigInt.
 * Throw SyntaxError if the text is no JSON, or has half a surrogate pair or too large a number, and RangeError if it nests too deeply.
 */
export function parsedJson(text) {
  JSON.parse(text);
  const tokens = text.match(TOKENS);
  let at = 0;
  const unquoted = (token) => {
    const found = JSON.parse(token);
    if (/\p{Surrogate}/u.test(found)) throw new SyntaxError('half a surrogate pair is no character');
    return found;
  };
  const read = (depth) => {
    if (depth > MOST_DEPTH) throw new RangeError(`more than ${MOST_DEPTH} levels are nested`);
    const token = tokens[at++];
    if (token === '{') {
      const found = new Ordered();
      while (tokens[at] !== '}') {
        if (tokens[at] === ',') at++;
        const key = unquoted(tokens[at]);
        at += 2;
        found.set(key, read(depth + 1));
      }
      at++;
      return found;
    }
    if (token === '[') {
      const found = [];
      while (tokens[at] !== ']') {
        if (tokens[at] === ',') at++;
        found.push(read(depth + 1));
      }
      at++;
      return found;
    }
    return token[0] === '"' ? unquoted(token) : /^-?\d/.test(token) ? numeric(token) : JSON.parse(token);
  };
  return read(0);
}

/** Return the number that a token writes. */
function numeric(token) {
  const value = Number(token) + 0;   // an integer has no negative zero
  if (/^-?\d+$/.test(token)) return Number.isSafeInteger(value) ? value : BigInt(token);
  if (!Number.isFinite(value)) throw new SyntaxError(`${token} is out of range`);
  return new Float(Number(token));
}

/** Return a fraction as Python writes it. */
export function writtenFloat(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? 'nan' : value > 0 ? 'inf' : '-inf';
  if (value === 0) return Object.is(value, -0) ? '-0.0' : '0.0';
  const [digits, exponent] = value.toExponential().split('e'), power = Number(exponent);
  if (power < -4 || power >= 16) return `${digits}e${power < 0 ? '-' : '+'}${String(Math.abs(power)).padStart(2, '0')}`;
  const text = String(value);
  return text.includes('.') ? text : `${text}.0`;
}
