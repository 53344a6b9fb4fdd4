"""Define the bodies of llama.cpp's API, and convert them to completions."""

from __future__ import annotations

from typing import Annotated, cast

from pydantic import AliasChoices, Discriminator, Field, Tag

from server.api.request.fields import Options
from server.api.request.prepare import invalid
from server.api.request.schema import (
    AS_TEXT,
    MOST_BIASES,
    Alternatives,
    CompletionBody,
    Int,
    JsonObject,
    Label,
    Prompts,
    SamplingBody,
    Text,
    TokenIds,
)
from server.interfaces import Tokenizer

NEVER = -100.0  # the lowest bias, which bans a token
NO_SEED = 2**32 - 1  # by this value, as by -1, llama.cpp's clients ask for a random seed
MOST_PROMPTS = 2048
# A token id or a text, and the bias of its tokens; false bans the tokens.
Bias = Annotated[list[Int | Label | float | bool], Field(min_length=2, max_length=2, fail_fast=True)]
Biases = (
    Annotated[list[Bias], Field(max_length=MOST_BIASES, fail_fast=True)]
    | Annotated[dict[Label, float | bool], Field(max_length=MOST_BIASES)]
)


class LlamaSampling(SamplingBody):
    """The fields that completions and infill requests share."""

    model: Label | None = None
    stream: bool | None = None
    # below 0: generate until the context is full
    n_predict: Int | None = Field(default=None, ge=-2, lt=2**31, validation_alias=AliasChoices("n_predict", "max_tokens"))
    n_cmpl: Int | None = Field(default=None, ge=1, validation_alias=AliasChoices("n_cmpl", "n"))
    n_probs: Alternatives | None = None  # how many of the most probable tokens to report beside each token; None or 0: no probabilities
    post_sampling_probs: bool | None = None  # true: report probabilities from after the samplers, not log-probabilities from before
    return_tokens: bool | None = None  # true: a whole answer has the token ids; events always have them
    grammar: Text | None = None
    json_schema: JsonObject | bool | None = None
    logit_bias: Biases | None = None  # type: ignore[assignment]  # llama.cpp accepts more types
    # milliseconds from a choice's first step until the choice ends, if it has a line feed; 0 or -1: no limit
    t_max_predict_ms: Int | None = Field(default=None, ge=-1, lt=2**53)
    # paths of the only fields that a whole answer, or the last event of a choice, returns; None or empty: all
    response_fields: Annotated[list[Label], Field(max_length=256, fail_fast=True)] | None = None
    samplers: Annotated[list[Label], Field(max_length=64, fail_fast=True)] | Label | None = None  # no effect: the order is fixed

    # The fields below are hints about caches, slots and time; the answer does not depend on them.
    cache_prompt: bool | None = None
    id_slot: Int | None = None
    n_cache_reuse: Int | None = None
    t_max_prompt_ms: Int | None = None

    def completion(self, prompt: object, tokenizer: Tokenizer, most: int | None) -> CompletionBody:
        """Convert the request to a CompletionBody with the prompts `prompt`. `most` is the model's default limit on the tokens of an
        answer; if it is None, an answer may fill the context. `n_predict` 0 only computes the prompt; this still takes a step. The answer
        omits the token that the step samples. Raise ApiError if a bias is not valid."""
        sampling = {name: getattr(self, name) for name in SamplingBody.model_fields}
        sampling["logit_bias"] = self._bias(tokenizer)
        sampling["seed"] = None if self.seed == NO_SEED else self.seed
        sampling["logprobs_mode"] = "processed_logprobs" if self.post_sampling_probs else self.logprobs_mode
        asked = self.n_predict if self.n_predict is not None else most or -1
        wanted = -1 if asked < 0 else max(1, asked)
        return CompletionBody.model_construct(
            **sampling,
            prompt=prompt,
            model=self.model,
            stream=self.stream,
            max_tokens=wanted,
            n=self.n_cmpl,
            logprobs=self.n_probs or None,
            grammar=self.grammar or None,
            json_schema=self.json_schema,
        )

    def _bias(self, tokenizer: Tokenizer) -> dict[str, float] | None:
        """Return the biases by token id, or None if the request has none. A text gives its bias to each of its tokens; of several biases of
        a token the last one counts. Raise ApiError if a bias is not valid, or if too many tokens have one."""
        if self.logit_bias is None:
            return None
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
        found: dict[str, float] = {}
        for index, (token, value) in enumerate(pairs):
            if isinstance(token, bool | float) or value is True or not isinstance(value, bool | int | float):
                where = f"logit_bias[{index}]"
                raise invalid(where, f"{where} is {[token, value]!r:.60}; expected a token id or a text, and a number or false")
            bias = NEVER if value is False else value
            if abs(bias) > -NEVER:
                raise invalid(f"logit_bias[{index}]", f"logit_bias[{index}] has the bias {bias!r:.20}; expected -100 to 100")
            is_id = isinstance(token, int) or (isinstance(self.logit_bias, dict) and token.isascii() and token.isdigit())
            ids = [token] if is_id else tokenizer.encode(str(token), False)
            found |= {str(token_id): float(bias) for token_id in ids}
        if len(found) > MOST_BIASES:
            raise invalid("logit_bias", f"logit_bias has {len(found)} tokens; expected at most {MOST_BIASES}")
        return found


class MediaPrompt(Options):
    """A prompt with files: a text that has a marker for each file."""

    prompt_string: Text
    multimodal_data: Annotated[list[Text], Field(max_length=64, fail_fast=True)] | None = None  # images and recordings in base64


OBJECT, OBJECTS = "an object", "a list with objects"  # tags of the kinds of prompts, with AS_TEXT


def _kind_of(prompt: object) -> str:
    """Return the tag of a prompt: OBJECT, OBJECTS, or AS_TEXT for texts and token ids. Only the first MOST_PROMPTS items of a list are
    looked at, because lists of token ids are long."""
    if isinstance(prompt, (dict, MediaPrompt)):
        return OBJECT
    items = cast("list[object]", prompt)[:MOST_PROMPTS] if isinstance(prompt, list) else []
    return OBJECTS if any(isinstance(item, (dict, MediaPrompt)) for item in items) else AS_TEXT


AnyPrompt = Annotated[Annotated[Text | TokenIds, Tag(AS_TEXT)] | Annotated[MediaPrompt, Tag(OBJECT)], Discriminator(_kind_of)]


class LlamaCompletionBody(LlamaSampling):
    """The body of /completion."""

    prompt: Annotated[
        Annotated[Prompts | Annotated[list[Text | TokenIds], Field(max_length=MOST_PROMPTS, fail_fast=True)], Tag(AS_TEXT)]
        | Annotated[MediaPrompt, Tag(OBJECT)]
        | Annotated[list[AnyPrompt], Field(max_length=MOST_PROMPTS, fail_fast=True), Tag(OBJECTS)],
        Discriminator(_kind_of),
    ]


class LlamaSnippet(Options):
    """A file that precedes the text to fill in."""

    filename: Label = ""
    text: Text


class LlamaInfillBody(LlamaSampling):
    """The body of /infill. The model writes the text between prefix and suffix."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[LlamaSnippet], Field(max_length=1024, fail_fast=True)] | None = None
    prompt: Text = ""  # the beginning of the text to fill in
