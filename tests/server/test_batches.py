"""Files and batches, through the clients of OpenAI and Anthropic, on a server whose model computes nothing."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from server.batches.lines import MAX_LINES
from server.batches.records import BatchRecord, FileRecord, Status, new_id, now
from server.batches.store import Store
from server.errors import ApiError
from tests.doubles.worker import NullScript

Body = dict[str, Any]
