"""Write a small vocabulary in Mistral's format, the ids that mistral-common gives for texts, and the prompts that it makes of conversations
with audio.

python -m venv V; V/bin/pip install 'mistral-common[audio]==1.13.1'; V/bin/python tests/golden/make_tekken.py

The vocabulary has the first tokens of Mistral's own, which the package contains, and the special tokens of Voxtral. Mistral-common writes
special tokens itself and finds none in texts, so texts are cut at them here.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import wave
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden.make_vocabularies import HERE, STRINGS, TEXTS

NUM_SPECIAL, SIZE = 40, 1_240
FOLDER = HERE / "tekken"
PROMPTS = FOLDER / "prompts.json"


def sound(seconds: float) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(2 * round(16_000 * seconds)))
    return out.getvalue()


TEXT = {"type": "text", "text": "What is said? 1, 2."}
CONVERSATIONS: list[list[dict[str, Any]]] = [  # a recording is given by its seconds
    [{"role": "user", "content": " a\n b "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]
    + [{"role": "user", "content": "d"}],
    [{"role": "user", "content": [{"type": "audio", "seconds": 2.0}, TEXT]}],
    [{"role": "user", "content": [{"type": "audio", "seconds": 31.0}, {"type": "audio", "seconds": 0.5}, TEXT]}],
    [{"role": "user", "content": [TEXT, {"type": "audio", "seconds": 30.0}]}, {"role": "assistant", "content": "b"}]
    + [{"role": "user", "content": "Once more."}],
]


def main() -> None:
    import mistral_common
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    data = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    names += ["[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]"]
    names += ["[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", *(f"<SPECIAL_{id}>" for id in range(20, 24)), "[AUDIO]", "[BEGIN_AUDIO]"]
    names += [*(f"<SPECIAL_{id}>" for id in range(26, 34)), "[TRANSCRIBE]"]
    special = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    config = {**data["config"], "default_vocab_size": SIZE, "default_num_special_tokens": NUM_SPECIAL, "version": "v7"}
    config["num_vocab_tokens"] = SIZE + 100  # of which the last ones are unused, as in the real file
    audio = {
        "sampling_rate": 16_000,
        "frame_rate": 12.5,
        "chunk_length_s": 30.0,
        "audio_encoding_config": {"num_mel_bins": 128, "window_size": 400, "hop_length": 160},
    }
    made = {"config": config, "vocab": data["vocab"][: SIZE + 100], "special_tokens": special, "audio": audio}
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "tekken.json").write_text(json.dumps(made, separators=(",", ":")))
    (FOLDER / "tokenizer_config.json").write_text("{}\n")
    tokenizer = MistralTokenizer.from_file(str(FOLDER / "tekken.json"))
    words = tokenizer.instruct_tokenizer.tokenizer
    cut = re.compile("(" + "|".join(re.escape(name) for name in names) + ")")

    def whole(text: str) -> list[int]:
        pieces = [[names.index(piece)] if piece in names else words.encode(piece, bos=False, eos=False) for piece in cut.split(text)]
        return [1, *(id for piece in pieces for id in piece)]

    ids = {"plain": [words.encode(text, bos=False, eos=False) for text in STRINGS], "whole": [whole(text) for text in [*STRINGS, *TEXTS]]}
    (FOLDER / "ids.json").write_text(json.dumps(ids, separators=(",", ":")) + "\n")
    prompts = []
    for messages in CONVERSATIONS:
        request = ChatCompletionRequest.from_openai([{**message, "content": given(message["content"])} for message in messages])
        prompts.append(tokenizer.encode_chat_completion(request).tokens)
    PROMPTS.write_text(json.dumps(prompts, separators=(",", ":")) + "\n")


def given(content: Any) -> Any:
    """Return the content of a message as mistral-common reads it."""
    if isinstance(content, str):
        return content
    return [
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(part["seconds"])).decode(), "format": "wav"}}
        if part["type"] == "audio"
        else part
        for part in content
    ]


if __name__ == "__main__":
    main()
