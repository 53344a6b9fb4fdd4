"""Answer one prompt with a model loaded in this process. The model runs in the same engine as in the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deploy.model_loading.known import Progress, begin
from deploy.model_loading.servable import Servable
from deploy.model_loading.stages import advance
from server.engine.loop import Engine
from server.engine.worker import LoadedModel
from server.interfaces import LoadError, RequestError
from server.messages import ErrorCode, Failed, FromWorker, Load, SamplingParams, Submit, Tokens
from server.text.detokenize import Detokenizer, StopRules
from server.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and how to answer it."""

    text: str
    raw: bool  # continue the text itself, without applying the chat template
    max_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Answer:
    """An answer with its times. The fields are filled in while the model generates."""

    num_prompt: int  # tokens of the prompt
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str = ""  # why the answer ended, such as "stop" or "length"; "" while the model generates
    prefill_s: float = 0.0  # seconds from the start to the first token
    decode_s: float = 0.0  # seconds from the first token until the engine is closed after the last one


def require_generator(load: Load, progress: Progress) -> Servable:
    """Return a model that generates text. Raise LoadError, before anything is compiled, if the model generates none."""
    model = advance(begin(load, progress), Servable)
    if not model.mode.generates:
        raise LoadError(
            ErrorCode.NOT_A_GENERATIVE_MODEL, f"{load.source} gives embeddings and generates no text; name a model that generates text"
        )
    return model


def generate_text(tokenizer: Tokenizer, model: LoadedModel, prompt: Prompt, write: Callable[[str], None]) -> Answer:
    """Generate an answer and pass its pieces of text to `write` as they arrive. A piece may be empty. Raise RequestError if the engine
    refuses the prompt or fails."""
    assert model.step_model is not None and model.ready.generates, "require_generator refuses other models"
    ids = encode(tokenizer, prompt)
    answer = Answer(len(ids))
    detokenizer = Detokenizer(tokenizer, StopRules())
    began_s = time.perf_counter()

    def publish(message: FromWorker) -> None:
        if isinstance(message, Failed):
            raise RequestError(message.code, message.message)
        for event in message.events if isinstance(message, Tokens) else ():
            if not answer.token_ids:
                answer.prefill_s = time.perf_counter() - began_s
            text = detokenizer.push(event.token_ids)
            answer.token_ids += event.token_ids
            answer.text += text
            answer.finish_reason = event.finish_reason or ""
            write(text)

    engine = Engine(model.step_model, publish, eos_ids=model.eos_ids)
    params = SamplingParams(prompt.max_tokens, temperature=prompt.temperature, seed=prompt.seed)
    engine.submit(Submit("generate", tuple(ids), params))
    while engine.has_work:
        engine.step()
    engine.close()
    answer.decode_s = time.perf_counter() - began_s - answer.prefill_s
    return answer


def encode(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Tokenize the prompt. If the model has a chat template and the prompt is not `raw`, the prompt becomes a user's message in it, and the
    template itself writes special tokens."""
    if prompt.raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt.text, add_special_tokens=True)
    text = tokenizer.chat_template.render([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(text, add_special_tokens=False)
