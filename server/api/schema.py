"""The bodies of the OpenAI endpoints: which fields there are, and which values each may have on its own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field

from server.api.fields import Options

TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
Logit = Annotated[float, Field(ge=-100, le=100)]
Alternatives = Annotated[int, Field(ge=0, le=20)]
JsonObject = dict[str, Any]


class StreamOptions(Options):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None  # no event is padded
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Options):
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class StructureTag(Options):
    begin: str = Field(min_length=1)
    schema_: JsonObject = Field(alias="schema")
    end: str


class ResponseFormat(Options):
    type: Literal["text", "json_object", "json_schema", "regex", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonObject | bool | str | None = Field(default=None, alias="schema")  # json_object with a schema
    value: JsonObject | str | None = None  # regex, or a schema
    regex_schema: str | None = None
    structures: list[StructureTag] | None = Field(default=None, min_length=1, max_length=128)
    triggers: list[str] | None = Field(default=None, min_length=1, max_length=128)


class StructuredOutputs(Options):
    json_: JsonObject | bool | str | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class GenerationBody(Options):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    n: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(
        default=None, gt=0, le=100, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: dict[str, Logit] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = Field(
        default=None, validation_alias=AliasChoices("include_stop_str_in_output", "no_stop_trim")
    )
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31, validation_alias=AliasChoices("min_tokens", "min_new_tokens"))
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Alternatives | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonObject | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: JsonObject | bool | str | None = None
    regex: str | None = None
    grammar: str | None = Field(default=None, validation_alias=AliasChoices("grammar", "ebnf"))
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = None
    timeout: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(
        default=None, max_length=128, pattern=r"^[\x21-\x7e]+$", validation_alias=AliasChoices("request_id", "rid")
    )

    # These name the caller or hint at a cache; no answer depends on them.
    user: str | None = None
    metadata: JsonObject | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonObject | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class Message(Options):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[JsonObject] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(Options):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Options):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Options):
    name: str


class NamedTool(Options):
    type: Literal["function"]
    function: FunctionName


class ToolsAllowed(Options):
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class AllowedTools(Options):
    type: Literal["allowed_tools"]
    allowed_tools: ToolsAllowed


class ChatBody(GenerationBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[JsonObject] | None = None
    echo: bool | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, lt=2**31, validation_alias=AliasChoices("thinking_token_budget", "reasoning_budget")
    )


class CompletionBody(GenerationBody):
    prompt: str | TokenIds | list[str] | list[TokenIds]
    logprobs: Alternatives | None = None
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1)


class EmbeddingBody(Options):
    model: str | None = None
    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=1)
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    timeout: float | None = Field(default=None, gt=0)
    user: str | None = None


class TokenizeBody(Options):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Options):
    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None
