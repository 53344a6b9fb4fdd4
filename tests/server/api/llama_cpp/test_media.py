"""Files in prompts of llama.cpp's completions: limits hold for all prompts of a request, and errors name fields that the request has."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from runtime.fits import Tiles
from runtime.spectrogram import RATE
from server.api.llama_cpp.media import specials_at_begin, specials_at_end
from server.api.request import media
from server.messages import Listening, Vision
from server.text.templates.errors import TemplateUnavailable
from tests.doubles.worker import ByteTokenizer
from tests.server.audio.files import tone, wav
from tests.server.images.files import encoded, image

AUDIO, IMAGE = 258, 259
LISTENING = Listening(AUDIO, num_mels=128, num_hops=100, frames_each=4, ends=False, most_windows=0)
VISION = Vision(16, edge_tokens=1, image_token=IMAGE, fit=Tiles(longest_edge=32), filter=1)
SEEN = base64.b64encode(encoded(image())).decode()
HEARD = base64.b64encode(wav(tone(RATE), RATE)).decode()
BROKEN = base64.b64encode(wav(tone(RATE), RATE)[:40]).decode()
HEIC = base64.b64encode(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic").decode()
MARKER = "<__media__>"


def prompt(*files: str, text: str = "") -> dict[str, Any]:
    return {"prompt_string": text + MARKER * len(files), "multimodal_data": list(files)}


@pytest.fixture
def reader(serve, answering):
    """Return a function that starts a server whose model reads images and audio."""

    def start(**options: Any):
        script = answering("", vision=VISION, listening=LISTENING)
        return serve(script=script, tokenizer=ByteTokenizer(specials=["[AUDIO]", "[IMAGE]"]), **options)

    return start


def refusal(server: Any, given: Any, **fields: Any) -> tuple[str, str, str]:
    answer = server.http().post("/completion", json={"prompt": given, "n_predict": 1, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["param"], error["message"]


@pytest.mark.parametrize(
    ("file", "names", "limit"), [(SEEN, "images", "max_images"), (HEARD, "recordings", "max_recordings")], ids=["images", "recordings"]
)
def test_files_of_all_prompts_are_counted(reader, file: str, names: str, limit: str) -> None:
    server = reader(**{limit: 3})
    code, param, text = refusal(server, [prompt(file, file), "plain", prompt(file, file)])
    assert (code, param) == ("invalid_value", "prompt") and f"4 {names}; expected at most 3 ({limit})" in text
    answer = server.http().post("/completion", json={"prompt": [prompt(file, file), prompt(file)], "n_predict": 1})
    assert answer.status_code == 200 and len(server.worker.submits) == 2


def test_the_decoded_bytes_of_all_prompts_are_limited(reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "MOST_BYTES", 2 * 5 * 16 * 16 * 3)
    code, param, text = refusal(reader(), [prompt(SEEN), prompt(SEEN), prompt(SEEN)])
    assert (code, param) == ("invalid_value", "prompt") and "the images up to prompt[2].multimodal_data[0] have 11520 bytes" in text


def test_the_context_holds_for_each_prompt(serve, answering) -> None:
    tokenizer = ByteTokenizer(specials=["[AUDIO]", "[IMAGE]"])
    server = serve(script=answering("", vision=VISION, max_context=16), tokenizer=tokenizer)
    code, param, text = refusal(server, [prompt(SEEN), prompt(SEEN, SEEN, SEEN, SEEN)])
    assert (code, param) == ("context_length_exceeded", "prompt") and "up to prompt[1].multimodal_data[3] alone have 20 tokens" in text


@pytest.mark.parametrize("fields", [{"n_cmpl": 3}, {"n_cmpl": 2}])
def test_answers_are_counted_before_files_are_decoded(reader, fields: dict[str, int]) -> None:
    code, param, text = refusal(reader(max_choices=3), [prompt("%"), prompt("%")], **fields)
    assert (code, param) == ("invalid_value", "n") and "expected at most 3" in text


def test_an_object_without_files_is_its_text(reader) -> None:
    """Such an object counts as a text, so it may be truncated if it exceeds the context."""
    server, text = reader(), "abcdefgh" * 1000
    for given in (text, {"prompt_string": text}, {"prompt_string": text, "multimodal_data": []}):
        answer = server.http().post("/completion", json={"prompt": given, "n_predict": 1, "truncate_prompt_tokens": 3})
        assert answer.status_code == 200, answer.text
        assert server.worker.submits[-1].prompt_ids == tuple(b"fgh")


def test_a_prompt_with_files_may_be_truncated_where_that_is_needed(reader) -> None:
    """-1 also allows to keep all tokens, as in chat. A prompt with files keeps them all, and is refused if they are too many."""
    server = reader()
    for given in (prompt(SEEN, text="abc"), ["abc", prompt(SEEN)]):
        answer = server.http().post("/completion", json={"prompt": given, "n_predict": 4096, "truncate_prompt_tokens": -1})
        assert answer.status_code == 200, answer.text
    long = prompt(SEEN, text="x" * 3000)
    answer = server.http().post("/completion", json={"prompt": long, "n_predict": 4096, "truncate_prompt_tokens": -1})
    assert answer.status_code == 200, answer.text
    assert len(server.worker.submits[-1].prompt_ids) > 3000 and server.worker.submits[-1].excerpts
    assert refusal(server, prompt(SEEN), truncate_prompt_tokens=3)[1] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        (prompt(HEIC), "invalid_image", "prompt.multimodal_data[0]"),
        (prompt(HEARD, BROKEN), "invalid_audio", "prompt.multimodal_data[1]"),
        (["a", prompt(SEEN, "%")], "invalid_image", "prompt[1].multimodal_data[1]"),
        (["a", prompt(SEEN, text="an [IMAGE] ")], "invalid_value", "prompt[1].prompt_string"),
        (prompt(SEEN, text="some [AUDIO] "), "invalid_value", "prompt.prompt_string"),
        (prompt(SEEN, text="x" * 5000), "context_length_exceeded", "prompt"),
        ([{"prompt_string": MARKER}], "invalid_value", "prompt[0].multimodal_data"),
    ],
)
def test_errors_name_fields_of_the_request(reader, given: Any, code: str, param: str) -> None:
    assert refusal(reader(), given)[:2] == (code, param)


def test_a_file_that_the_model_cannot_read_is_named(serve, answering) -> None:
    seeing = serve(script=answering("", vision=VISION), tokenizer=ByteTokenizer(specials=["[AUDIO]", "[IMAGE]"]))
    assert refusal(seeing, prompt(HEARD))[:2] == ("unsupported_content", "prompt.multimodal_data[0]")


def test_a_template_leaves_the_places_of_files(serve, answering) -> None:
    """The rendered prompt has a marker for each file, so it can be sent to /completion with the files."""
    server = serve(script=answering("", vision=Vision(16, edge_tokens=1, image_token=256, fit=Tiles(longest_edge=32), filter=1)))
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{SEEN}"}}, {"type": "text", "text": "What is it?"}]
    answer = server.http().post("/apply-template", json={"messages": [{"role": "user", "content": content}]})
    assert answer.json() == {"prompt": f"<|user|>{MARKER}What is it?\n<|assistant|>"}
    body = {"prompt": {"prompt_string": answer.json()["prompt"], "multimodal_data": [SEEN]}, "n_predict": 1}
    assert server.http().post("/completion", json=body).status_code == 200
    assert len(server.worker.submits[-1].excerpts) == 5


SPECIAL = frozenset({"<a>", "<b>", "a>", "<a><b>", "", *(f"<{number}>" for number in range(6400))})


@pytest.mark.parametrize(
    ("text", "found"),
    [("", ""), ("<a>", "<a>"), ("x<a><b>", "<a><b>"), ("<a>x", ""), ("<a>\n<b>", "<b>"), ("x<7><6399><b>", "<7><6399><b>"), ("<6400>", "")],
)
def test_special_tokens_beside_a_file(text: str, found: str) -> None:
    assert specials_at_end(text, SPECIAL) == found
    mirrored = {one[::-1] for one in SPECIAL}
    assert specials_at_begin(text[::-1], mirrored) == found[::-1]


def test_a_prompt_is_not_another_one_while_the_server_is_busy(serve, answering, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chat template says which special tokens stand beside a file. If no process renders it in time, the request fails: without these
    tokens, the answer would be another one."""

    async def busy(*_args: object, **_options: object) -> str:
        raise TemplateUnavailable("the server is busy; try again later")

    tokenizer = ByteTokenizer(specials=["[AUDIO]", "[IMAGE]"])
    monkeypatch.setattr(type(tokenizer.chat_template.renderer()), "render", busy)
    server = serve(script=answering("", vision=VISION, listening=LISTENING), tokenizer=tokenizer)
    answer = server.http().post("/completion", json={"prompt": prompt(SEEN), "n_predict": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "template_not_rendered"), answer.text
    assert not server.worker.submits
