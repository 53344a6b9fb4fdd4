"""Put the parts together and serve: settings -> registry of supervised workers -> application -> uvicorn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.fetch import local_folder
from server.app import create_app
from server.engine.supervisor import Supervisor
from server.handle import ProgressCallback
from server.listen import Server
from server.messages import Load
from server.registry import Registry
from server.settings import ServerSettings
from server.state import ModelSpec
from server.text.tokenizer import Tokenizer

WORKER = (sys.executable, "-m", "deploy.worker")


def make_worker(spec: ModelSpec, progress: ProgressCallback) -> Supervisor:
    load = Load(
        spec.name,
        spec.source,
        spec.quantize,
        spec.max_context,
        spec.max_batch,
        spec.kv_cache_bytes,
        spec.memory_limit_bytes,
    )
    return Supervisor(WORKER, load, progress=progress)


def load_tokenizer(source: str) -> Tokenizer:
    return Tokenizer.from_dir(local_folder(source))


def serve(settings: ServerSettings, models: Sequence[ModelSpec]) -> None:
    registry = Registry(settings, make_worker, load_tokenizer, initial=models)
    app = create_app(settings, registry)
    Server(app, settings, registry, log_level="warning").run()


def model_spec(text: str) -> ModelSpec:
    """`PATH_OR_ID[=NAME]`, as the command line takes it."""
    source, _, name = text.partition("=")
    path = Path(source).expanduser()
    resolved = str(path.resolve()) if path.exists() else source
    return ModelSpec(name or path.name, resolved)
