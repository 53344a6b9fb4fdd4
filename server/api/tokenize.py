"""POST /tokenize and /detokenize: text to ids and back, as the model does it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Response

from server.api.answers import Text, TokenIds
from server.api.chat import render_prompt
from server.api.context import Context
from server.api.fields import check_unknown, ignored_header
from server.api.prepare import check_ids, context_of, invalid, off_loop
from server.api.routes import gives, new_router
from server.api.schema import ChatBody, DetokenizeBody, TokenizeBody
from server.model import Loaded


def router(context: Context) -> APIRouter:
    routes = new_router("Text")
    registry, strict = context.registry, context.settings.strict

    @routes.post("/tokenize", responses=gives(TokenIds))
    @routes.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(body: TokenizeBody) -> Response:
        """The token ids of a text, or of a conversation."""
        ignored = check_unknown(body, strict=strict)
        _, loaded = registry.serve(body.model)
        text, special = await _text(body, loaded)
        tokenizer = loaded.tokenizer
        ids: Sequence[int] = await off_loop(len(text), lambda: tokenizer.encode(text, special))
        answer: TokenIds = {"tokens": ids, "count": len(ids), "max_model_len": context_of(loaded)}
        if body.return_token_strs:
            answer["token_strs"] = [
                tokenizer.token_bytes(i).decode(errors="replace") or tokenizer.decode([i], skip_special_tokens=False) for i in ids
            ]
        return Response(msgspec.json.encode(answer), headers=ignored_header(ignored), media_type="application/json")

    @routes.post("/detokenize", responses=gives(Text))
    @routes.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids, special tokens included unless told otherwise."""
        ignored = check_unknown(body, strict=strict)
        _, loaded = registry.serve(body.model)
        if body.tokens:
            check_ids(body.tokens, loaded.tokenizer, "tokens")
        text = loaded.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        answer: Text = {"prompt": text}
        return Response(msgspec.json.encode(answer), headers=ignored_header(ignored), media_type="application/json")

    return routes


async def _text(body: TokenizeBody, loaded: Loaded) -> tuple[str, bool]:
    """What to encode, and whether the model's special tokens are put around it."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "expected either prompt or messages")
    if body.messages is None:
        return body.prompt or "", body.add_special_tokens is not False
    chat = ChatBody(
        messages=body.messages,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return await render_prompt(chat, loaded, body.tools or []), bool(body.add_special_tokens)
