"""Make the request that all windows of a transcription have in common."""

from __future__ import annotations

from server.api.context import Caller
from server.api.request.prepare import context_of, invalid
from server.api.request.texts import encode_texts
from server.api.speech import transcribe
from server.api.speech.form import SpeechForm
from server.messages import IDLE, SamplingParams, Submit
from server.models.model import Loaded
from server.speech.languages import code_of
from server.speech.tokens import SpeechTokens


def request_of(asked: SpeechForm, task: str, loaded: Loaded, tokens: SpeechTokens, who: Caller) -> transcribe.Request:
    language = None if asked.language is None else code_of(asked.language)
    if not tokens.languages:
        if task == "translate" or language not in (None, "en"):
            raise invalid("model" if task == "translate" else "language", "this model only transcribes English")
        language = "en"
    elif language is not None and language not in tokens.languages:
        raise invalid(
            "language",
            f"language is {asked.language!r:.40}; expected a code such as en, one of {len(tokens.languages)} that the model knows",
        )
    (prompt_ids,) = encode_texts([f" {asked.prompt.strip()}"], loaded.tokenizer, special=False) if asked.prompt.strip() else ([],)
    params = SamplingParams(max_tokens=1, seed=asked.seed)
    common = Submit("", (), params, priority=IDLE if who.is_idle else 0, fairness_key=who.key_digest, cache_salt=who.salt())
    return transcribe.Request(
        tokens=tokens,
        submit=common,
        decode=loaded.tokenizer.decode,
        num_hops=loaded.ready.num_hops,
        most_context=context_of(loaded),
        language=language,
        task=task,
        prompt_ids=tuple(prompt_ids),
        align=loaded.worker.embed if "word" in asked.times else None,
        temperatures=transcribe.TEMPERATURES if asked.temperature == 0 else (asked.temperature,),
    )
