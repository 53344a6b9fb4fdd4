"""The front reads a model's tokenizer while the worker loads the model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from server.interfaces import LoadError, ProgressCallback
from server.messages import FETCH, ErrorCode, Progress, Ready
from server.models.budget import Budget
from server.models.model import Loaded
from server.models.starting import Starter
from server.models.state import ModelSpec
from server.settings import ServerSettings
from server.text.templates.errors import TemplateUnavailable
from tests.doubles.worker import ByteTokenizer, NullScript, NullTemplate, NullWorker


class Worker(NullWorker):
    """Reports `stages`, then waits until the tokenizer was asked for, and raises `error` or gets ready."""

    def __init__(self, report: ProgressCallback, stages: tuple[str, ...], asked: threading.Event, error: LoadError | None) -> None:
        super().__init__(NullScript())
        self.is_stopped = False
        self._report, self._stages, self._asked, self._error = report, stages, asked, error

    async def start(self) -> Ready:
        for stage in self._stages:
            self._report(Progress(stage, 0.0))
        if self._stages[-1:] != (FETCH,):
            assert await asyncio.to_thread(self._asked.wait, 60), "the tokenizer is read while the model is loaded"
        if self._error is not None:
            raise self._error
        return await super().start()

    async def stop(self) -> None:
        self.is_stopped = True


def sound() -> ByteTokenizer:
    return ByteTokenizer(chat=False)


def broken() -> ByteTokenizer:
    raise LoadError(ErrorCode.LOAD_REFUSED, "the tokenizer is broken")


def started(
    stages: tuple[str, ...], *, error: LoadError | None = None, tokenizer: Callable[[], ByteTokenizer] = sound
) -> tuple[Loaded | Exception, Worker, bool]:
    """Start a model. Return its parts or the error, the worker, and whether the tokenizer was asked for."""
    asked, workers = threading.Event(), list[Worker]()

    def make(_spec: ModelSpec, report: ProgressCallback) -> Worker:
        workers.append(Worker(report, stages, asked, error))
        return workers[-1]

    def load_tokenizer(_source: str) -> ByteTokenizer:
        asked.set()
        return tokenizer()

    settings = ServerSettings()
    starter = Starter(settings, Budget(settings, None, lambda _spec: 0, lambda: ()), make, load_tokenizer)

    async def start() -> Loaded | Exception:
        try:
            return await starter.start(ModelSpec("m", "m"), lambda _progress: None)
        except (LoadError, ValueError) as refused:
            return refused

    return asyncio.run(start()), workers[0], asked.is_set()


@pytest.mark.parametrize("stages", [(FETCH, "verify"), (FETCH, "verify", "compile")])
def test_the_tokenizer_is_read_while_the_model_is_loaded(stages: tuple[str, ...]) -> None:
    loaded, worker, _ = started(stages)
    assert isinstance(loaded, Loaded) and not worker.is_stopped


def test_a_broken_tokenizer_ends_the_load() -> None:
    """The error of the tokenizer is the one that is reported, even if the worker fails at the same time."""
    for error in (None, LoadError(ErrorCode.LOAD_FAILED, "the worker failed")):
        found, worker, _ = started((FETCH, "verify"), error=error, tokenizer=broken)
        assert isinstance(found, LoadError) and found.message == "the tokenizer is broken" and worker.is_stopped


def test_a_template_that_cannot_be_rendered_now_fails_the_load() -> None:
    """The files are right: another try of the load may succeed."""
    tokenizer = sound()

    def busy(*_args: object, **_options: object) -> str:
        raise TemplateUnavailable("the server is busy; try again later")

    tokenizer.chat_template = NullTemplate()
    tokenizer.chat_template.render = busy  # pyright: ignore[reportAttributeAccessIssue]
    found, worker, _ = started((FETCH, "verify"), tokenizer=lambda: tokenizer)
    assert isinstance(found, LoadError) and found.code is ErrorCode.LOAD_FAILED and "try again" in found.message and worker.is_stopped


def test_an_error_after_the_load_stops_the_worker() -> None:
    """Otherwise the worker would hold its memory for as long as the server runs, and nobody would know of it."""
    tokenizer = sound()

    def fail() -> None:
        raise ValueError("the renderer does not start")

    tokenizer.chat_template = NullTemplate()
    tokenizer.chat_template.renderer = fail  # pyright: ignore[reportAttributeAccessIssue]
    found, worker, _ = started((FETCH, "verify"), tokenizer=lambda: tokenizer)
    assert isinstance(found, ValueError) and worker.is_stopped


def test_no_tokenizer_is_read_without_the_model_s_files() -> None:
    """Otherwise the front would download the files as well."""
    found, worker, was_asked = started((FETCH,), error=LoadError(ErrorCode.FETCH_FAILED, "no network"))
    assert isinstance(found, LoadError) and found.message == "no network" and worker.is_stopped and not was_asked
