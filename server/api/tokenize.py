"""POST /tokenize and /detokenize: convert text to token ids and back with a model's tokenizer."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from server.api.answer.respond import Pieces
from server.api.answer.shapes import LlamaPiece, LlamaTokenIds, Text, TokenIds
from server.api.context import Caller, Context, caller
from server.api.openai.chat import Conversation, conversation_of, markers_of, written_prompt
from server.api.request.fields import ignored_header
from server.api.request.limits import check_sizes
from server.api.request.prepare import check_ids, context_of, invalid, off_loop
from server.api.request.schema import ChatBody, DetokenizeBody, TokenizeBody, functions_among
from server.api.request.texts import encode_prompts
from server.api.routes import gives, new_router
from server.errors import UNSUPPORTED_FIELD, ApiError
from server.interfaces import Tokenizer
from server.models.model import Loaded, Model
from server.settings import ServerSettings

MAX_TOKENS = 1 << 17  # encode this many tokens even if the context is shorter, so that a client sees by how much a text is too long
PIECE = 4096  # tokens whose texts are encoded as JSON in one call
encode = msgspec.json.encode


def router(context: Context) -> APIRouter:
    routes = new_router("Text")

    @routes.post("/tokenize", responses=gives(TokenIds, LlamaTokenIds))
    @routes.post("/v1/tokenize", include_in_schema=False)
    async def tokenize(request: Request, body: TokenizeBody) -> Response:
        """Return the token ids of a text, or of a conversation. With `content` the answer has llama.cpp's shape."""
        model, loaded, ignored = context.begin(request, body, body.model)
        text, special = await _text(body, model, loaded, caller(request), context.settings)
        write = _tokenized if body.content is None else _with_pieces
        pieces = await off_loop(len(text), lambda: write(text, body, loaded, special=special))
        return Pieces(pieces, ignored_header(ignored))

    @routes.post("/detokenize", responses=gives(Text))
    @routes.post("/v1/detokenize", include_in_schema=False)
    async def detokenize(request: Request, body: DetokenizeBody) -> Response:
        """Return the text of token ids, with special tokens unless `skip_special_tokens` is set."""
        _, loaded, ignored = context.begin(request, body, body.model)
        answer = await off_loop(caller(request).num_body_bytes, lambda: _detokenized(body, loaded))
        return Response(answer, headers=ignored_header(ignored), media_type="application/json")

    return routes


def _tokenized(text: str, body: TokenizeBody, loaded: Loaded, *, special: bool) -> list[bytes]:
    """Return the tokens of a text as an answer of /tokenize. If the request wants the texts of the tokens, the answer is in small pieces,
    because encoding all texts in one call would delay other requests. Raise ApiError for a text that certainly has more tokens than both
    MAX_TOKENS and the context."""
    tokenizer, context = loaded.tokenizer, context_of(loaded)
    (ids,) = encode_prompts([text], tokenizer, "prompt", special=special, context=max(context, MAX_TOKENS))
    if not body.return_token_strs:
        answer: TokenIds = {"tokens": ids, "count": len(ids), "max_model_len": context}
        return [encode(answer)]
    pieces = [encode({"tokens": ids, "count": len(ids), "max_model_len": context})[:-1] + b',"token_strs":[']
    for at in range(0, len(ids), PIECE):
        strings = [
            tokenizer.token_bytes(i).decode(errors="replace") or tokenizer.decode([i], skip_special_tokens=False)
            for i in ids[at : at + PIECE]
        ]
        pieces.append((b"," if at else b"") + encode(strings)[1:-1])
    return [*pieces, b"]}"]


def _with_pieces(text: str, body: TokenizeBody, loaded: Loaded, *, special: bool) -> list[bytes]:
    """Return the answer in llama.cpp's shape. With the field `with_pieces`, each token has its text. The answer is in pieces, and ApiError
    is raised, as in `_tokenized`."""
    tokenizer = loaded.tokenizer
    (ids,) = encode_prompts([text], tokenizer, "content", special=special, context=max(context_of(loaded), MAX_TOKENS))
    if not body.with_pieces:
        return [b'{"tokens":' + encode(ids) + b"}"]
    pieces = [b'{"tokens":[']
    for at in range(0, len(ids), PIECE):
        entries: list[LlamaPiece] = [{"id": i, "piece": _piece(i, tokenizer)} for i in ids[at : at + PIECE]]
        pieces.append((b"," if at else b"") + encode(entries)[1:-1])
    return [*pieces, b"]}"]


def _piece(token_id: int, tokenizer: Tokenizer) -> str | list[int]:
    """Return the text of a token, or the token's bytes if they are not valid UTF-8."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode() or tokenizer.decode([token_id], skip_special_tokens=False)
    except UnicodeDecodeError:  # the token has only a part of a character
        return list(raw)


def _detokenized(body: DetokenizeBody, loaded: Loaded) -> bytes:
    """Return the answer with the text of token ids. Raise ApiError if an id is outside the vocabulary."""
    if body.tokens:
        check_ids(body.tokens, loaded.tokenizer, "tokens")
    text = loaded.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    answer: Text = {"prompt": text, "content": text}
    return encode(answer)


async def _text(body: TokenizeBody, model: Model, loaded: Loaded, who: Caller, settings: ServerSettings) -> tuple[str, bool]:
    """Return the text to encode, and whether to put the model's special tokens around it. Raise ApiError unless the request has exactly one
    of `prompt`, `messages` and `content`, if `parse_special` is false beside `content`, or if the conversation cannot be rendered."""
    if [body.prompt, body.messages, body.content].count(None) != 2:
        raise invalid("prompt", "expected one of prompt, messages and content")
    if body.content is not None:
        if body.parse_special is False:
            message = "parse_special false is not supported: the text of a special token always becomes that token"
            raise ApiError(UNSUPPORTED_FIELD, message, param="parse_special")
        return body.content, bool(body.add_special)
    if body.messages is None:
        return body.prompt or "", body.add_special_tokens is not False

    def make(chat: ChatBody) -> Conversation:
        """Return the conversation. Raise ApiError if a part of the conversation is too large."""
        check_sizes(body.model_copy(update={"messages": chat.messages}))
        return conversation_of(chat, functions_among(body.tools), markers_of(loaded))

    chat = ChatBody(
        messages=body.messages,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    text, _ = await written_prompt(chat, model, loaded, who, settings, make)
    return text, bool(body.add_special_tokens)
