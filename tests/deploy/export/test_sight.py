"""The web export of a vision model: it cuts images into the server's bytes, sees with the bits of the native program, and gives the answers
of the server, in Node and in Chromium. The model is small and random, so its texts mean nothing."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from deploy.cli.sources import load_of
from deploy.export.model import servable
from deploy.export.web import export_web, page_sees
from deploy.model_loading.known import begin
from deploy.model_loading.load import loaded
from deploy.model_loading.servable import Servable
from runtime.fits import Tiles
from server.engine.step_model import ExcerptTokens
from server.images.cutting import Plan, crops_of
from server.images.decoding import _opaque, _opened
from tests.conftest import DemoServer, serving_demo
from tests.deploy.export.conftest import NATIVE, SCRIPTS
from tests.deploy.export.test_web import batch_of
from tests.golden.vision import SUBJECTS
from tests.lab.chromium import Page
from tests.lab.site import serving
from tests.node import PATIENCE_S, node, run_node
from tests.server.images.files import data_url, encoded, image

pytestmark = pytest.mark.xdist_group("web sight")
SUBJECT = SUBJECTS["idefics3"]
RUNTIME = Path(__file__).parents[3] / "runtime" / "web"
LANCZOS, CROP, LONGEST = 1, 48, 144
PLAN = Plan(CROP, 3, Tiles(longest_edge=LONGEST), LANCZOS)
COUNT = 12
ODD = (image(201, 61, 1), image(37, 41, 2), image(75, 133, 3), image(48, 48, 4))


def opened(form: str, folder: Path = SUBJECT.folder) -> Servable:
    return servable(begin(load_of(str(folder), quantize=form, max_batch=1, target=NATIVE.name)), page_sees)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of an export whose page takes the most probable tokens."""
    return exported(tmp_path_factory)


@pytest.fixture(scope="module")
def brief_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of such an export whose answers end at a frequent letter, so that a second question fits into the context."""
    vocabulary = json.loads((SUBJECT.folder / "tokenizer.json").read_text())["model"]["vocab"]
    return exported(tmp_path_factory, eos_token_id=[SUBJECT.config["text_config"]["eos_token_id"], vocabulary["|"]])


def exported(tmp_path_factory: pytest.TempPathFactory, **generation: Any) -> Path:
    folder, model = tmp_path_factory.mktemp("sight"), tmp_path_factory.mktemp("model")
    shutil.copytree(SUBJECT.folder, model, dirs_exist_ok=True)
    (model / "generation_config.json").write_text(json.dumps({"do_sample": False, **generation}))
    export_web(opened("f32", model), "idefics3", folder, levels=["wasm-relaxed"])
    return folder


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[DemoServer]:
    with serving_demo(cache_folder, str(SUBJECT.folder), "--quantize", "f32", "--target", NATIVE.name) as server:
        yield server


def in_node(script: str, folder: Path, given: str) -> bytes:
    done = subprocess.run([node(), SCRIPTS / script, folder], input=given.encode(), capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return done.stdout


def in_text(data: bytes | memoryview) -> str:
    return base64.b64encode(data).decode()


# --- pixels ------------------------------------------------------------------------------------------------------------


def drawn(seed: int) -> Image.Image:
    """Return an image of a random size with random pixels. Two of three seeds give an opaque one."""
    random = np.random.default_rng(seed)
    width, height = (int(length) for length in random.integers(1, 400, 2))
    pixels = random.integers(0, 256, (height, width, 4), dtype=np.uint8)
    if seed % 3:
        pixels[..., 3] = 255
    return Image.fromarray(pixels)


def test_images_become_the_crops_of_the_server() -> None:
    """All bytes are those of the server, whether an image is enlarged or reduced, along which edge, and how far."""
    sizes = ((1, 1), (1, 900), (900, 1), (2, 3), (47, 48), (300, 700), (701, 299), (1024, 40))
    images = [*map(drawn, range(40)), *(image(*size, seed=5).convert("RGBA") for size in sizes)]
    sizes_of_crops = ((48, 144), (16, 40), (64, 256))
    cases = [(one, *sizes_of_crops[number % 3]) for number, one in enumerate(images)]
    cases += [(image(*size, seed=6).convert("RGBA"), 512, 5000) for size in ((300, 7), (7, 300), (40, 1))]  # the edge is limited to 4096
    given = [[*one.size, longest, edge, in_text(one.tobytes())] for one, edge, longest in cases]
    for (one, edge, longest), (rows, columns, crops) in zip(
        cases, json.loads(in_node("crops.mjs", RUNTIME, json.dumps(given))), strict=True
    ):
        shape, expected = crops_of(_opaque(one), Plan(edge, 1, Tiles(longest_edge=longest), LANCZOS))
        assert (rows, columns) == (shape.rows, shape.columns), one.size
        assert [base64.b64decode(crop) for crop in crops] == [bytes(crop.pixels) for crop in expected], one.size


# --- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "size"), [("f32", 512), ("f32", 7), ("auto", 512)])
def test_it_sees_with_the_bits_of_the_native_program(site: Path, tmp_path: Path, form: str, size: int) -> None:
    """The logits after a prompt with two images, which is computed at once or in parts that end within crops, have the same bytes."""
    model, folder = opened(form), site
    if form != "f32":
        export_web(model, "idefics3", folder := tmp_path, levels=["wasm-relaxed"])
    step = loaded(model).step_model
    assert step is not None
    tokens, seen, crops = [1, 2, 3], list[ExcerptTokens](), list[tuple[int, str]]()
    for crop in [crop for one in ODD[:2] for crop in crops_of(one, PLAN)[1]]:
        seen.append(ExcerptTokens(crop, crop.digest, len(tokens), 0, crop.num_tokens))
        crops.append((len(tokens), in_text(crop.pixels)))
        tokens += [SUBJECT.image] * crop.num_tokens + [5, 6]
    rows, after, next_tokens = list[NDArray[np.float32]](), 0, tokens
    for _ in range(COUNT):
        batch = replace(batch_of(step, next_tokens, after), seen=() if after else tuple(seen))
        rows.append(step.download(step.run(batch))[0])
        after, next_tokens = after + len(next_tokens), [int(rows[-1].argmax())]
    given = {"tokens": tokens, "size": size, "count": COUNT, "crops": crops}
    found = np.frombuffer(in_node("seen.mjs", folder, json.dumps(given)), np.float32)
    assert found.tobytes() == np.stack(rows).tobytes()


def asked(site: Path, *bodies: dict[str, Any]) -> list[list[Any]]:
    lines = "".join(json.dumps({"method": "chat", "body": body}) + "\n" for body in bodies)
    return [json.loads(line) for line in in_node("engine.mjs", site, lines).splitlines()]


def shown(one: Image.Image, **options: Any) -> dict[str, Any]:
    """Return the part of a message by which the page gets an image: its size and its pixels."""
    url = {"width": one.width, "height": one.height, "rgba": in_text(one.convert("RGBA").tobytes())}
    return {"type": "image_url", "image_url": {"url": url, **options}}


def sent(messages: list[Any]) -> list[Any]:
    """Return the messages for the server, with PNG files in place of pixels."""

    def file(part: Any) -> Any:
        if part["type"] != "image_url":
            return part
        url = part["image_url"]["url"]
        pixels = Image.frombytes("RGBA", (url["width"], url["height"]), base64.b64decode(url["rgba"]))
        return {**part, "image_url": {**part["image_url"], "url": data_url(encoded(pixels))}}

    return [
        {**one, "content": [file(part) for part in one["content"]] if isinstance(one["content"], list) else one["content"]}
        for one in messages
    ]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
CONVERSATIONS = {
    "two images": [user(shown(ODD[0]), shown(ODD[1]), text("Compare."))],
    "between texts": [user(text("a"), shown(ODD[2]), text("b"))],
    "the same image twice": [user(shown(ODD[0]), text("and"), shown(ODD[0]))],
    "one crop": [user(shown(ODD[3]))],
    "low": [user(shown(ODD[0], detail="low"), text("What is it?"))],
    "two turns": [user(shown(ODD[0]), text("What?")), {"role": "assistant", "content": "two."}, user(shown(ODD[2]), text("And?"))],
    "no image": [{"role": "user", "content": "Hello!"}],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_answers_are_those_of_the_server(server: DemoServer, site: Path, name: str) -> None:
    messages = CONVERSATIONS[name]
    [[found]] = asked(site, {"messages": messages, **OPTIONS})
    body = {"model": "idefics3", "messages": sent(messages), **OPTIONS}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S, verify=False)
    assert answer.status_code == 200, answer.text
    expected = answer.json()
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    (one,), (other,) = found["choices"], expected["choices"]
    assert one["message"]["content"] == other["message"]["content"] and one["finish_reason"] == other["finish_reason"]
    mine, theirs = one["logprobs"]["content"], other["logprobs"]["content"]
    assert [(token["token"], token["bytes"]) for token in mine] == [(token["token"], token["bytes"]) for token in theirs] != []
    for name in ("logprob", "top_logprobs"):
        values = [np.array([t[name] if name == "logprob" else [x["logprob"] for x in t[name]] for t in some]) for some in (mine, theirs)]
        np.testing.assert_allclose(*values, rtol=0, atol=1e-6)


def test_a_prefix_with_the_same_images_is_kept(site: Path) -> None:
    """The second turn computes only what is new. The first token that differs may be that of another image with the same tokens."""
    first = [user(shown(ODD[1]), text("What is it?"))]
    other = [user(shown(image(37, 41, 9)), text("What is it?"))]
    low = [user(shown(ODD[1], detail="low"), text("What is it?"))]
    plain = {"temperature": 0, "max_tokens": 4}
    [[one]] = asked(site, {"messages": first, **plain})
    again = [*first, {"role": "assistant", "content": one["choices"][0]["message"]["content"]}, user(text("Sure?"))]
    bodies = [{"messages": messages, **plain} for messages in (first, again, first, other, low, other)]
    found = [whole for [whole] in asked(site, *bodies)]
    usage = [whole["usage"] for whole in found]
    cached = [each["prompt_tokens_details"]["cached_tokens"] for each in usage]
    length = usage[0]["prompt_tokens"]
    assert cached[0] == 0 and cached[1] >= length and cached[2] == length - 1
    assert 0 < cached[3] < length - 9 * len(crops_of(ODD[1], PLAN)[1]) and cached[4] < cached[3] + 9
    assert (
        found[2]["choices"] == found[0]["choices"] and found[5]["choices"] == found[3]["choices"] == asked(site, bodies[3])[0][0]["choices"]
    )


def test_a_stream_has_the_same_text_and_can_be_aborted(site: Path) -> None:
    body = {"messages": CONVERSATIONS["two images"], **OPTIONS}
    lines = [{"method": "chat", "body": {**body, "stream": True}, **more} for more in ({}, {"abortAfter": 2}, {})]
    given = "".join(json.dumps(line) + "\n" for line in [{"method": "chat", "body": body}, *lines])
    [whole], first, aborted, again = (json.loads(line) for line in in_node("engine.mjs", site, given).splitlines())
    texts = ["".join(event["choices"][0]["delta"].get("content") or "" for event in events) for events in (first, again)]
    assert texts == [whole["choices"][0]["message"]["content"]] * 2 != ["", ""]
    assert aborted[-1]["error"]["name"] == "AbortError"


@pytest.mark.parametrize("at", [{"crop": 0}, {"crop": 3}, {"part": 0}, {"part": 5}], ids=str)
def test_an_abort_before_the_first_token_leaves_nothing_behind(site: Path, at: dict[str, int]) -> None:
    """A request that is aborted while crops are encoded, or between parts of its prompt, changes no later answer."""
    body = {"messages": CONVERSATIONS["two images"], **OPTIONS}
    other = {"messages": CONVERSATIONS["two turns"], **OPTIONS}
    requests = [{"body": body}, {"body": other}, {"body": body, "abortAt": at}, {"body": body}, {"body": other}]
    if "crop" in at:  # in a process of its own, which has seen none of the images
        requests = requests[2:]
    given = "".join(json.dumps({"method": "chat", "size": 7, **request}) + "\n" for request in requests)
    *before, [aborted], [again], [last] = (json.loads(line) for line in in_node("engine.mjs", site, given).splitlines())
    assert aborted["error"]["name"] == "AbortError"
    expected = [whole for [whole] in before or asked(site, body, other)]
    assert [again["choices"], last["choices"]] == [whole["choices"] for whole in expected]


KEPT = """
import { pathToFileURL } from 'node:url';
const [runtime] = process.argv.slice(1), { Sight } = await import(pathToFileURL(`${runtime}/sight.mjs`));
const vision = { crop_size: 16, num_tokens: 1, fit: { longest_edge: 64, splits: true } };
const sight = new Sight({ vision, max_context: 9 }, 2 * 3 * 16 * 16);   // two images of one crop
const image = (shade) => ({ width: 5, height: 5, data: new Uint8ClampedArray(100).fill(shade) });
const pictureOf = async (url) => {
  const content = [{ type: 'image_url', image_url: { url, detail: 'low' } }];
  return (await sight.pictures([{ role: 'user', content }], () => {}))[0];
};
const first = [await pictureOf(image(1)), await pictureOf(image(2))];
const told = [await pictureOf(image(1)) === first[0]];
await pictureOf(image(3));
told.push(await pictureOf(image(1)) === first[0], await pictureOf(image(2)) === first[1]);
const changed = new Blob(['x']);
changed.arrayBuffer = async () => { throw new DOMException('the file has changed', 'NotReadableError'); };
const { name, param, message } = await pictureOf(changed).catch((error) => error);
console.log(JSON.stringify({ told, name, param, message }));
"""


def test_images_that_were_used_least_recently_are_cut_again_and_unreadable_files_are_named() -> None:
    found = json.loads(run_node(KEPT, RUNTIME))
    assert found["told"] == [True, True, False]
    where = "messages[0].content[0].image_url.url"
    assert found["param"] == where and found["name"] == "RequestError"
    assert f"{where} is a file that cannot be read (the file has changed); give its bytes" in found["message"]


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ([text("an <image> here")], "messages[0].content[0].text", 'has the text "<image>", which stands for an image'),
        ([{"type": "image_url"}], "messages[0].content[0].image_url", "image_url is absent; expected an object with url"),
        (
            [{"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}],
            "messages[0].content[0].image_url.url",
            "nothing is fetched",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}],
            "messages[0].content[0].image_url.url",
            "is not base64",
        ),
        (
            [{"type": "image_url", "image_url": {"url": data_url(b"x")}}],
            "messages[0].content[0].image_url.url",
            "nothing can decode files here",
        ),
        ([shown(ODD[0], detail="huge")], "messages[0].content[0].image_url.detail", 'detail is "huge"; expected one of auto, low, high'),
        ([{"type": "input_audio"}], "messages[0].content[0]", "has type input_audio; only text and images are understood"),
        ([shown(ODD[0])] * 15, "messages", "the images up to messages[0].content[14] alone have 540 tokens; this export holds 512"),
        (
            [{"type": "image_url", "image_url": {"url": {"width": 40_000, "height": 1_001, "rgba": ""}}}],
            "messages[0].content[0].image_url.url",
            "it has 40000 x 1001 pixels; expected at most 40000000: make it smaller",
        ),
        (
            [{"type": "image_url", "image_url": {"url": {"width": 2, "height": 2, "rgba": in_text(bytes(12))}}}],
            "messages[0].content[0].image_url.url",
            "it has 12 bytes; expected 16, four for each of its 2 x 2 pixels",
        ),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(site: Path, parts: list[Any], param: str, said: str) -> None:
    [[refused], [sound]] = asked(site, {"messages": [user(*parts)]}, {"messages": CONVERSATIONS["no image"], "max_tokens": 1})
    assert refused["error"]["param"] == param and said in refused["error"]["message"]
    assert sound["choices"], "the next request is answered"


MEMORY = """
import { readFile } from 'node:fs/promises';
import { pathToFileURL } from 'node:url';
const [folder] = process.argv.slice(1), { loadModel } = await import(pathToFileURL(`${folder}/loader.mjs`));
const { Memory } = WebAssembly, told = [];
const read = async (file) => {
  if (file.startsWith('weights-')) told.push('weights');
  return new Uint8Array(await readFile(`${folder}/${file}`));
};
const { network } = await loadModel({ read, onSize: (size) => told.push(size) });
told.push(network.program.memory.buffer.byteLength);
WebAssembly.Memory = function (asked) {
  if (asked.initial > 1) throw new RangeError('could not allocate memory');
  return new Memory(asked);
};
told.push(await loadModel({ read }).catch((error) => error.message));
console.log(JSON.stringify(told));
"""


def test_memory_is_stated_before_weights_are_fetched_and_named_if_there_is_none(site: Path) -> None:
    size, fetched, memory, refused = json.loads(run_node(MEMORY, site))
    assert fetched == "weights" and size["memory"] == memory > size["weights"] > 0
    assert f"takes {-(-memory // 2**20)} MiB of memory, and this browser does not give it (could not allocate memory)" in refused


# --- the page ----------------------------------------------------------------------------------------------------------

GIVEN = """(async () => {
  const bytes = Uint8Array.from(atob(DATA), (letter) => letter.charCodeAt(0));
  const given = new DataTransfer(), input = document.getElementById('image');
  given.items.add(new File([bytes], NAME, { type: 'image/png' }));
  const ways = {
    paste: () => document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: given, cancelable: true })),
    drop: () => document.dispatchEvent(new DragEvent('drop', { dataTransfer: given, cancelable: true })),
    file: () => { input.files = given.files; input.dispatchEvent(new Event('change')); },
  };
  ways[WAY]();
})()"""


def give(page: Page, way: str, file: bytes, name: str = "a.png") -> None:
    page.js(GIVEN.replace("NAME", json.dumps(name)).replace("WAY", json.dumps(way)).replace("DATA", json.dumps(in_text(file))))


def chosen(page: Page, number: int) -> None:
    page.wait(f"document.querySelectorAll('#chosen canvas').length === {number}")


def test_the_page_answers_about_images(page: Page, brief_site: Path) -> None:
    """Images that are pasted, dropped and chosen get the answers that their pixels get in Node, and no request leaves the page."""
    turns = [user(shown(ODD[0]), shown(ODD[1]), text("Tell me."))]
    [[first]] = asked(brief_site, {"messages": turns})
    turns += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, user(shown(ODD[2]), text("And?"))]
    [[second]] = asked(brief_site, {"messages": turns})
    expected = [one["choices"][0]["message"]["content"] for one in (first, second)]
    with serving(brief_site) as (address, asked_for):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        loaded_files = len(asked_for)
        give(page, "paste", encoded(ODD[0]))
        give(page, "drop", encoded(ODD[3]), "b.png")
        give(page, "drop", encoded(ODD[1]), "c.png")
        chosen(page, 3)
        page.js("document.querySelector('[title=\"Remove b.png\"]').click()")
        chosen(page, 2)
        page.fill("#prompt", "Tell me.")
        page.click("#send")
        page.see("per second", "#status")
        assert page.js("document.querySelector('.assistant').textContent") == expected[0] != ""
        assert page.js("document.querySelectorAll('.user canvas').length") == 2
        chosen(page, 0)
        give(page, "file", encoded(ODD[2]))
        chosen(page, 1)
        page.fill("#prompt", "And?")
        page.click("#send")
        page.wait("document.querySelectorAll('.assistant').length === 2 && document.getElementById('stop').hidden")
        assert page.js("document.querySelectorAll('.assistant')[1].textContent") == expected[1]
        assert asked_for[loaded_files:] == [], "images stay in the browser"


TOLD = """{
  const status = document.getElementById('status');
  window.told = [];
  new MutationObserver(() => window.told.push(status.textContent)).observe(status, { childList: true });
}"""


@pytest.mark.parametrize(("detail", "parts"), [("auto", 4), ("low", 1)])
def test_the_page_shows_only_the_whole_if_asked_and_tells_how_far_it_is(page: Page, site: Path, detail: str, parts: int) -> None:
    [[expected]] = asked(site, {"messages": [user(shown(ODD[0], detail=detail), text("Look!"))]})
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        page.js(TOLD)
        if detail == "low":
            page.click("#low")
        give(page, "file", encoded(ODD[0]))
        chosen(page, 1)
        page.fill("#prompt", "Look!")
        page.click("#send")
        page.see("per second", "#status")
        assert [told for told in page.js("window.told") if "Looking" in told] == [
            f"Looking: {number} of {parts} parts of images …" for number in range(parts)
        ]
        assert page.js("document.querySelector('.assistant').textContent") == expected["choices"][0]["message"]["content"]


def test_the_page_takes_a_picture(page: Page, site: Path) -> None:
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        page.click("#camera")
        page.see("Close camera", "#camera")
        page.js("window.stream = document.getElementById('video').srcObject")
        page.click("#shoot")
        chosen(page, 1)
        assert page.js("window.stream.getTracks().every((track) => track.readyState === 'ended')"), "the camera is closed"
        assert page.js("document.getElementById('viewer').hidden")
        page.click("#send")
        page.see("per second", "#status")
        page.js(
            "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('Requested device not found', 'NotFoundError'); }"
        )
        page.click("#camera")
        page.see("The camera cannot be used: Requested device not found", "#status")
        assert page.text("#camera") == "Camera"


def test_the_page_names_images_that_it_cannot_use(page: Page, site: Path) -> None:
    """A file that is no image, and one that is too large, are named, and the next question is answered."""
    line = Image.new("1", (40_001, 1_000))
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        give(page, "drop", b"no image", "notes.png")
        page.see("notes.png cannot be used: its beginning declares no size; expected a PNG, JPEG, WebP or GIF file", "#status")
        give(page, "drop", encoded(ODD[0])[:60], "half.png")
        page.see("half.png cannot be used: this browser cannot decode it; expected a PNG, JPEG, WebP or GIF file", "#status")
        give(page, "paste", encoded(line), "line.png")
        page.see("line.png cannot be used: it has 40001 x 1000 pixels; expected at most 40000000", "#status")
        for _ in range(15):
            give(page, "file", encoded(ODD[0]))
        chosen(page, 15)
        page.click("#send")
        page.see("the images up to messages[0].content[14] alone have", "#status")
        assert page.js("document.querySelectorAll('.message').length") == 0
        chosen(page, 15)
        page.js("for (const remove of document.querySelectorAll('#chosen button')) remove.click()")
        page.fill("#prompt", "Hello!")
        page.click("#send")
        page.see("per second", "#status")


def test_a_question_that_fails_can_be_sent_again(page: Page, site: Path) -> None:
    """If a question fails, its text and its images return to the form, and its messages leave the page. What the page shows is what the
    model gets with the next question."""
    [[expected]] = asked(site, {"messages": [user(shown(ODD[0]), text("Look!"))]})
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        give(page, "file", encoded(ODD[0]))
        give(page, "file", encoded(ODD[1]), "b.png")
        chosen(page, 2)
        page.fill("#prompt", "an <image>")
        page.click("#send")
        page.see('has the text "<image>"', "#status")
        chosen(page, 2)
        assert page.js("document.querySelectorAll('.message').length") == 0
        assert page.js("document.getElementById('prompt').value") == "an <image>"
        page.click("[title='Remove b.png']")
        chosen(page, 1)
        page.fill("#prompt", "Look!")
        page.click("#send")
        page.see("per second", "#status")
        assert page.js("document.querySelector('.assistant').textContent") == expected["choices"][0]["message"]["content"]
        assert page.js("document.querySelectorAll('.user canvas').length") == 1


def test_a_file_may_change_after_it_was_chosen(page: Page, site: Path, tmp_path: Path) -> None:
    """Each turn reads the image as it was when it was chosen."""
    turns = [user(shown(ODD[0]), text("Look!"))]
    [[first]] = asked(site, {"messages": turns})
    turns += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, {"role": "user", "content": "And?"}]
    [[second]] = asked(site, {"messages": turns})
    file = tmp_path / "a.png"
    file.write_bytes(encoded(ODD[0]))
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        field = page.call("Runtime.evaluate", expression="document.getElementById('image')")["result"]["objectId"]
        page.call("DOM.setFileInputFiles", files=[str(file)], objectId=field)
        chosen(page, 1)
        for number, (words, whole) in enumerate((("Look!", first), ("And?", second))):
            file.write_bytes(encoded(ODD[2 + number]))
            page.fill("#prompt", words)
            page.click("#send")
            page.wait(f"document.querySelectorAll('.assistant').length === {number + 1} && document.getElementById('stop').hidden")
            assert page.text("#status").endswith("wasm-relaxed"), page.text("#status")
            assert page.js(f"document.querySelectorAll('.assistant')[{number}].textContent") == whole["choices"][0]["message"]["content"]


def test_a_picture_that_is_taken_just_before_a_message_goes_with_it(page: Page, site: Path) -> None:
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        page.click("#camera")
        page.see("Close camera", "#camera")
        page.js("document.getElementById('shoot').click(), document.getElementById('send').click()")
        page.see("per second", "#status")
        assert page.js("document.querySelectorAll('.user canvas').length") == 1
        chosen(page, 0)


PIXELS = """(async () => {
  const { pixelsOf } = await import('./images.mjs'), bytes = Uint8Array.from(atob(DATA), (letter) => letter.charCodeAt(0));
  const { width, height, pixels } = await pixelsOf(new Blob([bytes]));
  return [width, height, btoa(Array.from(pixels, (byte) => String.fromCharCode(byte)).join(''))];
})()"""


def test_files_without_loss_have_the_pixels_of_the_server(page: Page, site: Path) -> None:
    """PNG files with colours, grey in 8 and in 16 bits, a palette, transparent places and a turned picture, and WebP and GIF files without
    loss, have the same bytes."""
    colours, glass = image(61, 47, 7), image(61, 47, 8).convert("RGBA")
    glass.putalpha(Image.fromarray(np.random.default_rng(0).integers(0, 256, (47, 61), dtype=np.uint8)))
    turned = Image.Exif()
    turned[0x0112] = 6  # the picture has to be turned to the right
    values = np.random.default_rng(1).integers(0, 65_536, (97, 101), dtype=np.uint16)
    files = [
        encoded(Image.fromarray(values)),
        encoded(Image.fromarray(values), transparency=int(values[3, 5])),
        encoded(colours),
        encoded(glass),
        encoded(colours.convert("L")),
        encoded(colours.quantize(9)),
        encoded(colours.convert("1")),
        encoded(colours, exif=turned),
        encoded(colours, "WEBP", lossless=True),
        encoded(colours.quantize(9), "GIF"),
    ]
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        for number, file in enumerate(files):
            expected = _opened(file, 10_000)
            width, height, pixels = page.js(PIXELS.replace("DATA", json.dumps(in_text(file))))
            assert (width, height) == expected.size, number
            assert base64.b64decode(pixels) == expected.tobytes(), number
