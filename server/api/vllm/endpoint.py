"""POST /inference/v1/generate, as in vLLM: tokens in, tokens out. Routers and trainers that tokenise texts themselves use this endpoint."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.api.answer.generate import Generation
from server.api.answer.respond import respond, response_headers
from server.api.context import Context, caller
from server.api.openai.completions import plan_completion
from server.api.request.limits import check_sizes
from server.api.request.prepare import capped_header, check_ids, off_loop
from server.api.request.words import in_words
from server.api.routes import gives, new_router
from server.api.vllm.answer import GeneratedTokens, TokensAnswer, TokensChunk
from server.api.vllm.body import GenerateTokensBody, TokenSampling

OF_SAMPLING = TokenSampling.model_fields.keys() - GenerateTokensBody.model_fields.keys()
NAMES = {"prompt": "token_ids", **{name: f"sampling_params.{name}" for name in OF_SAMPLING}}  # field of a completion -> field of this API


def router(context: Context) -> APIRouter:
    routes = new_router("vLLM")

    @routes.post("/inference/v1/generate", responses=gives(GeneratedTokens, event=TokensChunk))
    async def generate(request: Request, body: GenerateTokensBody) -> Response:
        """Continue token ids with token ids."""
        model, loaded, ignored = context.begin(request, body, body.model)
        who, series = caller(request), context.metrics_of(model.spec.name)

        def prepare() -> tuple[TokensAnswer, dict[str, str]]:
            check_sizes(body)
            check_ids(body.token_ids, loaded.tokenizer, "token_ids")
            completion = body.completion(loaded.defaults.max_tokens)
            with in_words(NAMES):
                (job,) = plan_completion(completion, model, loaded, who, context.settings)
            answer = TokensAnswer(completion, Generation(loaded, job, series, who), job.submit.num_choices, model, loaded)
            return answer, capped_header(body.sampling_params.max_tokens, job, name="sampling_params.max_tokens")

        answer, capped = await off_loop(who.num_body_bytes, prepare)
        headers = response_headers(loaded, ignored) | capped
        return await respond(request, answer, headers, stream=bool(body.stream), settings=context.settings)

    return routes
