"""The messages between the worker of a model, which computes the last stage, and the processes of the other stages.

    worker -> stage    Load  Reserve  Run  Stream  CopyPage
    stage -> worker    Greeting  Progress  LoadFailed  Planned  Loaded  Working  Stream  Ended

A stage sends a Greeting, and gets a Load that names its layers. The stage plans its memory and says for how many pages it has room
(Planned). The worker tells all stages the same numbers of pages (Reserve), so one page table serves all of them. After each Run, every
stage but the first gets the residual stream of the tokens (Stream); the first stage computes it from the tokens. Each stage answers with
the Stream after its layers.
"""

from __future__ import annotations

from server.messages import Load, LoadFailed, Message, Progress, Working


class Greeting(Message, frozen=True, tag=True):
    """The first message of a stage."""

    version: str
    free_bytes: int  # memory of the stage's machine that models may take


class Planned(Message, frozen=True, tag=True):
    """The stage has compiled its program and planned its memory."""

    fingerprint: str  # fingerprint of the whole model: see `deploy/model_loading/fingerprint.py`
    max_context: int
    num_pages: tuple[int, ...]  # number of pages for which the stage has room, by cache group


class Reserve(Message, frozen=True, tag=True):
    """Bind the weights, and allocate this many pages per cache group."""

    num_pages: tuple[int, ...]


class Loaded(Message, frozen=True, tag=True):
    """The stage is ready to run."""

    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    page_bytes: tuple[int, ...]  # bytes of a page, by cache group


class Run(Message, frozen=True, tag=True):
    """Compute the layers for some tokens. Arrays: tokens, positions, query starts, the index of each token's sequence, the slots of each
    cache group, the page tables of each cache group."""


class Stream(Message, frozen=True, tag=True):
    """The residual stream [tokens, size] of the oldest Run whose stream was not sent yet."""


class CopyPage(Message, frozen=True, tag=True):
    """Copy a page in all layers of a cache group."""

    group: int
    source: int  # number of the page that is copied
    target: int  # number of the page that becomes its copy


class Ended(Message, frozen=True, tag=True):
    """The process of the stage has ended. The host of the stage sends this message instead of that process."""

    how: str  # how it has ended, in words
    from_outside: bool  # no request can be the cause


StageMessage = Load | Reserve | Run | Stream | CopyPage | Greeting | Progress | LoadFailed | Planned | Loaded | Working | Ended
