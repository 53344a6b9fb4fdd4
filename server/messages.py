"""What the front process and a model's worker say to each other: one struct per arrow.

    front  -> worker   Load  Submit  Embed  Abort  Drain  Shutdown
    worker -> front    Progress  Ready  LoadFailed  Damaged  Tokens  Embedding  Failed  Stats

A message is MessagePack, prefixed by its length as four little-endian bytes, over a Unix socket. Times are seconds; deadlines are
`time.monotonic()` values, which all processes of a machine read alike, and which setting the clock does not move. The front owns text: a
worker never sees anything but token ids.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

MAX_GAP_MS = 1000  # unless a load says otherwise


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message; the tag is the class name."""


class FinishReason(StrEnum):
    STOP = "stop"  # end of sequence, a stop token, or a constraint that is complete
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"


class ErrorCode(StrEnum):
    """Why a load or a request ended: what processes tell each other of it. `server/errors.py` has what a client is told of each."""

    INVALID_VALUE = "invalid_value"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_SCHEMA = "invalid_schema"
    NOT_AN_EMBEDDING_MODEL = "not_an_embedding_model"
    NOT_A_GENERATIVE_MODEL = "not_a_generative_model"
    INVALID_SOURCE = "invalid_source"
    LOAD_REFUSED = "load_refused"
    INTERNAL_ERROR = "internal_error"
    GENERATION_FAILED = "generation_failed"
    LOAD_FAILED = "load_failed"
    FETCH_FAILED = "fetch_failed"
    MODEL_NOT_READY = "model_not_ready"
    SHUTTING_DOWN = "shutting_down"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    INSUFFICIENT_MEMORY = "insufficient_memory"


class ConstraintKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # source: a JSON list of strings
    GRAMMAR = "grammar"  # in Lark, as llguidance reads it, or in GBNF


class Trigger(msgspec.Struct, frozen=True):
    """The token behind which a constraint governs until it is met; what is outside is free. Within thoughts the token means nothing."""

    token_id: int
    offers: tuple[tuple[int, ...], ...] = ()  # what may begin behind it, none the beginning of another; empty: as the grammar says
    open_id: int | None = None  # of thoughts, which come first
    close_id: int | None = None
    is_open: bool = False  # the prompt ends inside of thoughts


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: ConstraintKind
    source: str
    trigger: Trigger | None = None  # None: it governs from the first token on
    fallback: str = ""  # in place of a source that cannot be compiled
    head: str = ""  # rules of Lark that come before the source; they call it `answer`


class Thinking(msgspec.Struct, frozen=True):
    """How long a think block may get before it is closed."""

    budget: int  # tokens between the markers
    open_id: int
    close_id: int
    is_open: bool  # the prompt ends inside the block


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn. All values are resolved: defaults of the model and of the API are applied by the front."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 takes the most probable token
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_token_ids: tuple[int, ...] = ()
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # two tokens or more; the last is banned behind those before it
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None  # how many alternatives beside the drawn token; None: none at all
    processed_logprobs: bool = False  # after penalties, temperature and truncation instead of before
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    thinking: Thinking | None = None


# --- front -> worker ---------------------------------------------------------------------------------------------------


class Load(Message, frozen=True, tag=True):
    """Compile or load `source` and get ready to serve it."""

    name: str
    source: str
    quantize: str = "auto"
    max_context: int | None = None
    max_batch: int = 64
    max_gap_ms: int = MAX_GAP_MS
    kv_cache_bytes: int | None = None
    memory_limit_bytes: int | None = None
    kv_dtype: str = "auto"  # of the pages: f32, f16, bf16, int8; auto is bf16, beside weights of f32 it is f32
    target: str = "host"  # what code is generated for
    device: str = "cpu"  # what runs it: cpu, cuda, cuda:1
    hub_token: str | None = None  # to download with; None: what the machine has, a file or a variable
    verify: bool = False  # what earlier loads kept, completely and before it is used: that of the last worker was damaged
    reserved_bytes: int = 0  # of what is free, for models that are still to come: the KV cache leaves it to them
    kv_share: float = 1.0  # of the room that is left then, for a load that does not say kv_cache_bytes
    restart: bool = False  # this server has served the model: kept files are verified beside the worker, however the last one ended


class Submit(Message, frozen=True, tag=True):
    """Generate `num_choices` continuations of a prompt. `emitted` holds, per choice, what a former worker already produced: the
    continuation goes on behind it as if nothing had happened. A choice in `finished` is not run again."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    num_choices: int = 1
    emitted: tuple[tuple[int, ...], ...] = ()
    finished: tuple[int, ...] = ()
    priority: int = 0  # lower runs earlier
    fairness_key: str = ""
    cache_salt: str = ""
    deadline: float | None = None


class Embed(Message, frozen=True, tag=True):
    request_id: str
    prompt_ids: tuple[int, ...]
    normalize: bool = True
    fairness_key: str = ""
    deadline: float | None = None
    per_token: bool = False  # a vector for each token instead of one for the text
    second: int | None = None  # where the second text of a pair begins, for models that tell the two apart


class Abort(Message, frozen=True, tag=True):
    request_id: str
    choice: int | None = None  # None: all of them


class Drain(Message, frozen=True, tag=True):
    """Finish what is running, accept nothing new, then exit."""


class Shutdown(Message, frozen=True, tag=True):
    """Exit now."""


# --- worker -> front ---------------------------------------------------------------------------------------------------


class Progress(Message, frozen=True, tag=True):
    stage: str  # fetch, verify, compile, pack, warm-up
    fraction: float


class ClassScores(StrEnum):
    """How the numbers of classes become scores."""

    SOFTMAX = "softmax"  # a text has one class
    SIGMOID = "sigmoid"  # a text has any of the classes
    RAW = "raw"  # the numbers are the scores


class CachePages(Message, frozen=True):
    """The pages of a cache group."""

    num_pages: int
    page_bytes: int
    page_size: int  # tokens
    most_each: int | None = None  # what a sequence holds at most, however long it is; None: the longer it is, the more


class PairPrompt(Message, frozen=True):
    """The text around an instruction, a query and a document, of a model that judges documents."""

    before: str
    marks: tuple[str, str, str]  # before the instruction, the query and the document
    after: str
    instruction: str  # unless a request has its own


class Ready(Message, frozen=True, tag=True):
    """The worker serves; what the model is and what it cost."""

    signature: str
    cache_hit: bool
    max_context: int
    num_pages: int
    page_size: int
    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    cache_groups: tuple[CachePages, ...] = ()  # num_pages and kv_cache_bytes are of all of them
    context_note: str = ""  # why max_context is less than the model could have, and what takes more
    embedding_size: int = 0  # 0: not an embedding model
    embeds_tokens: bool = False  # it gives the vector of each token, too
    generates: bool = True
    normalize: bool = True  # embeddings have length one unless a request says otherwise
    prompts: tuple[tuple[str, str], ...] = ()  # name, and text before what is embedded
    default_prompt: str | None = None  # its name
    classes: tuple[str, ...] = ()  # names; a text has a number for each in the place of a vector
    class_scores: ClassScores = ClassScores.SOFTMAX
    pair_prompt: PairPrompt | None = None  # None: the tokenizer joins pairs
    graphs_bytes: int = 0  # as planned
    num_graphs: int = 0  # that the device captured; 0 where it replays launches without capturing them
    compile_s: float = 0.0
    load_s: float = 0.0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.arena_bytes + self.kv_cache_bytes + self.graphs_bytes


class LoadFailed(Message, frozen=True, tag=True):
    """Loading ended without a model. `required_bytes` and `free_bytes` are set when memory was the reason."""

    code: ErrorCode
    message: str
    required_bytes: int = 0
    free_bytes: int = 0


class Damaged(Message, frozen=True, tag=True):
    """The worker serves from files that are damaged: it must be replaced."""

    fault: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one choice (more than one where a grammar forces them)."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it; never part of token_ids
    num_cached: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # with the first event of choice 0, when asked for


class Tokens(Message, frozen=True, tag=True):
    """All that one engine step produced."""

    events: tuple[TokenEvent, ...]


class Embedding(Message, frozen=True, tag=True):
    request_id: str
    vector: bytes  # little-endian f32; with `per_token` all vectors, one behind the other
    num_tokens: int


class Failed(Message, frozen=True, tag=True):
    """One request ended in an error; the others go on."""

    request_id: str
    code: ErrorCode
    message: str


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens of a step: upper bounds of what is counted as one


class Stats(Message, frozen=True, tag=True):
    """The engine's state after a step, at most every 100 ms and once when it falls idle."""

    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    num_preemptions: int  # counters since the worker started
    prefix_queries: int
    prefix_hits: int
    num_steps: int
    step_s: float  # the last step
    kernel_s: float  # of which the device worked
    num_step_tokens: int = 0  # of all steps together
    steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # the last counts those beyond every bound


FromFront = Load | Submit | Embed | Abort | Drain | Shutdown
FromWorker = Progress | Ready | LoadFailed | Damaged | Tokens | Embedding | Failed | Stats
