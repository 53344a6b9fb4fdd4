"""Define the bodies of the OpenAI endpoints, of embeddings and of /tokenize: their fields, and the values that each field accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from server.api.request.fields import FOREIGN, KNOWN, UNKNOWN_TYPE, Foreign, Options, foreign_unless, without_off
from server.http.json_scan import MAX_NUMBERS


def _integer(value: object) -> object:
    """Convert a float such as 20.0 to an integer, because JSON Schema accepts such a float as an integer. Return any other value as it
    is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integer)]  # not for items of long lists: the validator runs for each item, which is slow
# Set the limits on the integer type itself: in error messages, pydantic rounds limits of more than 64 bits on a union such as `Int | None`.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64), BeforeValidator(_integer)]

# Every text, list and object has a limit. A list reports only its first error, because collecting a million errors takes seconds.
MAX_TEXT_CHARS = 8 << 20  # limit on every text; smaller limits, such as the context or max_schema_bytes, are checked later
MAX_INPUT_PARTS = 2048  # most texts and images in a request for embeddings
MOST_BIASES = 1024
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_NUMBERS, fail_fast=True)]
FewTokenIds = Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)]
Logit = Annotated[float, Field(ge=-100, le=100)]
Kept = Literal[-1] | Annotated[Int, Field(ge=1)]  # tokens of a prompt to keep; -1: as many as fit
Detail = Literal["auto", "low", "high", "original"]  # how finely the model sees an image; only "low" has an effect
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Alternatives = Annotated[Int, Field(ge=0, le=20)]  # most probable tokens to report beside each token
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
Label = Annotated[str, Field(max_length=1024)]
Texts = Annotated[list[Text], Field(max_length=2048, fail_fast=True)]
JsonObject = Annotated[dict[str, Any], Field(max_length=4096)]
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")
IMAGE_PART, ITEM_IMAGE = "image_url", "input_image"  # types of a part with an image: in chat, and in /v1/responses
IMAGE_PARTS = (IMAGE_PART, ITEM_IMAGE)
AUDIO_PART, AUDIO_URL_PART = "input_audio", "audio_url"  # parts with a recording: a file, as in OpenAI's APIs, or a URL, as in vLLM's
AUDIO_PARTS = (AUDIO_PART, AUDIO_URL_PART)
VIDEO_PARTS = ("video_url", "input_video", "video")  # parts with a video in other servers' APIs; no model of this server reads videos
MEDIA_PARTS = (IMAGE_PART, *AUDIO_PARTS)  # parts with an image or a recording
JsonObjects = Annotated[list[JsonObject], Field(max_length=4096, fail_fast=True)]
Prompts = Text | TokenIds | Texts | Annotated[list[TokenIds], Field(max_length=2048, fail_fast=True)]
Choices = Annotated[list[Text], Field(max_length=16384, fail_fast=True)]


class StreamOptions(Options):
    """Options of a stream: they decide which chunks report the usage."""

    include_usage: bool | None = None  # true: a last chunk reports the usage
    include_obfuscation: bool | None = None  # no effect: events are never padded
    continuous_usage_stats: bool | None = None  # true: every chunk reports the usage, and a last chunk too


class PromptCacheOptions(Options):
    """Options of a vendor's prompt cache. Neither field has an effect: the prefix cache finds shared prefixes by itself."""

    mode: Label | None = None
    ttl: Label | None = None


class JsonSchemaFormat(Options):
    """A JSON schema that the answer must match."""

    name: Label | None = None
    description: Text | None = None
    schema_: JsonObject | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class StructureTag(Options):
    """A constrained section of an answer: see `Structure` in `server/text/grammar.py`."""

    begin: Label = Field(min_length=1)
    schema_: JsonObject = Field(alias="schema")
    end: Label


class ResponseFormat(Options):
    """The format of an answer. `type` decides which of the other fields the format needs."""

    type: Literal["text", "json_object", "json_schema", "regex", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonObject | bool | Text | None = Field(default=None, alias="schema")  # a schema, if json_schema is absent
    value: JsonObject | Text | None = None  # a regex, or a schema
    regex_schema: Text | None = None
    structures: list[StructureTag] | None = Field(default=None, min_length=1, max_length=128, fail_fast=True)
    triggers: list[Label] | None = Field(default=None, min_length=1, max_length=128, fail_fast=True)


class StructuredOutputs(Options):
    """A constraint in vLLM's shape. At most one of the fields may be given."""

    json_: JsonObject | bool | Text | None = Field(default=None, alias="json")
    json_object: bool | None = None  # true: any JSON object
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None


class SamplingBody(Options):
    """The fields that the generating APIs of OpenAI, Ollama, llama.cpp and vLLM share: sampling parameters, and fields about the caller.
    Anthropic's API has fields of its own."""

    temperature: float | None = Field(default=None, ge=0, le=100)
    do_sample: bool | None = None  # False: the temperature is 0
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: Int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(
        default=None, ge=0.01, le=100, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: dict[Annotated[str, Field(max_length=32)], Logit] | None = Field(default=None, max_length=MOST_BIASES)
    seed: Seed | None = None
    stop: Text | Choices | None = None
    stop_token_ids: FewTokenIds | None = None
    # true: the answer ends with the stop string; otherwise before it
    include_stop_str_in_output: bool | None = Field(
        default=None, validation_alias=AliasChoices("include_stop_str_in_output", "no_stop_trim")
    )
    ignore_eos: bool | None = None  # true: the model's end-of-text tokens do not end the answer
    min_tokens: Int | None = Field(default=None, ge=0, lt=2**31, validation_alias=AliasChoices("min_tokens", "min_new_tokens"))
    skip_special_tokens: bool | None = None  # False: the answer shows all special tokens
    bad_words: list[Label] | None = Field(default=None, max_length=1024, fail_fast=True)
    allowed_token_ids: TokenIds | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None  # raw: before penalties and samplers; None: raw
    truncate_prompt_tokens: Kept | None = None
    truncation_side: Literal["left", "right"] | None = None  # side at which tokens are removed; None: left
    priority: Int | None = Field(default=None, ge=-(2**31), lt=2**31)
    cache_salt: Label | None = None  # only requests with the same salt reuse each other's cached state
    timeout: float | None = Field(default=None, gt=0)

    # These are hints about the caller and about caching; the model's answer does not depend on them. Answers of /v1/responses repeat some
    # of these fields.
    user: Label | None = None
    metadata: JsonObject | None = None
    service_tier: Label | None = None
    prompt_cache_key: Label | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Label | None = None
    safety_identifier: Label | None = None

    @property
    def unknown(self) -> Mapping[str, object]:
        """The unknown fields, without those that belong to an option which is turned off."""
        return without_off(super().unknown, has_penalty=self.has_penalty)

    @property
    def has_penalty(self) -> bool:
        """Whether the request penalises tokens."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty not in (None, 1))


class GenerationBody(SamplingBody):
    """The fields that chat and completions share."""

    model: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = Field(
        default=None,
        ge=-1,  # -1: as many as fit
        le=2**31 - 1,
        validation_alias=AliasChoices("max_tokens", "max_new_tokens", "n_predict", "num_predict"),
    )
    n: Int | None = Field(default=None, ge=1, validation_alias=AliasChoices("n", "n_cmpl"))
    prompt_logprobs: Alternatives | None = None
    return_token_ids: bool | None = None  # true: add the token ids of prompt and answer
    return_tokens_as_token_ids: bool | None = None  # true: log-probabilities name tokens by their ids instead of their texts
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # The next seven fields set constraints by the names of earlier versions of vLLM, of SGLang and of llama.cpp.
    guided_json: JsonObject | bool | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    json_schema: JsonObject | bool | Text | None = None
    regex: Text | None = None
    grammar: Text | None = Field(default=None, validation_alias=AliasChoices("grammar", "ebnf"))
    # whether the tokenizer puts its special tokens around the prompt; None: yes for completions, no for chat, whose template writes them
    add_special_tokens: bool | None = None
    request_id: str | None = Field(
        default=None, max_length=128, pattern=r"^[\x21-\x7e]+$", validation_alias=AliasChoices("request_id", "rid")
    )
    store: bool | None = None  # no effect: answers of chat and completions are not stored


AS_TEXT, IN_PARTS = "as a text", "in parts"  # tags of a union; error paths leave out tags that are no identifiers


def text_unless(*kinds: type) -> Discriminator:
    """Return the discriminator of a union of a text and another member, whose values have the types `kinds`. An error about a value of
    these types then names the fault inside the value, instead of stating only that it is no text."""
    return Discriminator(lambda value: IN_PARTS if isinstance(value, kinds) else AS_TEXT)


class ImageUrl(Options):
    url: Text
    detail: Detail | None = None


class AudioUrl(Options):
    url: Text


class InputAudio(Options):
    """A recording."""

    data: Text  # a file in base64
    format: Label | None = None  # no effect: the first bytes of the file tell its format


class ContentPart(Options):
    """A part of a message's content. `type` decides which of the other fields the part has."""

    type: Label
    text: Text | None = None
    refusal: Text | None = None
    image_url: Annotated[Annotated[Text, Tag(AS_TEXT)] | Annotated[ImageUrl, Tag(IN_PARTS)], text_unless(dict, ImageUrl)] | None = None
    input_audio: InputAudio | None = None
    audio_url: Annotated[Annotated[Text, Tag(AS_TEXT)] | Annotated[AudioUrl, Tag(IN_PARTS)], text_unless(dict, AudioUrl)] | None = None

    @property
    def unknown(self) -> Mapping[str, object]:
        """The unknown fields of a part. A part of an unknown type is refused as a whole, so no field is reported."""
        return super().unknown if self.type in (*TEXT_PARTS, *IMAGE_PARTS, *AUDIO_PARTS) else {}


class GivenImage(ContentPart):
    """An image of another API's request, converted to a part of a chat message. No body is validated as this class."""

    type: Label = IMAGE_PART
    place: str  # path of the image in that request
    detail: str | None = None


class GivenAudio(ContentPart):
    """A recording of another API's request, converted to a part of a chat message. No body is validated as this class."""

    type: Label = AUDIO_PART
    place: str  # path of the recording in that request


def joined(parts: Sequence[ContentPart]) -> str | list[ContentPart]:
    """Join parts to the content of a message: one text if all parts are texts, otherwise a list."""
    if all(type(part) is ContentPart and part.text is not None for part in parts):
        return "".join(part.text or "" for part in parts)
    return [*parts]


ContentParts = Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)]


class CalledFunction(Options):
    """A function that the model has called."""

    name: Label
    arguments: Text | JsonObject | None = None


class MessageCall(Options):
    """A call in a message."""

    id: Label | None = None
    type: Literal["function"] | None = None
    index: Int | None = None
    function: CalledFunction


class Message(Options):
    """A message of a conversation."""

    role: str = Field(max_length=64, pattern=r"^\w[\w.-]*$")  # any role is accepted: the template decides what it means
    content: Annotated[Annotated[Text, Tag(AS_TEXT)] | Annotated[ContentParts, Tag(IN_PARTS)], text_unless(list)] | None = None
    name: Label | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=4096, fail_fast=True)] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: Label | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # another name of reasoning_content, which takes precedence; answers have both


class GivenMessage(Message):
    """A message of another API's request, converted to one of chat. No body is validated as this class."""

    place: str  # path of the message in that request


FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]


class FunctionDefinition(Options):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Options):
    type: Literal["function"]
    function: FunctionDefinition


AnyTool = Annotated[Annotated[Tool, Tag(KNOWN)] | Annotated[Foreign, Tag(FOREIGN)], foreign_unless("function")]
Tools = Annotated[list[AnyTool], Field(max_length=128, fail_fast=True)]


def functions_among(tools: Sequence[Tool | Foreign] | None) -> list[Tool]:
    """Return the tools that are functions. Only these are offered to the model."""
    return [tool for tool in tools or () if isinstance(tool, Tool)]


class NamedFunction(Options):
    name: Label


class NamedTool(Options):
    """The choice of a function by its name."""

    type: Literal["function"]
    function: NamedFunction


def of_type(*known: str) -> BeforeValidator:
    """Return a validator that refuses an object whose `type` is not one of `known`, before pydantic tries the members of a union."""

    def require_type(value: object) -> object:
        found = cast("dict[str, object]", value).get("type") if isinstance(value, dict) else None
        if isinstance(found, str) and found not in known:
            raise PydanticCustomError(UNKNOWN_TYPE, "{found} is not one of {known}", {"found": found[:40], "known": ", ".join(known)})
        return value

    return BeforeValidator(require_type)


class ToolsAllowed(Options):
    """The tools that the model may use. `mode` decides whether the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: list[Annotated[Annotated[NamedTool, Tag(KNOWN)] | Annotated[Foreign, Tag(FOREIGN)], foreign_unless("function")]] = Field(
        min_length=1, max_length=128, fail_fast=True
    )


class AllowedTools(Options):
    """The tool choice that allows only some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolsAllowed


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=16384, fail_fast=True)
    max_completion_tokens: Int | None = Field(default=None, ge=1, le=2**31 - 1)  # takes precedence over max_tokens
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Tools | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | AllowedTools | None, of_type("function", "allowed_tools")] = (
        None
    )
    parallel_tool_calls: bool | None = None  # False: at most one call
    functions: Annotated[list[FunctionDefinition], Field(max_length=128, fail_fast=True)] | None = None  # earlier name of tools
    function_call: Literal["none", "auto"] | NamedFunction | None = None  # earlier name of tool_choice
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect: models have no such setting
    prediction: JsonObject | None = None  # no effect: a prediction can only make an answer faster
    modalities: list[Literal["text"]] | None = Field(default=None, max_length=16, fail_fast=True)
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None  # False: leave the thoughts out of the answer
    separate_reasoning: bool | None = None  # False: thoughts stay in the content
    chat_template_kwargs: JsonObject | None = None
    # whether the prompt ends with the beginning of an answer; None: yes, unless continue_final_message is true
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # true: the answer continues the last message, which is the assistant's
    documents: JsonObjects | None = None  # a variable of the template
    echo: bool | None = None  # true: the answer begins with the text of the last message, which is the assistant's
    enable_thinking: bool | None = Field(default=None, validation_alias=AliasChoices("enable_thinking", "think"))
    thinking_token_budget: Int | None = Field(
        default=None,
        ge=-1,  # -1: no limit
        lt=2**31,
        validation_alias=AliasChoices("thinking_token_budget", "reasoning_budget", "reasoning_budget_tokens"),
    )


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Prompts
    logprobs: Alternatives | None = None  # None: report no log-probabilities
    suffix: Text | None = None  # text after the answer, for models that can fill in the middle
    echo: bool | None = None  # true: the answer begins with the prompt
    best_of: Int | None = Field(default=None, ge=1)  # choices to generate for a prompt, of which the best n are returned; None: n


class InputPart(Options):
    """A text or an image to embed. Exactly one of the fields must be given."""

    text: Text | None = None
    image: Text | None = None  # a URL, or a file in base64


def _are_parts(value: object) -> str:
    """Return the tag of an input: AS_TEXT for texts and token ids, IN_PARTS for a list with objects. Only the first MAX_INPUT_PARTS + 1
    items are looked at, because lists of token ids are long."""
    items = cast("list[object]", value)[: MAX_INPUT_PARTS + 1] if isinstance(value, list) else []
    return IN_PARTS if any(isinstance(item, (dict, InputPart)) for item in items) else AS_TEXT


InputParts = Annotated[
    list[Annotated[Annotated[Text, Tag(AS_TEXT)] | Annotated[InputPart, Tag(IN_PARTS)], text_unless(dict, InputPart)]],
    Field(max_length=MAX_INPUT_PARTS, fail_fast=True),
]


class EmbeddingBody(Options, json_schema_extra={"anyOf": [{"required": ["input"]}, {"required": ["messages"]}]}):
    """The body of /v1/embeddings. It has `input` or `messages`."""

    model: Label | None = None
    input: Annotated[Annotated[Prompts, Tag(AS_TEXT)] | Annotated[InputParts, Tag(IN_PARTS)], Discriminator(_are_parts)] | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=16384, fail_fast=True)
    add_generation_prompt: bool | None = None  # whether the rendered messages end with the beginning of an answer; None: no
    chat_template_kwargs: JsonObject | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = Field(default=None, ge=1)
    # whether to scale vectors to length 1; None: the model's default
    normalize: bool | None = Field(default=None, validation_alias=AliasChoices("normalize", "use_activation"))
    prompt_name: Label | None = None  # None: the model's default prompt; empty: no prompt
    # chooses the prompt by the kind of the texts; takes precedence over prompt_name
    input_type: Label | None = Field(default=None, validation_alias=AliasChoices("input_type", "task"))
    truncate_prompt_tokens: Kept | None = None
    truncation_side: Literal["left", "right"] | None = None  # side at which tokens are removed; None: right
    add_special_tokens: bool | None = None  # None: true for input, false for messages, whose template writes them
    timeout: float | None = Field(default=None, gt=0)
    user: Label | None = None


class TokenizeBody(Options):
    """The body of /tokenize. It has `prompt`, `messages` or `content`."""

    model: Label | None = None
    prompt: Text | None = None
    content: Text | None = None  # the text in llama.cpp's variant of this request, which has a different answer
    add_special: bool | None = None  # only with content; true: put the tokenizer's special tokens around the text
    parse_special: bool | None = None  # only with content; False is refused: the text of a special token always becomes that token
    with_pieces: bool | None = None  # only with content; true: add the texts of the tokens
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=16384, fail_fast=True)
    tools: Tools | None = None
    add_special_tokens: bool | None = None  # None: true for prompt, false for messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None  # only with prompt or messages; true: add the texts of the tokens


class DetokenizeBody(Options):
    """The body of /detokenize."""

    model: Label | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None  # true: leave special tokens out of the text
