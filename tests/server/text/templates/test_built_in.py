"""Built-in chat templates write the prompts that the publishers' own code writes."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np
import pytest
import tokenizers

from compiler.frontend.vocabulary.folder import NAMES, tokenizer_files
from server.audio.clip_decoder import ClipDecoder, HeardRecording
from server.audio.clips import clips_of
from server.audio.ears import Ears
from server.messages import Listening
from server.text.media import Markers, Senses
from server.text.templates.built_in import BUILT_IN
from server.text.templates.errors import TemplateError
from server.text.templates.template import ChatTemplate
from tests.golden.make_tekken import CONVERSATIONS, FOLDER, PROMPTS

AUDIO = "[AUDIO]"
VOXTRAL = Listening(24, num_mels=128, num_hops=3000, frames_each=4, ends=False, most_windows=0)
NO_DECODER = cast(ClipDecoder, None)  # these recordings are decoded already


def rendered(messages: list[dict[str, Any]]) -> str:
    return ChatTemplate(BUILT_IN["voxtral"], {}).render(messages)


def recording(seconds: float) -> HeardRecording:
    return HeardRecording(clips_of(np.zeros(round(16_000 * seconds), np.float32), VOXTRAL))


@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
def test_prompts_for_voxtral_are_those_of_mistral_common(number: int) -> None:
    """The prompts have the same token ids, including those of recordings."""
    parts = [part for message in CONVERSATIONS[number] if isinstance(message["content"], list) for part in message["content"]]
    recordings = [recording(part["seconds"]) for part in parts if part["type"] == "audio"]
    ears = Ears(VOXTRAL, NO_DECODER, Markers(AUDIO, "audio", "recordings"))
    text, _ = Senses((ears,)).filled(rendered(CONVERSATIONS[number]), recordings)
    made = tokenizer_files({file.name: file.read_bytes() for file in FOLDER.iterdir() if file.name in NAMES})["tokenizer.json"]
    found = tokenizers.Tokenizer.from_str(made.decode()).encode(text, add_special_tokens=False).ids
    assert found == json.loads(PROMPTS.read_text())[number]


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "audio"}]}], "without a system message"),
        ([{"role": "tool", "content": "1"}], "roles of this model"),
    ],
)
def test_voxtral_refuses_what_its_publisher_refuses(messages: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(TemplateError, match=text):
        rendered(messages)
