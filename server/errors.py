"""The errors that a client can see: one table of stable codes, and the envelope of errors in OpenAI's API.

`python -m server.errors` prints the page `docs/errors.md`; a test compares its output with the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from typing_extensions import TypedDict

from server.interfaces import RequestError
from server.messages import ErrorCode


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """A row of the table of errors."""

    code: str
    status: int
    meaning: str
    remedy: str
    retry: bool = False  # the same request may succeed later; if False, a header tells clients not to retry
    is_overload: bool = False  # the server has too much work at present; `type` is then OVERLOADED, whatever the status

    @property
    def type(self) -> str:
        """The type that OpenAI's clients read."""
        return OVERLOADED if self.is_overload else TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")


OVERLOADED = "rate_limit_error"
TYPES = {  # types by status; other statuses have `server_error` from 500 on, and `invalid_request_error` below
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    412: "conflict_error",
    429: OVERLOADED,
}

INVALID_JSON = ErrorKind("invalid_json", 400, "The body is not valid JSON.", "Send UTF-8 JSON without NaN or lone surrogates.")
MISSING_FIELD = ErrorKind("missing_field", 400, "A required field is absent.", "Send the field named by `param`.")
INVALID_VALUE = ErrorKind(
    ErrorCode.INVALID_VALUE, 400, "A field has a value of the wrong type or outside its range.", "Correct the field named by `param`."
)
UNSUPPORTED_FIELD = ErrorKind(
    "unsupported_field", 400, "The field is known, and this server does not implement it.", "Leave the field out."
)
UNKNOWN_FIELD = ErrorKind(
    "unknown_field",
    400,
    "The field is unknown and the server runs with `--strict`.",
    "Leave the field out; without `--strict` it is reported in `X-Ignored-Params`.",
)
UNSUPPORTED_CONTENT = ErrorKind(
    "unsupported_content",
    400,
    "A part of a message is video or a file, or it is an image or audio that the model does not read.",
    "Send text; send images to a vision model, such as SmolVLM, and audio to a model that hears it, such as Voxtral.",
)
CONTEXT_LENGTH_EXCEEDED = ErrorKind(
    ErrorCode.CONTEXT_LENGTH_EXCEEDED,
    400,
    "The prompt leaves no room for an answer in the model's context, or a text to embed is longer than the context. With `--strict`, all "
    "of `max_tokens` must fit.",
    "Shorten the text, lower `max_tokens`, or set `truncate_prompt_tokens`.",
)
TEMPLATE_FAILED = ErrorKind(
    "template_failed", 400, "The chat template refused the messages.", "Read the message; many templates expect a certain order of roles."
)
INVALID_SCHEMA = ErrorKind(
    ErrorCode.INVALID_SCHEMA,
    400,
    "A schema, regular expression or grammar cannot be compiled, or it needs more CPU time or memory than is allowed.",
    "Avoid the keyword that the message names; write a grammar so that a text can be parsed in one way only.",
)
NO_CHAT_TEMPLATE = ErrorKind("no_chat_template", 400, "The model has no chat template.", "Use `/v1/completions`.")
NOT_AN_EMBEDDER = ErrorKind(
    ErrorCode.NOT_AN_EMBEDDING_MODEL,
    400,
    "The model computes no embeddings: it classifies texts, transcribes speech, or generates text and was not trained for embeddings.",
    "Ask a model that was trained for embeddings, or load a generator with `embeddings: true`.",
)
NOT_A_GENERATOR = ErrorKind(
    ErrorCode.NOT_A_GENERATIVE_MODEL, 400, "The model only embeds, classifies or transcribes.", "Ask a generative model."
)
NOT_A_CLASSIFIER = ErrorKind(
    "not_a_classifier",
    400,
    "The model has no classification head for texts. No model classifies single tokens.",
    "Ask `/pooling` or `/v1/embeddings` for vectors, or let the model choose a class with `structured_outputs.choice`.",
)
NOT_A_SPEECH_MODEL = ErrorKind("not_a_speech_model", 400, "The model does not transcribe speech.", "Ask a speech model, such as Whisper.")
INVALID_AUDIO = ErrorKind(
    "invalid_audio",
    400,
    "The audio is damaged, too long or too short, in a format that the server does not read, or at a URL that it does not fetch.",
    "Read the message; install the extra `media`, or convert the file to WAV.",
)
AUDIO_BUFFER_EMPTY = ErrorKind(
    "input_audio_buffer_commit_empty",
    400,
    "The audio buffer of a realtime session is too short to be committed.",
    "Append more audio first.",
)
AUDIO_BUFFER_FULL = ErrorKind(
    "input_audio_buffer_full", 400, "The buffer of a realtime session would have more audio than it may.", "Commit or clear the buffer."
)
INVALID_IMAGE = ErrorKind(
    "invalid_image",
    400,
    "The image is damaged, too large, in a format that the server does not read, or at a URL that it does not fetch.",
    "Read the message; send PNG, JPEG, WebP or GIF in a `data:` URL, or at a host that `image_hosts` allows.",
)
INVALID_SOURCE = ErrorKind(
    ErrorCode.INVALID_SOURCE,
    400,
    "The source lies outside the model root, does not exist, or must be downloaded, which is not allowed or needs the extra `hub`.",
    "Name a folder below `--model-root`, or start the server with `--allow-hub`.",
)
LOAD_REFUSED = ErrorKind(
    ErrorCode.LOAD_REFUSED, 400, "The model's files cannot be served as they are.", "Read the message: it names the file or the setting."
)
BAD_REQUEST = ErrorKind("bad_request", 400, "The request is not valid HTTP for this path.", "Read the message.")
INVALID_API_KEY = ErrorKind("invalid_api_key", 401, "The key is missing or wrong.", "Send `Authorization: Bearer KEY`.")
ADMIN_KEY_REQUIRED = ErrorKind(
    "admin_key_required", 403, "The path belongs to the administration, and the key is not an admin key.", "Send an admin key."
)
ADMIN_DISABLED = ErrorKind(
    "admin_disabled",
    403,
    "API keys are set or the server is `insecure`, but there is no admin key, so the administration is closed.",
    "Start the server with an admin key.",
)
KEY_RESTRICTED = ErrorKind("key_restricted", 403, "The answer would name models that the key may not use.", "Use a key for all models.")
HOST_NOT_ALLOWED = ErrorKind(
    "host_not_allowed",
    403,
    "Without keys the server answers only to its own name, so that no web page reaches it through a visitor's browser.",
    "Use http://127.0.0.1, set a key, or name the host in `allowed_hosts`.",
)
ORIGIN_NOT_ALLOWED = ErrorKind(
    "origin_not_allowed",
    403,
    "Without keys the server refuses requests that web pages of other origins send through a visitor's browser.",
    "Set a key, or name the page's origin in `cors_origins`.",
)
NOT_FOUND_PATH = ErrorKind("path_not_found", 404, "There is nothing at this path.", "See `/docs`.")
ONE_SERVER = ErrorKind(
    "one_server",
    404,
    "In a fleet, only a single server can answer this path: files, batches, realtime, the administration, load and metrics.",
    "Use the address of the server.",
)
MODEL_NOT_FOUND = ErrorKind(
    "model_not_found", 404, "No model of that name or alias is loaded, or the key may not use it.", "See `/v1/models`."
)
OPERATION_NOT_FOUND = ErrorKind(
    "operation_not_found", 404, "No operation has this id.", "Operations are forgotten an hour after their end."
)
NOT_JSON = ErrorKind(
    "not_json",
    415,
    "A request that changes something in the administration has a content type other than JSON.",
    "Send `Content-Type: application/json`.",
)
UNSUPPORTED_ENCODING = ErrorKind(
    "unsupported_encoding", 415, "The body has an unsupported compression.", "Compress it with gzip or deflate, or not at all."
)
RESPONSE_NOT_FOUND = ErrorKind(
    "response_not_found",
    404,
    "No stored response has this id, or it belongs to another key.",
    "Responses are forgotten `response_store_s` after their last use, earlier if `response_store_bytes` is reached, and when the "
    "server stops.",
)
FILE_NOT_FOUND = ErrorKind(
    "file_not_found",
    404,
    "No uploaded file has this id, the file has expired, or it belongs to another key or group of keys.",
    "See `/v1/files`. Files that a batch wrote are deleted after `batch_store_s`.",
)
BATCH_NOT_FOUND = ErrorKind(
    "batch_not_found", 404, "No batch has this id, or it belongs to another key or group of keys.", "See `/v1/batches`."
)
BATCHES_OFF = ErrorKind(
    "batches_off",
    501,
    "The server keeps no files, and so runs no batches.",
    "Read the message; start the server with `--batch-dir FOLDER`, and without `--batch-store-bytes 0`.",
)
CONFLICTING_BATCH = ErrorKind(
    "conflicting_batch",
    409,
    "A batch that has ended cannot be cancelled. A batch that has not ended cannot be deleted, and neither can its files.",
    "Read the message. Cancel a batch before you delete it or its files.",
)
STORE_FULL = ErrorKind(
    "store_full",
    507,
    "Uploaded files take all the space of `batch_store_bytes`, there are too many files, or too many batches of the key or its group "
    "have not ended.",
    "Delete files or cancel batches.",
)
PREVIOUS_RESPONSE_NOT_FOUND = ErrorKind(
    "previous_response_not_found",
    400,
    "The response that `previous_response_id` names is not stored, or it belongs to another key.",
    "Send the whole conversation as `input`.",
)
METHOD_NOT_ALLOWED = ErrorKind("method_not_allowed", 405, "The path exists and accepts other methods.", "See the `Allow` header.")
REQUEST_TIMEOUT = ErrorKind("request_timeout", 408, "The body did not arrive in time.", "Send the body faster.", retry=True)
MODEL_EXISTS = ErrorKind(
    "model_exists", 409, "The name is taken by another model or alias.", "Unload that model, or load under another name and move the alias."
)
NAME_IS_ALIAS = ErrorKind(
    "name_is_alias",
    409,
    "The name is an alias; a model can be unloaded only under its own name.",
    "Unload the model that the message names, or remove the alias at `/admin/aliases`.",
)
MODEL_BUSY = ErrorKind(
    "model_busy",
    409,
    "The model is loading, unloading or draining, or it was replaced meanwhile.",
    "Wait for its operation, or cancel it; then send the request again.",
)
MODEL_PINNED = ErrorKind("model_pinned", 409, "The model is pinned.", "Unload with `force=true`.")
PROBE_FAILED = ErrorKind(
    "probe_failed",
    409,
    "The model did not answer the probe as expected, so it takes no alias and replaces no model.",
    "Read the message; ask the model under its own name.",
)
LOAD_CANCELLED = ErrorKind("load_cancelled", 409, "Somebody cancelled the load.", "Load the model again if needed.")
OPERATION_ENDED = ErrorKind("operation_ended", 409, "The operation has ended and cannot be cancelled.", "Unload the model instead.")
FINGERPRINT_MISMATCH = ErrorKind(
    "fingerprint_mismatch",
    412,
    "The header `If-Match` names a fingerprint that is not the model's, so the model would not give the same bytes.",
    "Ask a server whose answers have this `system_fingerprint`, or leave the header out.",
)
BODY_TOO_LARGE = ErrorKind(
    "body_too_large",
    413,
    "The body is larger than `max_body_bytes`, or an uploaded file than `max_file_bytes` or `max_audio_bytes`.",
    "Send a smaller body.",
)
BODY_TOO_COMPLEX = ErrorKind(
    "body_too_complex",
    413,
    "The body has more than 24576 objects, lists, names and texts together, more than 327680 numbers, or more than 2097152 backslashes.",
    "Split the request.",
)
HEADERS_TOO_LARGE = ErrorKind("headers_too_large", 431, "The request line and headers exceed `max_header_bytes`.", "Shorten them.")
QUEUE_FULL = ErrorKind("queue_full", 429, "The model's queue is full.", "Wait for `Retry-After`.", retry=True)
KEY_QUOTA = ErrorKind(
    "key_quota_exceeded",
    429,
    "The API key has too many requests, or too many different constraints, at once.",
    "Wait for `Retry-After`, or for running requests of the key.",
    retry=True,
)
RATE_LIMITED = ErrorKind(
    "rate_limit_exceeded",
    429,
    "The API key has used the requests or tokens that it may use per minute, or has as many running requests as it may.",
    "Wait for `Retry-After`.",
    retry=True,
)
CLIENT_CLOSED = ErrorKind("client_closed", 499, "The client closed the connection. Only logs and metrics show this code.", "None.")
INTERNAL = ErrorKind(ErrorCode.INTERNAL_ERROR, 500, "The server has a bug.", "Report it with the `x-request-id`.")
GENERATION_FAILED = ErrorKind(
    ErrorCode.GENERATION_FAILED, 500, "The model's worker could not finish this request.", "Report it with the `x-request-id`."
)
LOAD_FAILED = ErrorKind(ErrorCode.LOAD_FAILED, 500, "Loading ended in an unexpected error.", "Read the operation's error.")
CACHE_NOT_CLEARED = ErrorKind(
    "cache_not_cleared", 500, "A file of the cache cannot be removed.", "Read the message: it names the file. Remove it as its owner."
)
PREFLIGHT_UNAVAILABLE = ErrorKind(
    "preflight_unavailable", 501, "This server cannot compute a load's memory without loading.", "Load without `dry_run`."
)
NOTHING_KEPT = ErrorKind(
    "nothing_kept", 501, "The server has no file in which it could store requests.", "Start it with `--keep-requests FILE`."
)
CACHE_UNAVAILABLE = ErrorKind(
    "cache_unavailable", 501, "This server keeps no cache of compiled models.", "Start it without `RELAXSERVE_NO_CACHE`."
)
FETCH_FAILED = ErrorKind(
    ErrorCode.FETCH_FAILED,
    502,
    "The hub or the package index did not deliver the model.",
    "Read the message: the name may be wrong, access may be denied, or the network may be down.",
)
REPLICA_LOST = ErrorKind(
    "replica_lost",
    502,
    "In a fleet, the server that had the request has ended. The request has side effects, so it was sent to no other server.",
    "See what the request has done before you send it again.",
)
NO_REPLICA = ErrorKind(
    "no_replica",
    503,
    "In a fleet, no server could take the request in time.",
    "Send it again later. If the error persists, read the logs of the servers.",
    retry=True,
)
MODEL_NOT_READY = ErrorKind(
    ErrorCode.MODEL_NOT_READY, 503, "The model is loading, restarting or draining.", "Wait for `Retry-After`.", retry=True
)
AUDIO_NOT_DECODED = ErrorKind(
    "audio_not_decoded",
    503,
    "The server was too busy to fetch or decode the audio file, or holds too much audio.",
    "Send it again.",
    retry=True,
    is_overload=True,
)
AUDIO_MEMORY_FULL = ErrorKind(
    "audio_memory_full",
    503,
    "The realtime sessions of the server, or of the API key, hold as much audio as they may.",
    "Append the audio again later.",
    retry=True,
    is_overload=True,
)
TEMPLATE_NOT_RENDERED = ErrorKind(
    "template_not_rendered",
    503,
    "The server was too busy to render the chat template, or could start no process for it.",
    "Send it again.",
    retry=True,
    is_overload=True,
)
IMAGE_NOT_DECODED = ErrorKind(
    "image_not_decoded",
    503,
    "The server was too busy to fetch or decode the image, or holds too many images.",
    "Send it again.",
    retry=True,
    is_overload=True,
)
TOO_MANY_CONNECTIONS = ErrorKind(
    "too_many_connections",
    503,
    "All connections that the server may have are busy with requests.",
    "Wait for `Retry-After`; raise `max_connections`, or the limit on open files.",
    retry=True,
    is_overload=True,
)
SHUTTING_DOWN = ErrorKind(
    ErrorCode.SHUTTING_DOWN, 503, "The server stops, or the model is unloaded or put to sleep.", "Ask another server.", retry=True
)
DEADLINE_EXCEEDED = ErrorKind(
    ErrorCode.DEADLINE_EXCEEDED,
    504,
    "The request's `timeout` passed. If the answer is a text, `usage` counts the tokens generated until then.",
    "Set a longer `timeout`, or ask for fewer tokens.",
)
INSUFFICIENT_MEMORY = ErrorKind(
    ErrorCode.INSUFFICIENT_MEMORY,
    507,
    "The model does not fit into the free memory.",
    "Unload a model listed in `evictable`, or lower `kv_cache_bytes`.",
)

TABLE: tuple[ErrorKind, ...] = tuple(kind for kind in list(globals().values()) if isinstance(kind, ErrorKind))
BY_CODE = {kind.code: kind for kind in TABLE}


class ErrorDetail(TypedDict):
    """The fields that every error has. Some errors have further fields."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """The body of an answer that is an error, in OpenAI's shape."""

    error: ErrorDetail


class ApiError(Exception):
    """An error of the table, raised with a message for one request. `param` is the field that causes the error, `headers` are added to
    those of the answer, and `details` are further fields of the error in OpenAI's shape."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str | None = None,
        headers: dict[str, str] | None = None,
        **details: object,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.headers = {} if headers is None else headers
        self.details = details

    def body(self) -> bytes:
        """Return the error as JSON, in OpenAI's shape."""
        error: ErrorDetail = {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.kind.code}
        return msgspec.json.encode({"error": {**error, **self.details}})

    def response_headers(self) -> dict[str, str]:
        """Return the headers of the answer: `x-should-retry`, `retry-after` for status 503, and the error's own headers, which replace
        others of the same name."""
        # Without x-should-retry, OpenAI's clients repeat requests that got 409 or 5xx, and triple the work of a load that cannot succeed.
        wait = {"retry-after": "1"} if self.kind.status == 503 else {}
        return {"x-should-retry": "true" if self.kind.retry else "false", **wait, **self.headers}


ErrorShape = Callable[[ApiError], bytes]  # encodes an error as JSON in the shape of one API


def of_request(error: RequestError) -> ApiError:
    """Return the error that the client gets for a request that failed in the worker, or that no worker could take. Whole seconds of
    `retry_after_s`, rounded up, become the header `retry-after`."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    return ApiError(BY_CODE[error.code], error.message, headers=headers)


def as_markdown() -> str:
    """Return the page `docs/errors.md`."""
    lines = [
        "# Errors",
        "",
        "Errors of paths below `/v1/messages` have the envelope of Anthropic, those of paths below `/api` that of Ollama;",
        "both envelopes have `code` and `param` added. Errors of all other paths have the envelope of the OpenAI API:",
        "",
        "```json",
        '{"error": {"message": "...", "type": "invalid_request_error", "param": "top_p", "code": "invalid_value"}}',
        "```",
        "",
        "`code` is stable; `message` is for people. The header `x-should-retry` says whether the same request can succeed",
        "later. The column `type` has the type of the OpenAI envelope; Anthropic's envelope has Anthropic's types instead.",
        "",
        "After a stream has begun, the status is 200 already. An error then arrives as an event with the same envelope, and",
        "`[DONE]` follows if the API's streams end with it. `/v1/responses` sends the event `response.failed` instead.",
        "",
        "| Status | `code` | `type` | Meaning | Remedy | Retry |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {kind.status} | `{kind.code}` | `{kind.type}` | {kind.meaning} | {kind.remedy} | {'yes' if kind.retry else 'no'} |"
        for kind in sorted(TABLE, key=lambda kind: kind.status)
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")
