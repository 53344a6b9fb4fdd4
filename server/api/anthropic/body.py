"""Define the bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from server.api.request.fields import FOREIGN, KNOWN, Foreign, Options, foreign_unless, only_type, without_off
from server.api.request.schema import AS_TEXT, IN_PARTS, Choices, Effort, Int, JsonObject, Label, Seed, Text, text_unless

ToolName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]
BLOCK_TYPES = ("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result")


class ImageSource(Options):
    """An image: in base64 in `data`, or by its address in `url`."""

    type: Label
    media_type: Label | None = None
    data: Text | None = None
    url: Text | None = None


class ContentBlock(Options):
    """A block of content. `type` decides which of the other fields the block has."""

    type: Label
    text: Text | None = None
    thinking: Text | None = None
    signature: Text | None = None  # accepted and not checked, because this server does not sign thoughts
    data: Text | None = None  # encrypted thoughts, which are ignored
    source: ImageSource | None = None
    id: Label | None = None
    name: Label | None = None
    input: JsonObject | None = None
    tool_use_id: Label | None = None
    content: Text | ContentBlocks | None = None
    is_error: bool | None = None
    citations: Any = None  # accepted because blocks of earlier answers contain them
    cache_control: JsonObject | None = None  # no effect: the prefix cache finds shared prefixes by itself
    caller: JsonObject | None = None  # no effect

    @model_validator(mode="before")
    @classmethod
    def _only_type(cls, value: object) -> object:
        return only_type(value, BLOCK_TYPES)


ContentBlocks = Annotated[list[ContentBlock], Field(max_length=4096, fail_fast=True)]


class AnthropicMessage(Options):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[Text, Tag(AS_TEXT)] | Annotated[ContentBlocks, Tag(IN_PARTS)], text_unless(list)]


class AnthropicTool(Options):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None  # None: custom
    name: ToolName
    description: Text | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: JsonObject | None = None
    eager_input_streaming: bool | None = None  # no effect: a stream always has arguments as soon as the model writes them


AnyAnthropicTool = Annotated[Annotated[AnthropicTool, Tag(KNOWN)] | Annotated[Foreign, Tag(FOREIGN)], foreign_unless("custom")]


class AnthropicToolChoice(Options):
    """Whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Label | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Options):
    """Whether the model thinks, and with how many tokens."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]  # between_tools, too, turns thoughts off
    budget_tokens: Int | None = Field(default=None, ge=1, lt=2**31)
    display: Literal["summarized", "omitted"] | None = None  # omitted: leave out the text of thoughts; otherwise return all of it


class JsonOutput(Options):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Options):
    """How much the model is to think, and the form of its answer."""

    effort: Effort | None = None
    format: JsonOutput | None = None


class RequestMetadata(Options):
    user_id: Label | None = None


class ContextEdit(Options):
    type: Literal["clear_thinking_20251015"]  # no effect: the chat template decides which earlier thoughts the model reads
    keep: Any = None


class ContextManagement(Options):
    """Which parts of earlier turns the prompt is to leave out."""

    edits: Annotated[list[ContextEdit], Field(max_length=64, fail_fast=True)] | None = None


class PromptBody(Options):
    """The fields that make up the prompt."""

    model: Label | None = None
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=16384, fail_fast=True)
    system: Text | ContentBlocks | None = None
    tools: Annotated[list[AnyAnthropicTool], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutput | None = None  # an earlier name of output_config.format
    context_management: ContextManagement | None = None

    # The fields below are hints about caching, the speed and the caller; the answer does not depend on them.
    cache_control: JsonObject | None = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: Label | None = None
    workspace_id: Label | None = None


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: Int = Field(ge=0, le=2**31 - 1)  # 0: only compute the prompt, so that later requests find it in the prefix cache
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Int | None = Field(default=None, ge=-1, lt=2**31)
    seed: Seed | None = None
    stop_sequences: Choices | None = None
    thread: JsonObject | None = None  # refused: a thread stands for earlier messages, which this server does not store

    # The fields below have no effect.
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Label | None = None
    diagnostics: JsonObject | None = None

    @property
    def unknown(self) -> Mapping[str, object]:
        """The unknown fields, without those of samplers that the request turns off."""
        return without_off(super().unknown, has_penalty=False)
