"""Define the bodies of Ollama's API, and convert them to conversations and completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from server.api.request.fields import Options
from server.api.request.schema import (
    Alternatives,
    CalledFunction,
    ChatBody,
    CompletionBody,
    ContentPart,
    Effort,
    GivenImage,
    GivenMessage,
    Int,
    JsonObject,
    JsonSchemaFormat,
    Label,
    Message,
    MessageCall,
    ResponseFormat,
    SamplingBody,
    Text,
    Tools,
    joined,
)
from server.errors import UNSUPPORTED_CONTENT, UNSUPPORTED_FIELD, ApiError

Images = Annotated[list[Text], Field(max_length=64, fail_fast=True)]
KeepAlive = Label | Int | float
NAMES = {  # fields of chat, completions and embeddings, and their names in this API
    **{name: f"options.{name}" for name in SamplingBody.model_fields},
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
}
OF_PROMPT = {**NAMES, "messages": "prompt", "prompt.content": "prompt", "system.content": "system"}  # the same for /api/generate
NO_TIME = re.compile(r"0+(\.0*)?([num\u00b5]?s|m|h)?")  # matches a keep_alive of 0, with or without a unit of time


class OllamaOptions(SamplingBody):
    """The sampling parameters of a request."""

    num_predict: Int | None = Field(default=None, ge=-2, le=2**31 - 1)  # 0 or below: generate until the context is full

    # No effect: the fields below say how to run the model, which is decided when it is loaded.
    num_ctx: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    # No effect: the context is never shifted, and penalties apply to the whole text, line breaks included.
    num_keep: Any = None
    penalize_newline: Any = None
    repeat_last_n: Any = None


class OllamaCalled(CalledFunction):
    """A call of a function, in the shape that earlier answers have given it."""

    index: Int | None = None  # no effect: the order of the calls says the same


class OllamaCall(Options):
    """A call in a message of the assistant."""

    id: Label | None = None
    type: Literal["function"] | None = None
    index: Int | None = None  # no effect: some clients send this field, because OpenAI's API has it
    function: OllamaCalled


class OllamaMessage(Options):
    """A message of a conversation. `images` are in base64."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=4096, fail_fast=True)] | None = None
    tool_name: Label | None = None
    tool_call_id: Label | None = None


class OllamaBody(Options):
    """The fields that chat and generate share."""

    model: Label
    stream: bool | None = None  # None: true
    format: Literal["", "json"] | JsonObject | None = None  # a JSON schema, or "json" for any JSON object
    options: OllamaOptions | None = None
    think: bool | Effort | None = None  # None: the model's default
    keep_alive: KeepAlive | None = None  # 0: put the model to sleep after the answer; other values: no effect
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None  # no effect without `logprobs`

    @property
    def lets_go(self) -> bool:
        """Whether `keep_alive` asks to unload the model."""
        return self.keep_alive is not None and NO_TIME.fullmatch(str(self.keep_alive)) is not None

    @property
    def ineffective(self) -> list[str]:
        """Return those of the request's options that would change Ollama's answer but have no effect here."""
        return ["options.repeat_last_n"] if self.options is not None and self.options.repeat_last_n is not None else []

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed, which is the default."""
        return self.stream is not False

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of this request that ChatBody and CompletionBody share: the model, the sampling parameters, the format and the maximum
        length of the answer, and whether the answer is streamed."""
        options = self.options or OllamaOptions()
        form = None
        if self.format == "json":
            form = ResponseFormat(type="json_object")
        elif isinstance(self.format, dict):
            form = ResponseFormat.model_construct(type="json_schema", json_schema=JsonSchemaFormat.model_construct(schema_=self.format))
        wanted = options.num_predict if options.num_predict is None or options.num_predict > 0 else -1
        sampling = {name: getattr(options, name) for name in SamplingBody.model_fields}
        return {**sampling, "model": self.model, "response_format": form, "max_tokens": wanted, "stream": self.streams}


class OllamaChatBody(OllamaBody):
    """The body of /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=16384, fail_fast=True)] | None = None
    tools: Tools | None = None


class OllamaGenerateBody(OllamaBody):
    """The body of /api/generate."""

    prompt: Text | None = None
    suffix: Text | None = None
    system: Text | None = None
    images: Images | None = None
    raw: bool | None = None  # apply no chat template


class OllamaEmbedBody(Options):
    """The body of /api/embed."""

    model: Label
    input: Text | Annotated[list[Text], Field(max_length=2048, fail_fast=True)]
    truncate: bool | None = None  # None: true
    dimensions: Int | None = Field(default=None, ge=1)
    options: OllamaOptions | None = None  # no effect
    keep_alive: KeepAlive | None = None  # no effect


class OllamaEmbeddingsBody(Options):
    """The body of /api/embeddings."""

    model: Label
    prompt: Text = ""
    options: OllamaOptions | None = None  # no effect
    keep_alive: KeepAlive | None = None  # no effect


class OllamaShowBody(Options):
    """The body of /api/show."""

    model: Label = Field(validation_alias=AliasChoices("model", "name"))
    verbose: bool | None = None  # no effect


def chat_of(body: OllamaChatBody) -> ChatBody:
    """Convert a conversation."""
    messages: list[Message] = [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages or ())]
    return _chat(body, messages, body.tools)


def chat_of_prompt(body: OllamaGenerateBody) -> ChatBody:
    """Convert a prompt to a conversation, because Ollama applies the chat template to prompts too."""
    system = [GivenMessage(role="system", content=body.system, place="system")] if body.system else []
    asked = GivenMessage(role="user", content=_content(body.prompt or "", body.images, "images"), place="prompt")
    return _chat(body, [*system, asked], None)


def completion_of(body: OllamaGenerateBody, most: int | None) -> CompletionBody:
    """Convert a prompt to a completion, which uses no chat template. `most` is the model's default limit on the tokens of an answer; None:
    the context is the limit. Raise ApiError for images, and for a system message unless the request is `raw`: raw requests ignore system
    messages."""
    if body.images:
        message = f"images has {len(body.images)} images, and no chat template is applied to this prompt; ask /api/chat"
        raise ApiError(UNSUPPORTED_CONTENT, message, param="images")
    if body.system and not body.raw:
        raise ApiError(UNSUPPORTED_FIELD, "no chat template is applied to this prompt; put the text of system into it", param="system")
    settings = body.settings
    settings["max_tokens"] = (most or -1) if settings["max_tokens"] is None else settings["max_tokens"]
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return CompletionBody.model_construct(**settings, prompt=body.prompt or "", suffix=body.suffix, logprobs=logprobs)


def _chat(body: OllamaBody, messages: list[Message], tools: Tools | None) -> ChatBody:
    """Return the chat request with the settings of `body`."""
    thinks, effort = (body.think, None) if isinstance(body.think, bool | None) else (None, body.think)
    return ChatBody.model_construct(
        **body.settings,
        messages=messages,
        tools=tools,
        enable_thinking=thinks,
        reasoning_effort=effort,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
    )


def _message(message: OllamaMessage, where: str) -> Message:
    """Convert one message, whose path in the request is `where`."""
    content = _content(message.content or "", message.images, f"{where}.images")
    made = GivenMessage(role=message.role, content=content, reasoning_content=message.thinking, name=message.tool_name, place=where)
    made.tool_call_id = message.tool_call_id
    made.tool_calls = [MessageCall(id=call.id, type="function", function=call.function) for call in message.tool_calls or ()] or None
    return made


def _content(text: str, images: Images | None, where: str) -> str | list[ContentPart]:
    """Return the content of a message, in which images come before the text, as Ollama writes them. Images are base64, or whole data: URLs,
    which browsers send. Errors about an image name its path in the request: `where` with the image's index."""
    urls = (data if data.startswith("data:") else f"data:image;base64,{data}" for data in images or ())
    given = (GivenImage(image_url=url, place=f"{where}[{index}]") for index, url in enumerate(urls))
    return joined([*given, ContentPart(type="text", text=text)])
