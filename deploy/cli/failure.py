"""Map exceptions to exit statuses of the command line. An expected error prints one line; only a bug prints a traceback.

2    misuse: an invalid setting, argument or switch
1    any other expected failure
130  interrupted
"""

from __future__ import annotations

from compiler.frontend.errors import ModelError
from compiler.ir.errors import CompileError
from compiler.machine.target import TargetError
from deploy.client import ServerFault
from deploy.export.folder import ExportError
from runtime.errors import InvalidFlag, RuntimeFault
from server.interfaces import LoadError, RequestError
from server.models.state import StateError
from server.settings import SettingsError
from server.text.templates.errors import TemplateError
from server.text.tokenizer_files import ModelFilesError

USAGE, FAILURE, INTERRUPTED = 2, 1, 130

MISUSE = (SettingsError, StateError, InvalidFlag)
EXPECTED = (
    ModelError,
    ModelFilesError,
    LoadError,
    RequestError,
    CompileError,
    TargetError,
    TemplateError,
    ServerFault,
    ExportError,
    RuntimeFault,
)


def status_of(error: BaseException) -> int | None:
    """Return the exit status of an expected error, or None for a bug, whose traceback is shown."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, MISUSE):
        return USAGE
    return FAILURE if isinstance(error, EXPECTED) else None
