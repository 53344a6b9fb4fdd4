"""Export a model for browsers, in a process that a server starts which publishes the model. The process exports it for one sequence.

python -m deploy.publication FOLDER < LOAD      LOAD is the message as JSON; prints {}, or {"code", "message"} if the export is refused
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from deploy.cache import kept
from deploy.export.kept import export_kept
from deploy.export.model import servable
from deploy.export.web import export_web, page_sees
from deploy.model_loading.known import begin
from runtime import generated_code
from runtime.sealed import is_shared
from server.interfaces import LoadError
from server.messages import Load

NICE = 10  # niceness of the process: the models that are being served have priority


def main() -> None:
    os.nice(NICE)
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    answer: dict[str, object] = {}
    try:
        model = servable(begin(msgspec.structs.replace(load, max_batch=1, target="host", device="cpu")), page_sees)
        cache, folder = kept(), Path(sys.argv[1])
        if cache is None or is_shared():  # browsers run the files of an export, and no seal protects them
            export_web(model, load.name, folder)
        else:
            export_kept(model, load.name, folder, cache)
    except LoadError as error:
        answer = {"code": error.code, "message": error.message}
    print(msgspec.json.encode(answer).decode())
    generated_code.keep()


if __name__ == "__main__":
    main()
