"""Define the body of vLLM's `/inference/v1/generate`, and convert it to a completion."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from server.api.request.fields import Options
from server.api.request.schema import Alternatives, CompletionBody, Int, Label, SamplingBody, StreamOptions, StructuredOutputs, TokenIds

# Fields of vLLM's SamplingParams about texts, which this answer does not have, and about vLLM's own objects. vLLM's clients send all of
# these fields.
NO_EFFECT = ("detokenize", "spaces_between_special_tokens", "output_kind", "skip_clone", "flat_logprobs")


class TokenSampling(SamplingBody):
    """vLLM's SamplingParams, as JSON."""

    n: Int | None = Field(default=None, ge=1)
    max_tokens: Int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def unknown(self) -> Mapping[str, object]:
        """The unknown fields, without those in NO_EFFECT."""
        return {name: value for name, value in super().unknown.items() if name not in NO_EFFECT}


class GenerateTokensBody(Options):
    """The body of /inference/v1/generate."""

    token_ids: TokenIds = Field(min_length=1)
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: Label | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = Field(default=None, max_length=128, pattern=r"^[\x21-\x7e]+$")
    cache_salt: Label | None = None
    priority: Int | None = Field(default=None, ge=-(2**31), lt=2**31)

    def completion(self, most: int | None) -> CompletionBody:
        """Convert the request to a completion whose prompt is `token_ids`. `most` is the model's default limit on the tokens of an answer;
        if it is None, an answer may fill the context, as in vLLM. `cache_salt` and `priority` of the request take precedence over those of
        its `sampling_params`."""
        params = self.sampling_params
        sampling = {name: getattr(params, name) for name in SamplingBody.model_fields}
        sampling["cache_salt"] = params.cache_salt if self.cache_salt is None else self.cache_salt
        sampling["priority"] = params.priority if self.priority is None else self.priority
        return CompletionBody.model_construct(
            **sampling,
            prompt=self.token_ids,
            model=self.model,
            stream=self.stream,
            stream_options=self.stream_options,
            max_tokens=params.max_tokens or most or -1,
            n=params.n,
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
            structured_outputs=params.structured_outputs,
            request_id=self.request_id,
        )
