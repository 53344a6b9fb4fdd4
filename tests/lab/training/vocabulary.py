"""Train the demo model's tokenizer: byte-level BPE learnt from the corpus. Each digit is a token, so that the digits of the operands of a
sum are aligned.

python -m tests.lab.training.vocabulary        # writes tokenizer.json and tokenizer_config.json into deploy/demo/model
"""

import json
from collections.abc import Iterator
from itertools import islice

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deploy.demo import MODEL
from tests.lab.training.corpus import conversations
from tests.lab.training.rendering import TEMPLATE, render

SIZE = 2048
CONTEXT = 1024
END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Each of these is one token but counts as ordinary text, so that decoding without special tokens keeps it.
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_CORPUS_SEED, _CORPUS_SIZE = 1, 20_000


def learn() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(_MARKS),
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(), trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _MARKS])
    return tokenizer


def _text() -> Iterator[str]:
    for conversation in islice(conversations(_CORPUS_SEED), _CORPUS_SIZE):
        whole = render(conversation.messages, conversation.tools)
        for mark in (START_OF_TURN, END_OF_TURN, *_MARKS):
            whole = whole.replace(mark, "")
        yield whole


def configuration(tokenizer: Tokenizer) -> dict[str, object]:
    """Return the content of tokenizer_config.json in Hugging Face's format."""
    added = {
        str(token_id): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }
    return {
        "add_bos_token": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": CONTEXT,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> None:
    tokenizer = learn()
    MODEL.mkdir(exist_ok=True)
    tokenizer.save(str(MODEL / "tokenizer.json"))
    written = json.dumps(configuration(tokenizer), indent=2, ensure_ascii=False)
    (MODEL / "tokenizer_config.json").write_text(written + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
