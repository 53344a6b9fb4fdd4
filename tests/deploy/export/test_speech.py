"""The web export of a speech model: it hears with the bits of the native program, and writes the transcripts of the server, in Node and in
Chromium. The model is small and random, so its texts mean nothing."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from deploy.cli.sources import load_of
from deploy.export.web import export_web
from deploy.model_loading.known import begin
from deploy.model_loading.load import loaded
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from server.audio.loudest import loudest_energy
from server.audio.recording import Recording, with_surroundings
from server.engine.step_model import Heard
from server.speech.tokens import MOST_BEFORE, SpeechTokens
from tests.conftest import DemoServer, serving_demo
from tests.deploy.export.conftest import NATIVE, SCRIPTS
from tests.deploy.export.test_web import batch_of
from tests.lab.chromium import Page
from tests.lab.site import serving
from tests.node import PATIENCE_S, node, run_node
from tests.server.audio.files import wav

pytestmark = pytest.mark.xdist_group("web speech")
GOLDEN = Path(__file__).parents[2] / "golden" / "whisper"
RUNTIME = Path(__file__).parents[3] / "runtime" / "web"
PROMPT = [51, 52, 53, 57, 3, 27, 42, 8]
RATE = 16_000


def servable(form: str) -> Servable:
    return advance(begin(load_of(str(GOLDEN), quantize=form, max_batch=1, target=NATIVE.name)), Servable)


def exported(form: str, folder: Path) -> Path:
    export_web(servable(form), "whisper", folder, levels=["wasm-relaxed"])
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported("f32", tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def server(cache_folder: Path) -> Iterator[DemoServer]:
    with serving_demo(cache_folder, str(GOLDEN), "--quantize", "f32", "--target", NATIVE.name) as server:
        yield server


def noise(seconds: float, seed: int = 0, loudness: float = 0.3) -> NDArray[np.float32]:
    """Return noise, rounded as a file of 16 bits rounds it."""
    samples = loudness * np.random.default_rng(seed).standard_normal(round(RATE * seconds))
    return (np.rint(np.clip(samples, -0.99, 0.99) * 32768) / 32768).astype(np.float32)


def file_of(samples: NDArray[np.float32]) -> bytes:
    return wav((samples.astype(np.float64) * 32768 / 32767).astype(np.float64), RATE)


def in_node(script: str, folder: Path, given: Any) -> bytes:
    command = [node(), SCRIPTS / script, folder]
    done = subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return done.stdout


def asked(site: Path, *requests: dict[str, Any]) -> list[list[Any]]:
    lines = "".join(json.dumps(request) + "\n" for request in requests).encode()
    done = subprocess.run([node(), SCRIPTS / "engine.mjs", site], input=lines, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_recordings_are_cut_and_measured_as_in_the_server() -> None:
    """Pieces and loudest energies have the same bits as the server's, also for recordings that are shorter than what is reflected before
    them."""
    sizes = ((0, 1.0), (1, 0.5), (100, 0.1), (150, 0.1), (201, 0.3), (1000, 1e-4), (5000, 0.0), (16_000, 0.3))
    found = json.loads(
        in_node(
            "sound.mjs",
            RUNTIME,
            {"mels": 80, "recordings": [noise(size / RATE, size, loudness).tolist() for size, loudness in sizes]},
        )
    )
    for (size, loudness), one in zip(sizes, found, strict=True):
        samples = with_surroundings(noise(size / RATE, size, loudness))
        recording = Recording(samples, loudest_energy(samples, 80))
        heard = np.frombuffer(recording.piece(0, min(recording.num_hops, 3)).samples, "<f4")
        assert (one["loudest"], one["num_hops"]) == (recording.loudest, recording.num_hops)
        assert np.array_equal(np.array(one["heard"], np.float32), heard) and one["hops"] == (len(heard) - 320) // 160


@pytest.mark.parametrize(("form", "seconds"), [("f32", 0.48), ("f32", 0.2), ("auto", 0.48)])
def test_it_hears_with_the_bits_of_the_native_program(site: Path, tmp_path: Path, form: str, seconds: float) -> None:
    model, folder, samples = servable(form), site if form == "f32" else exported(form, tmp_path), noise(seconds)
    whole = with_surroundings(samples)
    recording = Recording(whole, loudest_energy(whole, 80))
    step = loaded(model).step_model
    assert step is not None
    heard = Heard(np.frombuffer(recording.piece(0, recording.num_hops).samples, np.float32), recording.loudest, 1)
    while not step.encode(heard):
        pass
    rows = list[NDArray[np.float32]]()
    for at, token in enumerate(PROMPT):
        rows.append(step.download(step.run(batch_of(step, [token], at)))[0])
    found = np.frombuffer(in_node("heard.mjs", folder, {"samples": samples.tolist(), "prompt": PROMPT}), np.float32)
    assert found.tobytes() == np.stack(rows).tobytes()


@pytest.mark.parametrize("options", [{"language": "en"}, {"temperature": 0.6, "seed": 7}, {"language": "English ", "prompt": "a word"}])
def test_transcripts_are_those_of_the_server(server: DemoServer, site: Path, options: dict[str, Any]) -> None:
    """Recordings of several windows, of one, and of almost none have the same segments, at the same times, with the same tokens."""
    recordings = [noise(1.3), noise(0.2, 1), noise(0.01, 2)]
    body = {"response_format": "verbose_json", **options}
    found = asked(site, *({"method": "transcriptions", "body": {**body, "file": samples.tolist()}} for samples in recordings))
    for samples, [whole] in zip(recordings, found, strict=True):
        form = {name: str(value) for name, value in body.items()}
        expected = httpx.post(
            f"{server.url}/v1/audio/transcriptions", data=form, files={"file": file_of(samples)}, timeout=PATIENCE_S, verify=False
        ).json()
        assert (whole["text"], whole["language"]) == (expected["text"], expected["language"])
        assert [one["tokens"] for one in whole["segments"]] == [one["tokens"] for one in expected["segments"]]
        for one, other in zip(whole["segments"], expected["segments"], strict=True):
            assert one["text"] == other["text"] and one["temperature"] == other["temperature"]
            for name in ("start", "end", "avg_logprob", "no_speech_prob"):
                assert one[name] == pytest.approx(other[name], abs=1e-6 if name != "no_speech_prob" else 0.1)
    assert found[0][0]["segments"], "the model writes something"


BEFORE = """
import { pathToFileURL } from 'node:url';
const { Transcription } = await import(pathToFileURL(process.argv[1])), steps = [];
const network = {
  hear() {}, reset() {}, probability: () => 0, row: () => new Float32Array(16), append(tokens) { steps.push(...tokens); },
  draw: () => ({ token: 0, logprob: { logprob: 0 } }),
};
const tokens = { end: 0, start: 1, before: 2, no_stamps: 8, tasks: { transcribe: 3 }, silence: 4, languages: { en: 5 }, banned: [] };
const model = { vocab_size: 16, max_context: 64, speech: { tokens, num_hops: 100 } }, pause = async () => {};
const asked = { language: 'en', task: 'transcribe', temperature: 0, seed: 0, prompt: Array.from({ length: 300 }, (_, i) => 10 + i) };
const work = new Transcription(network, model, [], asked, pause);
for await (const _ of work.segments({ numHops: 50, piece: () => ({}) }));
console.log(JSON.stringify(steps));
"""


def test_text_before_a_window_takes_half_of_a_small_context_as_in_the_server() -> None:
    """An export with `--max-context 64` would otherwise fail at the second window of a recording."""
    tokens = SpeechTokens(0, 1, 2, 8, {"transcribe": 3}, 4, {"en": 5}, ())
    earlier = [*range(10, 310)][-min(MOST_BEFORE, 64 // 2 - 1) :]
    assert json.loads(run_node(BEFORE, RUNTIME / "transcribe.mjs")) == tokens.prompt("en", "transcribe", earlier)


@pytest.mark.parametrize("format", ["text", "srt", "vtt"])
def test_subtitles_are_those_of_the_server(server: DemoServer, site: Path, format: str) -> None:
    samples, body = noise(1.3), {"response_format": format, "language": "en"}
    further = {"timestamp_granularities": ["segment"], "file": samples.tolist()}
    [[found]] = asked(site, {"method": "transcriptions", "body": {**body, **further}})
    url, files = f"{server.url}/v1/audio/transcriptions", {"file": file_of(samples)}
    assert found == httpx.post(url, data=body, files=files, timeout=PATIENCE_S, verify=False).text


def test_a_stream_and_an_abort(site: Path) -> None:
    body = {"file": noise(1.3).tolist(), "language": "en", "temperature": 0.6}
    [[whole], events, aborted] = asked(
        site,
        {"method": "transcriptions", "body": body},
        {"method": "transcriptions", "body": {**body, "stream": True}},
        {"method": "transcriptions", "body": {**body, "stream": True}, "abortAfter": 1},
    )
    assert "".join(event["delta"] for event in events[:-1]).strip() == events[-1]["text"] == whole["text"]
    assert aborted[-1]["error"]["name"] == "AbortError" and len(aborted) == 2


@pytest.mark.parametrize(
    ("method", "body", "param", "said"),
    [
        ("transcriptions", {"language": "xx"}, "language", 'language is "xx"; expected a code such as en, one of 1'),
        ("transcriptions", {"response_format": "pdf"}, "response_format", "expected one of json, text, verbose_json, srt, vtt"),
        ("transcriptions", {"temperature": 2}, "temperature", "expected a number from 0 to 1"),
        ("transcriptions", {"timestamp_granularities": ["word"]}, "timestamp_granularities", 'is ["word"]; expected ["segment"]'),
        ("transcriptions", {"chunking_strategy": "auto"}, "chunking_strategy", "is not supported in the browser"),
        ("chat", {"messages": []}, "model", "whisper transcribes speech; use audio.transcriptions.create"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(site: Path, method: str, body: dict[str, Any], param: str, said: str) -> None:
    given = {**body, "file": noise(0.1).tolist()} if method == "transcriptions" else body
    [[refused]] = asked(site, {"method": method, "body": given})
    assert refused["error"]["param"] == param and said in refused["error"]["message"]


FILE = """(async () => {
  const bytes = Uint8Array.from(atob(DATA), (letter) => letter.charCodeAt(0)), chosen = new DataTransfer();
  chosen.items.add(new File([bytes], 'noise.wav', { type: 'audio/wav' }));
  const input = document.getElementById('file');
  input.files = chosen.files;
  input.dispatchEvent(new Event('change'));
})()"""
MICROPHONE = """navigator.mediaDevices.getUserMedia = async () => {
  const context = new AudioContext(), tone = new OscillatorNode(context), out = new MediaStreamAudioDestinationNode(context);
  tone.connect(out);
  tone.start();
  return out.stream;
}"""


def test_the_page_writes_down_a_file_and_a_recording(page: Page, site: Path) -> None:
    samples = noise(0.4, 3)
    [[expected]] = asked(site, {"method": "transcriptions", "body": {"file": samples.tolist()}})
    with serving(site) as (address, asked_for):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        loaded_files = len(asked_for)
        page.js(FILE.replace("DATA", json.dumps(base64.b64encode(file_of(samples)).decode())))
        page.see("1 s of speech in", "#status")
        assert page.text(".assistant") == expected["text"] != ""
        page.js(MICROPHONE)
        page.click("#record")
        page.see("Stop recording", "#record")
        page.js("new Promise((resolve) => setTimeout(resolve, 300))")
        page.click("#record")
        page.wait("document.querySelectorAll('.assistant').length === 2 && document.getElementById('quit').hidden")
        page.see("s of speech in", "#status")
        assert asked_for[loaded_files:] == [], "the sound stays in the browser"
        page.js(FILE.replace("DATA", json.dumps(base64.b64encode(b"no sound").decode())))
        page.see("noise.wav cannot be transcribed", "#status")
        page.expect_no_faults()


COUNTED = """window.streams = [];
navigator.mediaDevices.getUserMedia = async () => {
  await new Promise((resolve) => setTimeout(resolve, 100));
  window.streams.push(new MediaStreamAudioDestinationNode(new AudioContext()).stream);
  return window.streams.at(-1);
}"""
CLOSED = "window.streams.every((stream) => stream.getTracks().every((track) => track.readyState === 'ended'))"


def test_the_page_records_once_at_a_time(page: Page, site: Path) -> None:
    """A second click while the microphone opens begins no second recording. A recorder that cannot begin closes the microphone, and a
    recording ends after two minutes by itself."""
    with serving(site) as (address, _):
        page.open(f"{address}/chat.html")
        page.see("Ready, wasm-relaxed", "#status")
        page.js(COUNTED)
        page.js(
            "window.Recorder = MediaRecorder; window.MediaRecorder = class { constructor() { throw new Error('no codec'); } }; undefined"
        )
        page.click("#record")
        page.see("The microphone cannot be used: no codec", "#status")
        assert page.js(CLOSED) and page.js("window.streams.length === 1 && !document.getElementById('record').disabled")
        page.js("window.MediaRecorder = window.Recorder; undefined")
        page.js("""window.timers = [];
          const later = window.setTimeout;
          window.setTimeout = (act, ms) => (ms === 120_000 ? window.timers.push(act) : later(act, ms));""")
        page.js("document.getElementById('record').click(); document.getElementById('record').click()")
        page.see("Stop recording", "#record")
        assert page.js("window.streams.length") == 2 and page.js("window.timers.length") == 1 and not page.js(CLOSED)
        assert page.js("document.getElementById('file').disabled")
        page.js("new Promise((resolve) => setTimeout(resolve, 300))")
        page.js("window.timers[0]()")
        page.wait("document.querySelectorAll('.assistant').length === 1 && document.getElementById('quit').hidden")
        assert page.js(CLOSED) and page.js("document.getElementById('record').textContent") == "Record"
        assert not page.js("document.getElementById('file').disabled")
        page.expect_no_faults()
