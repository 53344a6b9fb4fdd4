// Let a tokenizer find white space, words and digits as the package tokenizers does, by Unicode. In JavaScript, \s also stands for U+FEFF and not
// for U+0085, and the module of npm takes letters beyond ASCII for no parts of words, and ½ for no number.

const SPACE = '\\p{White_Space}';
export const WORD = '\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}';
const WORDS = new RegExp(`[${WORD}]+|[^${WORD}${SPACE}]+`, 'gu'), PARTS = new RegExp(`[^${SPACE}]+`, 'gu');
const BLANK = new RegExp(SPACE, 'u');

/** Let the normalisers and the pre-tokenizers of a tokenizer use Unicode's white space. `described`: the content of tokenizer.json. */
export function useUnicode(tokenizer, described) {
  normalise(tokenizer.normalizer, described.normalizer);
  split(tokenizer.pre_tokenizer, described.pre_tokenizer);
}

function normalise(normalizer, described) {
  if (described?.type === 'Strip') {
    const { strip_left: left, strip_right: right } = described;
    normalizer.normalize = (text) => withoutEnds(text, (unit) => BLANK.test(unit), left, right);   // white space has no surrogates
  }
  described?.normalizers?.forEach((part, i) => normalise(normalizer.normalizers[i], part));
}

function split(preTokenizer, described) {
  switch (described?.type) {
    case 'ByteLevel': {
      const { source, flags } = preTokenizer.pattern;
      preTokenizer.pattern = new RegExp(source.replaceAll('\\s', SPACE).replaceAll('\\S', '\\P{White_Space}'), flags);
      break;
    }
    case 'Digits':   // of every script, and numbers such as ½
      preTokenizer.pattern = new RegExp(`\\P{N}+|\\p{N}${described.individual_digits ? '' : '+'}`, 'gu');
      break;
    case 'Punctuation':   // the module joins neighbours
      if (described.behavior === 'Isolated') preTokenizer.pattern = new RegExp(preTokenizer.pattern.source.slice(0, -1), 'gu');
      break;
    case 'Whitespace':
      preTokenizer.pre_tokenize_text = (text) => text.match(WORDS) ?? [];
      break;
    case 'WhitespaceSplit':
      preTokenizer.pre_tokenize_text = (text) => text.match(PARTS) ?? [];
      break;
  }
  described?.pretokenizers?.forEach((part, i) => split(preTokenizer.tokenizers[i], part));
}

/**
 * Return a text or a list without the units at its ends for which `isDropped` holds. A pattern for the right end would take quadratic time: it
 * begins anew at each character of a long run of white space.
 */
export function withoutEnds(units, isDropped, left, right) {
  let begin = 0, end = units.length;
  while (left && begin < end && isDropped(units[begin])) begin++;
  while (right && end > begin && isDropped(units[end - 1])) end--;
  return units.slice(begin, end);
}
