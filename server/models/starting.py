"""Start the parts that serve a model: a worker, the tokenizer, the dialect (how the model writes its answers), the decoders of images and
recordings, and admission."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from server.audio.clip_decoder import ClipDecoder
from server.audio.ears import Ears
from server.defaults import Defaults
from server.errors import TEMPLATE_NOT_RENDERED, ApiError
from server.fetching import AUDIO, IMAGES, Fetcher
from server.images.decoder import ImageDecoder
from server.images.sight import Sight
from server.interfaces import LoadError, ProgressCallback, Renderer, Tokenizer, WorkerHandle
from server.messages import FETCH, ErrorCode, Progress, Ready
from server.models.admission import Admission
from server.models.budget import Budget
from server.models.model import Loaded, LoadTokenizer, MakeWorker
from server.models.state import ModelSpec
from server.settings import ServerSettings
from server.speech.tokens import SpeechTokens
from server.text.dialects.dialect import Dialect
from server.text.templates.errors import TemplateError, TemplateUnavailable


@dataclass(frozen=True, slots=True)
class Starter:
    """Starts models. `make_worker` makes the worker of a model, and `load_tokenizer` its tokenizer."""

    settings: ServerSettings
    budget: Budget
    make_worker: MakeWorker
    load_tokenizer: LoadTokenizer

    async def start(self, spec: ModelSpec, report: ProgressCallback) -> Loaded:
        """Start a model and return its parts. `report` receives the progress. If the start fails, stop the worker and raise the error,
        which is a LoadError if the model is the cause. The tokenizer is read while the worker loads the model, as soon as the model's files
        are on this machine."""
        fetched = asyncio.Event()

        def heard(progress: Progress) -> None:
            if progress.stage != FETCH:
                fetched.set()
            report(progress)

        worker = self.make_worker(spec, heard)
        loading = asyncio.create_task(worker.start())
        loading.add_done_callback(lambda _: fetched.set())
        try:
            await fetched.wait()
            if loading.done():
                await loading  # raises the error of a load that failed before all files were on this machine
            tokenizer, dialect = await self._read(spec)
            return self._assembled(spec, worker, await loading, tokenizer, dialect)
        except BaseException:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await worker.stop()
            raise

    def _assembled(self, spec: ModelSpec, worker: WorkerHandle, ready: Ready, tokenizer: Tokenizer, dialect: Dialect) -> Loaded:
        """Return the parts of a model whose worker is ready. Raise LoadError if the tokenizer lacks a token that the model needs."""
        if ready.padded_to and tokenizer.pad_id is None:
            text = f"the files of {spec.source} name no pad_token, and the model was trained on texts with padding"
            raise LoadError(ErrorCode.LOAD_REFUSED, text)
        worker.before_wake = partial(self.budget.require_room, spec, ready.total_bytes)
        admission = Admission(
            spec.name,
            max_running=spec.max_batch,
            max_queued=self.settings.max_queued_requests,
            max_queued_tokens=self.settings.max_queued_tokens,
            max_constraints=self.settings.max_key_constraints,
        )
        defaults = spec.defaults.over(tokenizer.defaults)
        speech = SpeechTokens.of(tokenizer) if ready.num_hops else None
        settings = self.settings
        fetcher = Fetcher(IMAGES, settings.image_hosts, settings.max_image_bytes, settings.image_fetch_s)
        decoder = ImageDecoder(settings.max_image_pixels, settings.max_held_image_bytes, fetcher)  # starts a process at the first call
        sight = None if ready.vision is None else Sight.of(ready.vision, tokenizer, decoder)
        ears = None if ready.listening is None else Ears.of(ready.listening, tokenizer, self._clip_decoder())
        return Loaded(
            *(worker, ready, tokenizer, dialect, admission, _renderer_of(tokenizer)),
            defaults=defaults,
            speech=speech,
            sight=sight,
            ears=ears,
            image_decoder=None if ready.vision is None or ready.generates else decoder,
        )

    async def renewed(self, loaded: Loaded, spec: ModelSpec, ready: Ready) -> Loaded:
        """Return the parts of a loaded model whose worker was replaced by one with another fingerprint. The model's files have changed, so
        read its tokenizer again. Raise LoadError if that fails."""
        made = self._assembled(spec, loaded.worker, ready, *await self._read(spec))
        return replace(made, admission=loaded.admission, use=loaded.use)

    async def _read(self, spec: ModelSpec) -> tuple[Tokenizer, Dialect]:
        """Return the tokenizer of a model, with the chat template of its defaults, and the dialect. Raise LoadError if the template is
        broken, or if no process could render it."""
        tokenizer = await asyncio.to_thread(self.load_tokenizer, spec.source)
        try:
            return await asyncio.to_thread(_with_template, tokenizer, spec, spec.defaults.template)
        except TemplateUnavailable as error:
            raise LoadError(ErrorCode.LOAD_FAILED, str(error)) from error

    def _clip_decoder(self) -> ClipDecoder:
        """Return the decoder of recordings."""
        settings = self.settings
        fetcher = Fetcher(AUDIO, settings.audio_hosts, settings.max_audio_bytes, settings.audio_fetch_s)
        return ClipDecoder(settings.max_audio_s, settings.max_held_audio_bytes, fetcher)

    async def variant(self, loaded: Loaded, spec: ModelSpec, own: Defaults) -> Loaded:
        """Return a copy of a loaded model with the same worker, in which the defaults `own` win over the model's. Raise LoadError if a
        default cannot be used, or ApiError if no process could render the template among the defaults."""
        tokenizer, dialect, renderer = loaded.tokenizer, loaded.dialect, loaded.renderer
        if own.template is not None:
            try:
                tokenizer, dialect = await asyncio.to_thread(_with_template, tokenizer, spec, own.template)
            except TemplateUnavailable as error:
                raise ApiError(TEMPLATE_NOT_RENDERED, str(error)) from error
            renderer = _renderer_of(tokenizer)
        defaults = own.over(loaded.defaults)
        return replace(loaded, tokenizer=tokenizer, dialect=dialect, renderer=renderer, defaults=defaults, variants={})


def _with_template(tokenizer: Tokenizer, spec: ModelSpec, template: str | None) -> tuple[Tokenizer, Dialect]:
    """Return the tokenizer with another chat template, if there is one, and the dialect of that template. This takes long. Raise LoadError
    if the template is broken, TemplateUnavailable if no process could render it, or ValueError if the format for tool calls is unknown.
    Without `template`, the tokenizer's own is used."""
    try:
        if template is not None:
            tokenizer = tokenizer.with_template(template)
        return tokenizer, Dialect.of(tokenizer, spec.tool_parser, spec.reasoning)
    except TemplateUnavailable:
        raise
    except TemplateError as error:
        message = f"the template among the defaults is broken: {error}; expected a chat template in Jinja, as transformers reads it"
        raise LoadError(ErrorCode.LOAD_REFUSED, message) from error


def _renderer_of(tokenizer: Tokenizer) -> Renderer | None:
    """Return the object that renders the chat template, or None if there is no template."""
    return None if tokenizer.chat_template is None else tokenizer.chat_template.renderer()
