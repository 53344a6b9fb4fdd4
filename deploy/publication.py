"""Export a model for browsers, in a process that a server starts to publish the model. The exported program computes one sequence at a
time.

python -m deploy.publication FOLDER < WANTED
    WANTED is a message `Wanted` as JSON; prints {}, or {"code", "message"} if the export is refused

The server imports this module for `Wanted`, so only functions that the process calls import the exporter.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime import generated_code
from server.defaults import Defaults
from server.interfaces import LoadError
from server.messages import Load

if TYPE_CHECKING:
    from deploy.model_loading.servable import Servable

NICE = 10  # niceness of the process: the models that are being served have priority


class Wanted(msgspec.Struct, frozen=True):
    """The model to export, and its defaults for requests, which take precedence over those of the file beside the model."""

    load: Load
    defaults: Defaults


def main() -> None:
    os.nice(NICE)
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Wanted)
    answer: dict[str, object] = {}
    try:
        _export(opened(wanted), wanted.load.name, Path(sys.argv[1]))
    except LoadError as error:
        answer = {"code": error.code, "message": error.message}
    print(msgspec.json.encode(answer).decode())
    generated_code.keep()


def opened(wanted: Wanted) -> Servable:
    """Return the model to export, with its defaults. Raise LoadError if the model cannot be exported."""
    from deploy.export.model import servable
    from deploy.export.web import page_sees
    from deploy.model_loading.known import begin

    model = servable(begin(msgspec.structs.replace(wanted.load, max_batch=1, target="host", device="cpu")), page_sees)
    return replace(model, tokenizer_source=replace(model.tokenizer_source, own=wanted.defaults))


def _export(model: Servable, name: str, folder: Path) -> None:
    """Write the files of an export to a folder. Raise LoadError if the model cannot be exported."""
    from deploy.cache import kept
    from deploy.export.kept import export_kept
    from deploy.export.web import export_web
    from runtime.sealed import is_shared

    cache = kept()
    if cache is None or is_shared():  # browsers run the files of an export, and no seal protects them
        export_web(model, name, folder)
    else:
        export_kept(model, name, folder, cache)


if __name__ == "__main__":
    main()
