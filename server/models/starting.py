"""Start the parts that serve a model: a worker, the tokenizer, the dialect and admission."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from server.interfaces import ProgressCallback
from server.models.admission import Admission
from server.models.budget import Budget
from server.models.model import Loaded, LoadTokenizer, MakeWorker
from server.models.state import ModelSpec
from server.settings import ServerSettings
from server.text.dialect import Dialect
from server.text.templates.renderer import Renderer


@dataclass(frozen=True, slots=True)
class Starter:
    settings: ServerSettings
    budget: Budget
    make_worker: MakeWorker
    load_tokenizer: LoadTokenizer

    async def start(self, spec: ModelSpec, report: ProgressCallback) -> Loaded:
        """Start a model and return its parts. If that fails, stop the worker and raise LoadError."""
        worker = self.make_worker(spec, report)
        try:
            ready = await worker.start()
            worker.before_wake = partial(self.budget.require_room, spec, ready.total_bytes)
            tokenizer = await asyncio.to_thread(self.load_tokenizer, spec.source)
            dialect = await asyncio.to_thread(Dialect.of, tokenizer, spec.tool_parser, spec.reasoning)
        except BaseException:
            await worker.stop()
            raise
        admission = Admission(
            spec.name,
            max_running=spec.max_batch,
            max_queued=self.settings.max_queued_requests,
            max_queued_tokens=self.settings.max_queued_tokens,
        )
        renderer = None if tokenizer.chat_template is None else Renderer(tokenizer.chat_template)
        return Loaded(worker, ready, tokenizer, dialect, admission, renderer)
