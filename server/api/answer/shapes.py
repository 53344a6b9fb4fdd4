"""The JSON shapes of answers, as typed dictionaries. The type checker verifies the code that builds answers, and /docs shows the shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from server.scoring import Scoring

# --- common parts ------------------------------------------------------------------------------------------------------


class PromptDetails(TypedDict):
    cached_tokens: int


class CompletionDetails(TypedDict):
    reasoning_tokens: int


class UsageCounts(TypedDict):
    """The counts of tokens in an answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class RankedToken(TypedDict):
    """The log-probability and the rank of a prompt token or of an alternative token, in vLLM's shape."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Sequence[Mapping[str, RankedToken] | None]  # for each prompt token, log-probabilities by token id; None for the first one


class Envelope(TypedDict):
    """The fields that answers and chunks of chat and completions share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


# --- chat --------------------------------------------------------------------------------------------------------------


class ChatToken(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: Sequence[int]


class RankedChatToken(ChatToken):
    """A token of an answer, and the most probable tokens at its position."""

    top_logprobs: Sequence[ChatToken]


class ChatLogprobs(TypedDict):
    content: Sequence[RankedChatToken]
    refusal: None


class Called(TypedDict):
    """The function that a call names, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call in a message."""

    id: str
    type: Literal["function"]
    function: Called


class ChatMessage(TypedDict):
    """The message that answers a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[Sequence[ToolCall]]
    function_call: NotRequired[Called]  # replaces tool_calls if the request has `functions`
    reasoning_content: NotRequired[str]  # the thoughts
    reasoning: NotRequired[str]  # the same text as reasoning_content, under a newer name


class ChatChoice(TypedDict):
    """A choice of a whole chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: NotRequired[Sequence[int]]


class ChatCompletion(Envelope):
    """A whole chat answer."""

    choices: Sequence[ChatChoice]
    usage: UsageCounts
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[Sequence[int]]


class CalledDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """What a chunk adds to the call number `index`. Only the first chunk of a call has its id and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledDelta


class ChatDelta(TypedDict, total=False):
    """What a chunk adds to the message."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str  # thoughts
    reasoning: str  # the same text as reasoning_content, under a newer name
    tool_calls: Sequence[ToolCallDelta]
    function_call: CalledDelta


class ChatChunkChoice(TypedDict):
    """What a chunk adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[Sequence[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[Sequence[int]]


class ChatChunk(Envelope):
    """A chunk of a streamed chat answer."""

    choices: Sequence[ChatChunkChoice]
    usage: NotRequired[UsageCounts | None]


class PagesNeeded(TypedDict):
    """The KV pages that a request would need. `fits`: the cache is at least as large."""

    pages: int
    bytes: int
    fits: bool


class Render(TypedDict):
    """The prompt and the effective parameters of a chat request for which no answer is generated."""

    object: Literal["render"]
    model: str
    prompt: str
    token_ids: Sequence[int]
    num_tokens: int
    max_model_len: int
    parameters: Mapping[str, object]
    n: int
    stop: Sequence[str]
    kv_cache: PagesNeeded


# --- completions -------------------------------------------------------------------------------------------------------


class CompletionLogprobs(TypedDict):
    """The log-probabilities of a completion: each list has an entry per token."""

    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[Mapping[str, float] | None]
    text_offset: Sequence[int]


class CompletionChoice(TypedDict):
    """A choice of a completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[Sequence[int]]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[Sequence[int]]


class Completion(Envelope):
    choices: Sequence[CompletionChoice]
    usage: UsageCounts


class CompletionChunk(Envelope):
    choices: Sequence[CompletionChoice]
    usage: NotRequired[UsageCounts | None]


# --- embeddings, models, text ------------------------------------------------------------------------------------------


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: Sequence[float] | str  # a text if the request asks for base64


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: Sequence[Embedding]
    model: str
    usage: EmbeddingUsage


class RequestDefaults(TypedDict):
    """The fields that tell a client how to write a request: what messages may contain, and the values of fields that the request leaves
    out."""

    chats: NotRequired[bool]  # whether the model generates and has a chat template
    sees: NotRequired[bool]  # whether messages may have images
    listens: NotRequired[bool]  # whether messages may have recordings
    hears: NotRequired[bool]  # whether the model transcribes speech
    sampling: NotRequired[Mapping[str, float]]  # default values of sampling parameters
    defaults: NotRequired[Mapping[str, Any]]  # default values of other fields, except the chat template


class Quality(TypedDict):
    """Figures that compare the predictions of the served weights with those of the exact weights, measured on a text."""

    kl_divergence: float  # nats per token
    top1_agreement: float  # fraction of tokens after which both kinds of weights predict the same most probable token
    perplexity: float
    exact_perplexity: float
    num_tokens: int


class ModelEntry(RequestDefaults):
    """A model, with the fields that clients of OpenAI and of Anthropic read."""

    id: str
    object: Literal["model"]
    type: Literal["model"]
    created: int
    created_at: str
    display_name: str
    lifecycle: Literal["active"]
    owned_by: str
    root: str
    aliases: Sequence[str]
    max_model_len: NotRequired[int]
    max_input_tokens: NotRequired[int]  # max_model_len under Anthropic's name
    signature: NotRequired[str]  # key of the compiled model in the compiler's cache
    generates: NotRequired[bool]
    web: NotRequired[str]  # path of the page that runs the model in the browser
    embedding_size: NotRequired[int | None]
    embedding_note: NotRequired[str]  # what users of the embeddings should know, such as how vectors are made
    scoring: NotRequired[Scoring | None]  # how the model answers requests to rerank and to score
    prompts: NotRequired[Mapping[str, str]]  # by a prompt's name: the text that the prompt puts before a text to embed
    quality: NotRequired[Quality]  # absent if it was not measured


class ModelList(TypedDict):
    object: Literal["list"]
    data: Sequence[ModelEntry]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False]


class TokenIds(TypedDict):
    """The tokens of a text. `token_strs` has the text of each."""

    tokens: Sequence[int]
    count: int
    max_model_len: int
    token_strs: NotRequired[Sequence[str]]


class LlamaPiece(TypedDict):
    """A token in llama.cpp's shape."""

    id: int
    piece: str | Sequence[int]  # the token's text, or a list of its bytes if they are not valid UTF-8


class LlamaTokenIds(TypedDict):
    tokens: Sequence[int] | Sequence[LlamaPiece]


class Text(TypedDict):
    prompt: str
    content: str  # the same text under llama.cpp's name


# --- operations --------------------------------------------------------------------------------------------------------


class Liveness(TypedDict):
    status: str


class Restarting(TypedDict):
    """A model whose worker has died, or which wakes up, and whose next worker is not ready yet."""

    since_s: float  # seconds since the worker died, or since the model began to wake up
    tries: int
    next_try_s: float | None  # seconds until the next try; None before the first try and while a try is running


class Unavailable(TypedDict):
    """The reason why the server is not ready, in llama.cpp's shape."""

    code: int
    message: str
    type: str


class Readiness(TypedDict):
    """Whether the server is ready, and the state of each model."""

    status: str
    models: Mapping[str, str]
    restarting: NotRequired[Mapping[str, Restarting]]
    error: NotRequired[Unavailable]


class Load(TypedDict):
    """The present number of requests of all models, waiting ones included."""

    server_load: int


class Version(TypedDict):
    version: str
    name: str
