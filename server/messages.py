"""The messages between the front process and a model's worker. Each kind of message is a struct.

    front  -> worker   Load  Part  Submit  Embed  Abort  Drain  Shutdown  GivePages  MorePages
    worker -> front    Progress  Ready  LoadFailed  Damaged  Tokens  Embedding  Failed  Stats  Step  Working  Card
                       CacheChanged  PagesGiven

A message is MessagePack, prefixed by its length as four little-endian bytes, over a Unix socket. Times are seconds. Deadlines are
`time.monotonic()` values, which are the same in all processes of a machine and do not move when the clock is set. Only the front tokenizes
and detokenizes: prompts and answers are token ids here.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b

import msgspec

from runtime.device.base import CardUsage
from runtime.fits import Fit
from server.load_settings import LoadSettings
from server.peers.named import Giver
from server.peers.wire import Offer
from server.scoring import ClassScores, PairPrompt, Scoring


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message; the tag is the class name."""


class FinishReason(StrEnum):
    """Why a choice has ended."""

    STOP = "stop"  # an end-of-sequence token, a stop token, or a complete constraint
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"


class ErrorCode(StrEnum):
    """The reasons why a load or a request has failed. `server/errors.py` has the error that a client gets for each reason."""

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
    """How the source of a constraint is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # source: a JSON list of strings
    GRAMMAR = "grammar"  # source: a grammar in Lark, as llguidance reads it, or in GBNF


class Trigger(msgspec.Struct, frozen=True):
    """The tokens that open a constrained part of an answer: `token_id`, or one of the token sequences `plain`. The part ends when its
    grammar is complete. All other text is unconstrained. Inside a think block nothing opens such a part."""

    token_id: int | None = None  # the constraint's source describes what follows this token; None: only `plain` opens a part
    # token sequences that may follow `token_id`, none a prefix of another; empty: the grammar alone decides
    offers: tuple[tuple[int, ...], ...] = ()
    open_id: int | None = None  # token that opens a think block, if an answer begins with it; None: no block is recognised
    close_id: int | None = None  # token that closes a think block
    is_open: bool = False  # the prompt ends inside a think block
    # token sequences that begin a call in plain JSON; the constraint's `plain` is the grammar of the whole call, these tokens included
    plain: tuple[tuple[int, ...], ...] = ()


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer, or a part of it, must match."""

    kind: ConstraintKind
    source: str
    trigger: Trigger | None = None  # None: the constraint applies to the whole answer
    fallback: str = ""  # source that is used if `source` cannot be compiled
    head: str = ""  # Lark rules that refer to the grammar of `source` as `answer`
    plain: str = ""  # grammar of calls that begin with one of the trigger's `plain`
    plain_fallback: str = ""  # grammar that is used if `plain` cannot be compiled


class Thinking(msgspec.Struct, frozen=True):
    """The token budget of think blocks. When the budget is spent, the open block is closed, and no further block may be opened."""

    budget: int  # largest number of tokens in all blocks together
    open_ids: tuple[int, ...]  # the sequence of tokens that opens a block
    close_id: int
    is_open: bool  # the prompt ends inside a block


class Stamps(msgspec.Struct, frozen=True):
    """The answer is a transcript with time stamps: see `server/constraints/stamps.py`."""

    first: int  # id of the stamp 0.00; the stamps are the last tokens of the vocabulary
    end: int  # id of the token that ends a transcript; all tokens of text come before it
    most_first: int  # the first stamp is at most this many stamps after 0.00


class Audio(msgspec.Struct, frozen=True):
    """A piece of a recording: at most what the encoder takes at once, in whole hops (see `runtime/spectrogram.py`)."""

    samples: bytes  # little-endian f32: those of the piece, and those around it that its first and last hops read
    loudest: float  # the largest energy of the whole recording


class Crop(msgspec.Struct, frozen=True, array_like=True, weakref=True, tag=True):
    """A part of an image, as much as the encoder sees at once: see `server/images/cutting.py`."""

    pixels: memoryview  # three bytes per pixel, line by line; decoded without a copy
    rows: int  # rows and columns of its tokens in the prompt
    columns: int
    digest: bytes  # digest of the fields above: crops with equal digests are equal

    @staticmethod
    def of(pixels: bytes, rows: int, columns: int) -> Crop:
        """Return a crop with its digest."""
        digest = blake2b(b"%d %d " % (rows, columns), digest_size=16)
        digest.update(pixels)
        return Crop(memoryview(pixels), rows, columns, digest.digest())

    @property
    def num_bytes(self) -> int:
        return len(self.pixels)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class Clip(msgspec.Struct, frozen=True, array_like=True, weakref=True, tag=True):
    """A part of a recording, at most as much as a model's audio encoder takes at once: see `server/audio/clips.py`."""

    samples: memoryview  # little-endian f32: those of the part, and those around it that its hops read; without silence at the end
    loudest: float  # the largest energy of the whole recording
    num_hops: int  # hops, of 10 ms, that the encoder hears
    num_tokens: int  # tokens that stand for the clip in the prompt; the encoder computes one vector for each
    digest: bytes  # digest of the fields above: clips with equal digests are equal

    @staticmethod
    def of(samples: bytes, loudest: float, num_hops: int, num_tokens: int) -> Clip:
        """Return a clip with its digest."""
        digest = blake2b(b"clip %s %d %d " % (loudest.hex().encode(), num_hops, num_tokens), digest_size=16)
        digest.update(samples)
        return Clip(memoryview(samples), loudest, num_hops, num_tokens, digest.digest())

    @property
    def num_bytes(self) -> int:
        return len(self.samples)

    @property
    def rows(self) -> int:
        """Always 1: the tokens of a clip form one line, while those of a crop form a grid of `rows` by `columns`."""
        return 1

    @property
    def columns(self) -> int:
        return self.num_tokens


Excerpt = Crop | Clip  # a part of an image or of a recording; its encoder gives a row for each of its tokens


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters for drawing tokens. The front has applied the defaults of the model and of the API."""

    max_tokens: int  # limit on the tokens of each choice
    min_tokens: int = 0  # a choice does not end before it has this many tokens
    temperature: float = 1.0  # 0: draw the most probable token
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # pairs of a token id and what is added to the token's logit
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    banned_token_ids: tuple[int, ...] = ()
    # banned sequences of two tokens or more: the last token is banned where it would follow the others
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end a choice
    ignore_eos: bool = False  # end-of-sequence tokens do not end a choice
    seed: int = 0
    logprobs: int | None = None  # number of alternatives to report with each drawn token; None: no log-probabilities
    processed_logprobs: bool = False  # compute log-probabilities after penalties, temperature and truncation instead of before
    prompt_logprobs: int | None = None  # number of alternatives to report with each prompt token; None: no log-probabilities of them
    constraint: Constraint | None = None
    thinking: Thinking | None = None
    stamps: Stamps | None = None  # not together with a constraint


# --- front -> worker ---------------------------------------------------------------------------------------------------


class Peering(msgspec.Struct, frozen=True):
    """How pages of prefix caches are exchanged with other servers."""

    secret: str
    rate_bytes: float  # expected bytes per second; pages that take longer to arrive than to compute are not asked for
    patience_s: float  # how long a request waits for pages, in addition to the time of computing them
    avoid_s: float = 5.0  # seconds for which a server that has failed is not asked again


class Load(LoadSettings, Message, frozen=True, tag=True):
    """Compile `source`, or load it from the cache, and get ready to serve it."""

    hub_token: str | None = None  # token for downloads; None: use a token from a file or an environment variable of this machine
    verify: bool = False  # verify all cached files before use, because the last worker found damaged ones
    least_context: int | None = None  # length of a sequence, in tokens, for which there must be memory; None: a short one suffices
    restart: bool = False  # this server has served the model before, so verify cached files while serving
    logs_cache: bool = False  # report changes of the prefix cache
    stage_secret: str = ""  # secret that both ends of a connection to a stage prove to know
    peers: Peering | None = None  # None: no pages are given to other servers, or taken from them
    cuts: tuple[int, ...] = ()  # the first layer of each stage but the first; empty: layers are divided in proportion to the stages' memory
    layers: tuple[int, int] | None = None  # the first layer of this stage, and the layer after its last one; None: all layers
    is_early: bool = False  # this stage is not the last one: a later stage continues after its layers
    log_level: str = "info"
    log_format: str = "text"


LOCAL = "local"  # the place of a stage that is a process of this machine
HEAD = "head"  # the place of the last stage, if it is a process of this machine without layers: it computes only what follows all layers

IDLE = 1 << 31  # the priority of the requests of batches; all priorities that a client can set come before it


class Submit(Message, frozen=True, tag=True):
    """Generate `num_choices` continuations of a prompt. `emitted` has, for each choice, the tokens that an earlier worker has already
    produced; the choice continues after them. A choice in `finished` does not run again."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    num_choices: int = 1
    emitted: tuple[tuple[int, ...], ...] = ()
    finished: tuple[int, ...] = ()
    priority: int = 0  # lower values run earlier; IDLE: the request runs only on what other requests leave free
    fairness_key: str = ""  # requests of different keys get equal shares of the work
    cache_salt: str = ""  # requests share pages of the prefix cache only if they have the same salt, which includes the tenant
    deadline: float | None = None
    audio: Audio | None = None  # for models that transcribe: the audio that the prompt is about
    excerpts: tuple[Excerpt, ...] = ()  # the excerpts of all images and recordings, in the order of their tokens in the prompt
    giver: Giver | None = None  # another server that may have pages of the prompt; used only if the load has `peers`


class Part(Message, frozen=True, tag=True):
    """An excerpt of the Submit that follows, which is sent without its excerpts, so that no message is large. `server/engine/channel.py`
    splits and joins the messages: the engine gets the whole Submit."""

    request_id: str
    excerpt: Excerpt


class Embed(Message, frozen=True, tag=True):
    """Compute the vectors of a text, or of an image. Fields with the names of fields of Submit mean the same."""

    request_id: str
    prompt_ids: tuple[int, ...]
    normalize: bool = True
    fairness_key: str = ""
    deadline: float | None = None
    per_token: bool = False  # one vector per token instead of one for the text
    cache_salt: str = ""
    priority: int = 0
    second: int | None = None  # index where the second text of a pair begins, for models that distinguish the two
    # for speech models: the vector of a token is then its attention to the frames of this audio, in several heads
    audio: Audio | None = None
    crop: Crop | None = None  # an image to embed in place of a text


class Abort(Message, frozen=True, tag=True):
    """End a request, or one choice of it."""

    request_id: str
    choice: int | None = None  # None: all choices


class GivePages(Message, frozen=True, tag=True):
    """Read the pages that another server asks for. The first PagesGiven has the offer."""

    request_id: str
    digests: bytes  # see `server.peers.wire.Ask`
    num_held: int  # tokens whose pages the other server has
    num_frames: int  # number of messages with pages that the worker may send at first; each MorePages allows one more


class MorePages(Message, frozen=True, tag=True):
    """The front has passed on a message with pages, so the worker may send one more."""

    request_id: str


class Drain(Message, frozen=True, tag=True):
    """Finish the running requests, accept no new ones, then exit."""


class Shutdown(Message, frozen=True, tag=True):
    """Exit now."""


# --- worker -> front ---------------------------------------------------------------------------------------------------


FETCH = "fetch"  # the first stage of a load; after it, the model's files are on this machine


class Progress(Message, frozen=True, tag=True):
    """How far a load has come."""

    stage: str  # such as FETCH, verify, compile, pack or warm-up
    fraction: float  # completed fraction of the stage, 0 to 1


class CachePages(Message, frozen=True):
    """The pages of a cache group."""

    num_pages: int
    page_bytes: int
    page_size: int  # tokens
    most_each: int | None = None  # largest number of pages that a sequence holds; None: the number grows with its length


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts about a model that its files state."""

    family: str = ""
    format: str = ""  # gguf, safetensors or ctranslate2
    num_parameters: int = 0
    weight_type: str = ""  # type of the weights in the files, such as BF16 or Q4_K_M
    file_bytes: int = 0
    max_context: int = 0  # longest context that the model supports


class QualityLabel(msgspec.Struct, frozen=True):
    """How far the predictions with quantized weights are from those with the exact weights, measured on a text."""

    kl_divergence: float  # nats per token
    top1_agreement: float  # fraction of places at which both kinds of weights predict the same most probable token
    perplexity: float
    exact_perplexity: float
    num_tokens: int


class Vision(msgspec.Struct, frozen=True):
    """How a model sees images: as crops, each of which takes the places of some image tokens of the prompt."""

    crop_size: int  # edge of a crop in pixels; if crops may have any size, edge of the squares that a crop consists of
    edge_tokens: int  # rows of tokens, and columns, of a crop of `crop_size` pixels, or of a square
    image_token: int  # id of the image token; negative if the model embeds images
    fit: Fit  # how an image becomes crops
    filter: int  # number of the filter in Pillow by which images are scaled
    marker: str = ""  # text that the chat template writes for an image; empty: the text of the image token
    around: tuple[str, str] = ("", "")  # texts before and after the tokens of an image that is not cut into tiles
    between: str = ""  # text of the token between two rows of tokens of an image; empty: there is none
    num_places: int = 0  # vectors of a crop in the encoder: the number of tokens that an embedded image counts as


class Listening(msgspec.Struct, frozen=True):
    """How a model hears recordings in conversations: as clips, each of which takes the places of some audio tokens of the prompt."""

    audio_token: int
    num_mels: int  # mel energies of each hop that the encoder gets
    num_hops: int  # hops of a window; a window is as much audio as the encoder takes at once
    frames_each: int  # frames of a token; a frame is two hops
    ends: bool  # whether the last clip has only the tokens of its sound; otherwise silence fills up the window
    most_windows: int  # maximum number of windows of a recording that are heard; 0: no maximum
    piece_hops: int = 0  # hops of a piece, if the encoder reads pieces separately (`runtime/hops.py`); 0: it does not
    reflects: bool = False  # whether a recording is mirrored at its own end, without its incomplete hop; otherwise silence fills it up


class StageReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage of a model: a process with some of the layers."""

    place: str  # LOCAL, HEAD, or the address of its host
    first_layer: int
    end_layer: int  # the layer after its last one
    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    page_bytes: tuple[int, ...] = ()  # bytes of a page, by cache group


class Ready(Message, frozen=True, tag=True):
    """The worker is ready. This message describes the model and the memory that it takes."""

    signature: str  # key of the compiled model in the cache
    cache_hit: bool  # the compiled model was in the cache
    max_context: int
    num_pages: int
    page_size: int
    weights_bytes: int
    arena_bytes: int
    kv_cache_bytes: int
    cache_groups: tuple[CachePages, ...] = ()  # num_pages and kv_cache_bytes are sums over the groups
    context_note: str = ""  # why max_context is less than the model allows, and what a longer context needs
    device_note: str = ""  # why the code is compiled for another target than the load names
    numeric_class: str = ""  # models with equal classes, programs and weights compute equal bits
    fingerprint: str = ""  # digest of the program, the weights and the numeric class
    embedding_size: int = 0  # 0: the model serves no embeddings
    embedding_note: str = ""  # what users of the embeddings should know, such as how a text's vector is made
    embeds_tokens: bool = False  # the model can also compute a vector per token
    generates: bool = True  # False: the model only embeds, classifies or transcribes
    num_hops: int = 0  # most hops, 10 ms each, of a piece of audio to transcribe; 0: the model does not transcribe
    num_mels: int = 0  # number of mel energies that the encoder gets for each hop
    vision: Vision | None = None  # None: the model sees no images
    listening: Listening | None = None  # None: the model hears no recordings in conversations
    left_out: tuple[str, ...] = ()  # parts of the checkpoint that are models of their own, which are not served
    padded_to: int = 0  # number of tokens to which every text is padded; 0: texts are not padded
    normalize: bool = True  # scale embeddings to length 1, unless a request decides otherwise
    prompts: tuple[tuple[str, str], ...] = ()  # pairs of a prompt's name and the text that the prompt puts before a text to embed
    default_prompt: str | None = None  # name of the default prompt
    classes: tuple[str, ...] = ()  # names of classes; if there are any, a text gets a number per class instead of a vector
    class_scores: ClassScores = ClassScores.SOFTMAX
    pair_prompt: PairPrompt | None = None  # None: the tokenizer joins pairs
    graphs_bytes: int = 0  # bytes of captured graphs, as the compiler planned them
    card: CardUsage | None = None  # the model's GPU, or None if it runs on a CPU
    facts: Facts = Facts()
    label: QualityLabel | None = None  # None: not measured
    compile_s: float = 0.0
    load_s: float = 0.0
    stages: tuple[StageReport, ...] = ()  # empty: one process computes all layers
    devices: tuple[str, ...] = ()  # the GPUs over which the model is divided; the numbers of bytes above are per GPU; empty: not divided

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of each stage but the first."""
        return tuple(stage.first_layer for stage in self.stages[1:])

    @property
    def scoring(self) -> Scoring | None:
        """How the model scores texts for requests to rerank or score; None: it does not score texts."""
        if self.classes:
            return Scoring.PAIRS if len(self.classes) == 1 else None
        return Scoring.COSINE if self.embedding_size else None

    @property
    def total_bytes(self) -> int:
        """The bytes of weights, arena, KV cache and graphs."""
        return self.weights_bytes + self.arena_bytes + self.kv_cache_bytes + self.graphs_bytes


class LoadFailed(Message, frozen=True, tag=True):
    """Loading failed. `required_bytes` and `free_bytes` are set if memory was the reason."""

    code: ErrorCode
    message: str
    required_bytes: int = 0
    free_bytes: int = 0


class Damaged(Message, frozen=True, tag=True):
    """The worker serves from damaged files and must be replaced."""

    fault: str


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of a token, its rank, and the most probable tokens in its place."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of one choice: more than one if a grammar forces tokens, or if the worker had held back earlier ones; none if the
    choice only ends."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the end-of-sequence or stop token that ended the choice, not part of token_ids; None: none did
    num_cached: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # sent with the first event of choice 0, if requested


class Tokens(Message, frozen=True, tag=True):
    """The tokens of one engine step."""

    events: tuple[TokenEvent, ...]


class Embedding(Message, frozen=True, tag=True):
    """The vectors of a text or of an image."""

    request_id: str
    vector: bytes  # little-endian f32; with `per_token` the vectors of all tokens, concatenated
    num_tokens: int


class Failed(Message, frozen=True, tag=True):
    """One request failed. Other requests continue."""

    request_id: str
    code: ErrorCode
    message: str


# upper bounds of the buckets that count steps by their tokens
STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class PageCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Pages that went from server to server since the worker started."""

    num_given: int = 0
    num_taken: int = 0
    num_tries: int = 0  # requests for which this server asked another one
    num_failed: int = 0  # tries that ended before all pages of the offer had arrived
    num_left_out: int = 0  # requests whose named server was not asked: computing is faster, too many requests wait, or it has failed
    waited_s: float = 0.0  # time for which requests waited for pages


class Stats(Message, frozen=True, tag=True):
    """The engine's state after a step. The worker sends it at most every 100 ms, and once when the engine runs out of work."""

    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    num_preemptions: int  # preemptions since the worker started; the next three fields count from then, too
    prefix_queries: int
    prefix_hits: int
    num_steps: int
    step_s: float  # duration of the last step
    kernel_s: float  # part of step_s that the call of the model took
    num_step_tokens: int = 0  # tokens of all steps since the worker started
    steps_by_size: tuple[int, ...] = (0,) * (len(STEP_SIZES) + 1)  # steps per bucket; the last bucket counts steps above all bounds
    num_prefill_tokens: int = 0  # prompt tokens of all steps, which num_step_tokens includes
    num_prompt_tokens_left: int = 0  # prompt tokens of unfinished sequences that are not computed yet
    stages_s: float = 0.0  # time that the worker has waited for other stages of its model
    pages: PageCounts = PageCounts()


class Step(Message, frozen=True, tag=True):
    """A step begins that may take up to `limit_s`. The worker sends this before each long step, and with 0 before the first short step
    after it."""

    limit_s: float


class Working(Message, frozen=True, tag=True):
    """The worker waits for other stages of its model. `cpu_s`: the CPU time that those stages have used so far."""

    cpu_s: float


class Card(Message, frozen=True, tag=True):
    """The usage of the worker's GPU. The worker sends it between two steps, every CARD_S seconds (`server/engine/worker.py`)."""

    usage: CardUsage


class PagesStored(Message, frozen=True, tag=True):
    """Pages that can be found in the prefix cache from now on: each continues the page before it."""

    hashes: tuple[int, ...]
    parent: int | None  # hash of the page before the first of these; None: the first page begins a prompt
    token_ids: tuple[int, ...]  # tokens of all these pages, in order
    page_size: int  # tokens of a page
    group: int | None = None  # cache group; None: the model has only one
    keeps_states: bool = False  # whether a page has the state after its last token, instead of keys and values
    window: int | None = None  # number of tokens to which a token attends, itself included; None: all tokens up to it


class PagesRemoved(Message, frozen=True, tag=True):
    """Pages that cannot be found any more."""

    hashes: tuple[int, ...]
    group: int | None = None  # cache group; None: the model has only one


CacheChange = PagesStored | PagesRemoved


class CacheChanged(Message, frozen=True, tag=True):
    """The changes of the prefix cache since the last such message. The worker sends it only if `Load.logs_cache` is set."""

    changes: tuple[CacheChange, ...]


class PagesGiven(Message, frozen=True, tag=True):
    """A part of the answer to a GivePages."""

    request_id: str
    offer: Offer | None = None  # only in the first PagesGiven of an answer
    data: bytes = b""  # the next pages in the order of the offer; empty after the last one, or if the next page is gone


FromFront = Load | Submit | Embed | Abort | Drain | Shutdown | GivePages | MorePages
FromWorker = (
    Progress | Ready | LoadFailed | Damaged | Tokens | Embedding | Failed | Stats | Step | Working | Card | CacheChanged | PagesGiven
)
