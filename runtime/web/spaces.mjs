// Let a tokenizer find white space, words and digits as the package tokenizers does, by Unicode. In JavaScript, \s also stands for U+FEFF and not
// for U+0085, and the module of npm takes letters beyond ASCII for no parts of words, and ½ for no number.

const SPACE = '\\p{White_Space}', WORD = '\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}';
const WORDS = new RegExp(`[${WORD}]+|[^${WORD}${SPACE}]+`, 'gu'), PARTS = new RegExp(`[^${SPACE}]+`, 'gu');
const LEFT = new RegExp(`^${SPACE}+`, 'u'), RIGHT = new RegExp(`${SPACE}+$`, 'u');

/** Let the normalisers and the pre-tokenizers of a tokenizer use Unicode's white space. `described`: the content of tokenizer.json. */
export function useUnicode(tokenizer, described) {
  normalise(tokenizer.normalizer, described.normalizer);
  split(tokenizer.pre_tokenizer, described.pre_tokenizer);
}

function normalise(normalizer, described) {
  if (described?.type === 'Strip') {
    const { strip_left: left, strip_right: right } = described;
    normalizer.normalize = (text) => [[left, LEFT], [right, RIGHT]].reduce((rest, [strips, end]) => (strips ? rest.replace(end, '') : rest), text);
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
