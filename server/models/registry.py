"""Keep the registry of the models: load and unload them, find them by name or alias, and record which models are loaded.

A load is a transaction: it claims a name and memory first, and frees them again if the worker does not become ready. If a model's source
has changed, the new version loads while the old one is served. Once the new version has answered a probe, it replaces the old one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Container, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate
from typing import Any, cast

import msgspec

from runtime.units import in_units
from server.defaults import Defaults
from server.errors import (
    LOAD_CANCELLED,
    LOAD_FAILED,
    MISSING_FIELD,
    MODEL_BUSY,
    MODEL_EXISTS,
    MODEL_NOT_FOUND,
    MODEL_NOT_READY,
    MODEL_PINNED,
    NAME_IS_ALIAS,
    OPERATION_ENDED,
    SHUTTING_DOWN,
    ApiError,
)
from server.interfaces import LoadError
from server.messages import ErrorCode, Ready
from server.metrics import ENGINE, Metrics
from server.models.aliases import Aliases, names_like
from server.models.budget import Budget
from server.models.library import Library
from server.models.load_report import tell_loaded, tell_loading
from server.models.measuring import Measuring
from server.models.model import (
    CompareForms,
    CompileCache,
    Identify,
    IsCached,
    Loaded,
    LoadTokenizer,
    MakeWorker,
    Model,
    ModelState,
    Preflight,
    Unloaded,
    Weigh,
)
from server.models.operations import Operation, Operations, OperationState
from server.models.probe import PLAIN, Probe, require_answer
from server.models.publications import Publications
from server.models.replacements import Replacements, beside
from server.models.saved_models import SavedModels
from server.models.starting import Starter
from server.models.state import ModelSpec
from server.settings import ServerSettings

log = logging.getLogger(__name__)


class Registry:
    """The models of a server, by name and alias."""

    def __init__(
        self,
        settings: ServerSettings,
        make_worker: MakeWorker,
        load_tokenizer: LoadTokenizer,
        *,
        identify: Identify = lambda _source: "",
        is_cached: IsCached = lambda _spec: False,
        preflight: Preflight | None = None,
        compare_forms: CompareForms | None = None,
        cache: CompileCache | None = None,
        weigh: Weigh = lambda _spec: 0,
        library: Library | None = None,
        initial: Sequence[ModelSpec] = (),
        metrics: Metrics | None = None,
        targets: Sequence[str] = ("host",),
        publications: Publications | None = None,
    ) -> None:
        """`initial`: the models of the command line. `server/models/model.py` defines the types of the callables, and says what each
        callable does."""
        self.settings = settings
        self.targets = targets  # targets that a load may name
        self.metrics = Metrics() if metrics is None else metrics
        self.operations = Operations()
        self.publications = publications or Publications()
        self.cache = cache
        self.library = library
        self.compare_forms = compare_forms
        self.leaving = False  # the server will stop soon: it still answers requests, but `ready` is False
        self.closing = False  # the server stops: it takes no new requests and begins no loads
        self._is_open = False  # `open` was called
        self._identify = identify
        self.is_cached = is_cached
        self._initial = initial
        self._starting: list[Operation] = []  # the loads of the server's start
        self._models: dict[str, Model] = {}
        self._replacements = Replacements()
        self._retiring: set[asyncio.Task[None]] = set()  # tasks that unload models which lost their last alias
        self._aliases = Aliases(self._models)
        self._saved = SavedModels(settings.state_file)
        self._weigh = weigh
        self.budget = Budget(settings, preflight, weigh, lambda: [*self._models.values(), *self._replacements.models()])
        self._starter = Starter(settings, self.budget, make_worker, load_tokenizer)
        self.measuring = Measuring(self.metrics, self.models)
        self.metrics.watch(lambda: [model.reading for model in self._models.values()], lambda: self._models)

    @property
    def downloads(self) -> Container[str]:
        """Return the short names of models that this server can download."""
        return () if self.library is None else self.library.names

    # --- start and end -------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin to load the models that the command line and the state file name: cached ones first, and otherwise those of the command
        line first. A saved model whose name is an alias of the command line is refused. A further call does nothing. Raise StateError if
        the state file cannot be read."""
        if self._is_open:
            return
        self._is_open = True
        owners = {name: spec.name for spec in self._initial for name in (spec.name, *spec.aliases)}
        specs = self._saved.read(self._initial, owners)
        cached = await asyncio.to_thread(lambda: {spec.name for spec in specs if self.is_cached(spec)})
        for spec in sorted(specs, key=lambda spec: (owners.get(spec.name, spec.name) != spec.name, spec.name not in cached)):
            self._starting.append(await self._load_or_fail(spec))

    async def _load_or_fail(self, spec: ModelSpec) -> Operation:
        """Begin a load. If the load is refused, for example because the model's name is an alias of another model, record a failed
        operation, so that the other models still start."""
        try:
            return await self.load(spec)
        except ApiError as error:
            operation = self.operations.begin("load", spec.name)
            operation.end(OperationState.FAILED, error)
            log.error("loading %s: %s", spec.name, error.message)
            return operation

    async def close(self) -> None:
        """Cancel loads and stop every worker. The state file keeps the models for the next start."""
        self.closing = True
        await asyncio.gather(self.operations.cancel_all(), self.publications.close())
        retiring = list(self._retiring)
        for task in retiring:
            task.cancel()
        stops = [model.loaded.worker.stop() for model in self._models.values() if model.loaded is not None]
        await asyncio.gather(*stops, self._replacements.close(), *retiring, return_exceptions=True)
        for name in list(self._models):
            self._aliases.forget(name)
        self._models.clear()
        await self._saved.written()

    @property
    def ready(self) -> bool:
        """True if a load balancer should send requests to this server. The server is not ready while models of its start still load, nor
        once it is about to stop. Otherwise a server with models is ready if any of them serves. A server without models is ready, because
        an administrator may load some, unless a load of its start has failed or was cancelled."""
        if self.leaving or self.closing or any(operation.state is OperationState.RUNNING for operation in self._starting):
            return False
        if not self._models:
            return all(operation.state is OperationState.SUCCEEDED for operation in self._starting)
        return any(model.is_serving for model in self._models.values())

    # --- look-up -------------------------------------------------------------------------------------------------------

    def models(self) -> list[Model]:
        """Return all models that are loaded or loading. New versions of served models are left out."""
        return list(self._models.values())

    def aliases(self) -> dict[str, str]:
        """Return the name of the model behind each alias."""
        return self._aliases.owners()

    def failed(self) -> list[Operation]:
        """Return the last load of each model that failed to load, while that operation is remembered."""
        last = {operation.model: operation for operation in self.operations.all() if operation.kind == "load"}
        return [one for name, one in last.items() if one.state is OperationState.FAILED and name not in self._models]

    def find(self, name: str) -> Model:
        """Return the model of a name or alias, also with the tag `:latest`, which Ollama's clients add to names that have no tag. Raise
        ApiError if there is no such model."""
        meant = self._meant(name)
        model = self._models.get(self._aliases.owner(meant) or meant)
        if model is None:
            loaded = [
                one
                for model in self._models.values()
                if model.state is ModelState.READY
                for one in (model.spec.name, *self._aliases.of(model.spec.name))
            ]
            raise not_loaded(name, loaded)
        return model

    def _meant(self, name: str, others: Container[str] = ()) -> str:
        """Return the first name of `names_like(name)` that is the name of a model, an alias, or in `others`. If none is, return the name
        itself."""
        return next((one for one in names_like(name) if one in self._models or one in self._aliases or one in others), name)

    def serve(self, name: str | None, *, has_begun: bool = False) -> tuple[Model, Loaded]:
        """Return the model that answers a request, and its loaded parts with the defaults of the name. A request without a name gets the
        only model. Raise ApiError if there is no such model, if it is not ready, if a request has no name and the server has no model or
        several, or if the server stops. `has_begun`: this is a further part of a request, which is answered even while the server stops."""
        if self.closing and not has_begun:
            raise ApiError(SHUTTING_DOWN, "the server is shutting down", headers={"retry-after": "5"})
        if name is None:
            if len(self._models) != 1:
                names = ", ".join(self._models) or "none"
                raise ApiError(MISSING_FIELD, f"model is absent, and the server has {len(self._models)} models: {names}", param="model")
            name = next(iter(self._models))
        model = self.find(name)
        if model.state is not ModelState.READY or model.loaded is None:
            raise ApiError(
                MODEL_NOT_READY,
                f"model {model.spec.name!r} is {model.state}; see /admin/models",
                param="model",
                headers={"retry-after": "1"},
            )
        return model, model.loaded.variants.get(self._meant(name), model.loaded)

    # --- loading -------------------------------------------------------------------------------------------------------

    async def load(self, spec: ModelSpec, *, swap: bool = False) -> Operation:
        """Begin a load, and return its operation. If a model of this name is loading or loaded, begin no load: add the new aliases and the
        pin, and return the operation of that model. If the source of a ready model has changed, begin to load a new version beside it, and
        return the operation of the new version; while a new version loads, return its operation. Aliases of other models move to this one
        once it is ready. If `swap` is true, models that have lost their last alias to it are then unloaded. An alias that is the model's
        own name has no effect. Raise ApiError if the name is an alias, if an alias is the name of another model, if the model of this name
        has other settings or is being unloaded, or if the server shuts down."""
        spec = spec.without([spec.name])
        known = self._models.get(spec.name)
        is_cached = await asyncio.to_thread(self.is_cached, spec)
        is_outdated = known is not None and known.spec.loads_like(spec) and await self._is_outdated(known)
        if self.closing:
            raise ApiError(SHUTTING_DOWN, "the server is shutting down")
        if owner := self._aliases.owner(spec.name) or self._will_be_called(spec.name):
            raise ApiError(MODEL_EXISTS, f"name {spec.name!r} is an alias of model {owner!r}; choose another name", param="name")
        for alias in spec.aliases:
            if alias in self._models:
                raise ApiError(MODEL_EXISTS, f"alias {alias!r} is the name of a model; choose another alias", param="aliases")
        model = self._models.get(spec.name)
        if model is None:
            self.metrics.of(spec.name)  # creates its metric series
            model = Model(spec, self.operations.begin("load", spec.name), is_cached=is_cached)
            self._models[spec.name] = model
            model.swaps = swap
            model.operation.task = asyncio.create_task(self._load(model))
        elif model.state is ModelState.DRAINING:
            raise ApiError(MODEL_BUSY, f"model {spec.name!r} is being unloaded; wait until it is gone", param="name")
        elif not model.spec.loads_like(spec):
            raise ApiError(
                MODEL_EXISTS,
                f"model {spec.name!r} is {model.state} from {model.spec.source!r} with other settings; unload it, or load under "
                "another name",
                param="name",
            )
        elif (replacement := self._replacements.coming(spec.name)) is not None:
            model = replacement
            model.spec = model.spec.with_names(spec)
            model.swaps = model.swaps or swap
        elif is_outdated and model is known:
            return self._reload(model, spec, swap=swap)
        else:
            model.swaps = swap or (model.swaps and model.state is not ModelState.READY)
            self._add_names(model, spec)
            await self._saved.written()
        return model.operation

    async def _is_outdated(self, model: Model) -> bool:
        """Return whether the source of a ready model has changed since its load. Return False if the model is not ready, or the source has
        no known identity."""
        if model.state is not ModelState.READY:
            return False
        identity = await asyncio.to_thread(self._identify, model.spec.source)
        return bool(identity) and identity != model.identity

    def _reload(self, model: Model, asked: ModelSpec, *, swap: bool) -> Operation:
        """Begin to load a new version of a model, and return the operation. Once the new version is served, it has the aliases that the old
        version has at that time, and those of `asked`."""
        name = model.spec.name
        spec = msgspec.structs.replace(model.spec.with_names(asked), aliases=asked.aliases)
        replacement = Model(spec, self.operations.begin("reload", name), swaps=swap)
        self._replacements.add(replacement)
        replacement.operation.task = asyncio.create_task(self._load(replacement, replaces=model))
        return replacement.operation

    def _will_be_called(self, alias: str) -> str | None:
        """Return the name of a model that will own this alias once its load succeeds, or None if there is none."""
        return next((model.spec.name for model in self._models.values() if alias in model.spec.aliases and model.loaded is None), None)

    def _add_names(self, model: Model, asked: ModelSpec) -> None:
        """Add the aliases and the pin of a repeated load. They take effect at once, or when the model becomes ready."""
        model.spec = model.spec.with_names(asked)
        if model.state is ModelState.READY:
            self._take_aliases(model, asked.aliases)
            self._save()

    def _take_aliases(self, model: Model, aliases: Sequence[str]) -> None:
        """Point aliases at a ready model. If `model.swaps` is set, begin to unload models that lost their last alias."""
        bereft = self._aliases.point(aliases, model.spec.name)
        for name in bereft if model.swaps else ():
            task = asyncio.create_task(self._retire(name))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, name: str) -> None:
        """Unload a model that lost its last alias, once its running requests have finished or `drain_s` has passed. If it cannot be
        unloaded, log why."""
        try:
            await self.unload(name, drain_s=self.settings.drain_s)
        except ApiError as error:  # pinned, or unloaded by another request
            log.warning("%s was replaced but stays loaded: %s", name, error.message)

    async def cancel(self, operation: Operation) -> None:
        """Cancel a running operation, and wait until it has ended. Raise ApiError if it has ended already."""
        if operation.task is None or operation.task.done():
            raise ApiError(OPERATION_ENDED, f"operation {operation.id!r} has ended: it {operation.outcome}")
        if getcoroutinestate(cast("Coroutine[Any, Any, None]", operation.task.get_coro())) == CORO_CREATED:
            await asyncio.sleep(0)  # a task that is cancelled before it begins would never end the operation
        operation.cancel()
        await operation.wait()

    async def _load(self, model: Model, replaces: Model | None = None) -> None:
        """Load a model, and then begin to serve it. If it is a new version, `replaces` is the old one. A failure is logged and ends the
        operation."""
        operation, name = model.operation, model.spec.name
        labels = (name, ENGINE)
        began = time.monotonic()
        tell_loading(model.spec)
        try:
            # Identify the source before the worker reads it. If the source changes in between, the identity is too old, so the next load of
            # this model reads it again needlessly.
            model.identity = await asyncio.to_thread(self._identify, model.spec.source)
            spec = await self.budget.claim(model)
            loaded = await self._starter.start(spec, operation.report)
            try:  # a model must answer a probe before it replaces another model, or takes an alias from one
                if replaces is not None or any(alias in self._aliases for alias in model.spec.aliases):
                    await require_answer(name, loaded, PLAIN)
                presets, variants = await self._variants(model, loaded, replaces)
                loaded.worker.before_change = partial(self._renew, model, spec)
                # Before `before_change` was set, a worker that has read other files may have taken the place of the first one.
                if (ready := loaded.worker.ready) is not None and ready.fingerprint != loaded.ready.fingerprint:
                    text = f"the files of {spec.source} have changed while they were loaded; load the model again"
                    raise LoadError(ErrorCode.LOAD_FAILED, text)
            except BaseException:
                await loaded.worker.stop()
                raise
        except asyncio.CancelledError:
            self._forget(model)
            error = ApiError(LOAD_CANCELLED, f"loading {name!r} was cancelled")
            operation.end(OperationState.CANCELLED, error)
            log.info("%s", error.message)
            self.metrics.loads.labels(*labels, "cancelled").inc()
            raise
        except LoadError as error:
            self._fail(model, self.budget.as_api_error(beside(error, replaces)))
            return
        except ApiError as error:
            self._fail(model, error)
            return
        except Exception as error:
            log.exception("loading %s failed", name)
            self._fail(model, ApiError(LOAD_FAILED, f"{type(error).__name__}: {error}"))
            return
        model.loaded = loaded
        model.state = ModelState.READY
        model.claim = None
        load_s = time.monotonic() - began
        try:  # the operation ends after the state file is written, so that a client may rely on the file once it sees the end
            if replaces is not None:
                self._switch(replaces, model)
            self._take_aliases(model, model.spec.aliases)
            self._aliases.adopt(presets, variants, loaded)
            self._save()
            self.publications.begin(model.spec)
            await self._saved.written()
        finally:  # the model is loaded, even if the operation is cancelled or a step has failed
            operation.end(OperationState.SUCCEEDED)
            self._count_load(model, loaded.ready, load_s)
            tell_loaded(model, loaded, load_s, self._weigh(msgspec.structs.replace(spec, quantize="auto")))

    async def _renew(self, model: Model, spec: ModelSpec, ready: Ready) -> None:
        """Read the tokenizer of a model again. The model's supervisor calls this before it uses a new process with another fingerprint,
        because the model's files have changed; later requests then get the tokenizer and the weights of the new files. Raise LoadError if
        the tokenizer cannot be read; the worker then does not serve. Do nothing if the model gets no new requests."""
        if (loaded := model.loaded) is None:
            return
        try:
            fresh = await self._starter.renewed(loaded, spec, ready)
            presets, variants = await self._variants(model, fresh, replaces=model)
        except LoadError:
            raise
        except ApiError as error:
            raise LoadError(ErrorCode.LOAD_FAILED, error.message) from error
        except Exception as error:
            log.exception("the new files of %s cannot be read", spec.name)
            raise LoadError(ErrorCode.LOAD_FAILED, f"{type(error).__name__}: {error}") from error
        if model.loaded is loaded:  # no new version has replaced the model meanwhile
            model.loaded, model.identity = fresh, ""  # nobody knows which version of its files the worker has read
            self._aliases.adopt(presets, variants, fresh)
            log.warning("%s: the model's files have changed; its tokenizer and its chat template were read again", spec.name)

    async def _variants(self, model: Model, loaded: Loaded, replaces: Model | None) -> tuple[Mapping[str, Defaults], Mapping[str, Loaded]]:
        """Return the defaults of aliases of a model, and the variants that answer by these aliases. The aliases of a model that is replaced
        may get other defaults while the variants are made. If they do, make the variants again."""
        presets, variants = dict[str, Defaults](), dict[str, Loaded]()
        while presets != (wanted := model.spec.presets if replaces is None else self._aliases.presets_of(model.spec.name)):
            presets = wanted
            variants = {alias: await self._starter.variant(loaded, model.spec, own) for alias, own in presets.items()}
        return presets, variants

    def _fail(self, model: Model, error: ApiError) -> None:
        """End a load that has failed."""
        self._forget(model)
        model.operation.end(OperationState.FAILED, error)
        self.metrics.loads.labels(model.spec.name, ENGINE, "failed").inc()
        log.error("loading %s: %s", model.spec.name, error.message)

    def _count_load(self, model: Model, ready: Ready, load_s: float) -> None:
        """Count a successful load in the metrics."""
        labels = (model.spec.name, ENGINE)
        self.metrics.loads.labels(*labels, "succeeded").inc()
        self.metrics.load_s.labels(*labels).observe(load_s)
        self.metrics.compile_s.labels(*labels).observe(ready.compile_s)
        self.metrics.cache.labels(*labels, ready.signature, "hit" if ready.cache_hit else "miss").inc()
        for stage, spent_s in model.operation.stages.items():
            self.metrics.stage_s.labels(*labels, stage).observe(spent_s)

    def _switch(self, old: Model, new: Model) -> None:
        """Send new requests to `new`. `old` finishes the requests that it runs."""
        self._models[new.spec.name] = new
        self._replacements.remove(new)
        self._replacements.retire(old)

    # --- unload and aliases --------------------------------------------------------------------------------------------

    async def unload(self, name: str, *, drain_s: float, force: bool = False) -> Unloaded:
        """Accept no more requests, give running requests `drain_s` seconds to finish, then stop the worker. A pinned model is unloaded only
        with `force`. If a new version of it is loading, that load is cancelled. A model whose last load has failed is only removed from the
        state file, so that the next start does not load it. Raise ApiError if the name is an alias, or if the model is not loaded, not
        ready or pinned."""
        name = self._meant(name, self._saved)
        if name in self._saved and name not in self._models:
            self._saved.drop(name)  # the model's last load failed; do not load it at the next start
            self._save()
            self._starting = [operation for operation in self._starting if operation.model != name]
            await self._saved.written()
            held_bytes = await self.measuring.resident_bytes()
            return Unloaded(name, 0, held_bytes, held_bytes)
        if (owner := self._aliases.owner(name)) is not None:
            raise ApiError(
                NAME_IS_ALIAS,
                f"{name!r} is an alias of model {owner!r}; unload {owner!r}, or remove the alias at /admin/aliases/{name}",
                param="model",
            )
        model = self.find(name)
        if model.state is not ModelState.READY or model.loaded is None:
            raise ApiError(MODEL_BUSY, f"model {model.spec.name!r} is {model.state}", param="model")
        if model.spec.pin and not force:
            raise ApiError(MODEL_PINNED, f"model {model.spec.name!r} is pinned; add force=true", param="model")
        freed_bytes = model.total_bytes
        model.state = ModelState.DRAINING
        log.info("unloading %s, with %g s for running requests", model.spec.name, drain_s)
        try:
            # first: during any other `await`, the replacement could take the model's place
            if (replacement := self._replacements.coming(name)) is not None:
                await self.cancel(replacement.operation)
            before_bytes = await self.measuring.resident_bytes()
            await model.loaded.worker.drain(drain_s)
        finally:
            await model.loaded.worker.stop()
            self._forget(model)
            self._saved.drop(model.spec.name)
            self._save()
        await self._saved.written()
        self.metrics.unloads.labels(model.spec.name, ENGINE).inc()
        self.metrics.end(model.spec.name)
        log.info("%s is unloaded and gave back %s", model.spec.name, in_units(freed_bytes))
        return Unloaded(model.spec.name, freed_bytes, before_bytes, await self.measuring.resident_bytes())

    async def set_alias(self, alias: str, name: str, probe: Probe, own: Defaults | None = None) -> None:
        """Point `alias` at a ready model, if the model answers a probe. Running requests stay with their model. `name` is a model's name or
        an alias. `own`: defaults of the alias, which win over those of `name`. Raise LoadError if a default cannot be used, or ApiError if
        the alias is the name of a model, if the model is not ready, fails the probe, or is replaced meanwhile, or if no process could
        render the template among the defaults."""
        model, loaded = self._ready_for_alias(alias, name)
        preset = (own or Defaults()).over(self._aliases.preset_of(self._meant(name)))
        variant = await self._starter.variant(loaded, model.spec, preset) if preset.given else None
        await require_answer(model.spec.name, loaded, probe)
        model, now = self._ready_for_alias(alias, name)  # other requests may have changed the models meanwhile
        if now is not loaded:
            raise ApiError(MODEL_BUSY, f"model {name!r} was replaced meanwhile; send the request again", param="model")
        self._aliases.remove(alias)
        self._aliases.point([alias], model.spec.name)
        if variant is not None:
            self._aliases.adopt({alias: preset}, {alias: variant}, loaded)
        self._save()
        await self._saved.written()

    def _ready_for_alias(self, alias: str, name: str) -> tuple[Model, Loaded]:
        """Return the model `name`, which is to get an alias, and its parts. Raise ApiError if the alias is the name of a model, or if the
        model does not exist or is not ready."""
        if alias in self._models:
            raise ApiError(MODEL_EXISTS, f"alias {alias!r} is the name of a model; choose another alias", param="alias")
        model = self.find(name)
        if model.state is not ModelState.READY or model.loaded is None:
            raise ApiError(MODEL_NOT_READY, f"model {name!r} is {model.state}", param="model")
        return model, model.loaded

    async def remove_alias(self, alias: str) -> None:
        """Remove an alias. Raise ApiError if it does not exist."""
        if not self._aliases.remove(alias):
            raise ApiError(MODEL_NOT_FOUND, f"alias {alias!r} does not exist; see /admin/aliases", param="alias")
        self._save()
        await self._saved.written()

    def _forget(self, model: Model) -> None:
        """Remove a model that was unloaded or did not load, with its page and its aliases. If the model was to replace a served one, the
        served one keeps its page and its aliases."""
        if self._replacements.remove(model):
            return  # `model` replaces a served model, which keeps the names
        if self._models.pop(model.spec.name, None) is None:
            return  # the server stops, and has forgotten all models
        self.publications.end(model.spec.name)
        self._aliases.forget(model.spec.name)

    def _save(self) -> None:
        """Begin to write all ready models into the state file."""
        loaded = [model.spec for model in self._models.values() if model.state is ModelState.READY]
        self._saved.write(
            msgspec.structs.replace(spec, aliases=self.aliases_of(spec.name), presets=self._aliases.presets_of(spec.name))
            for spec in loaded
        )

    def aliases_of(self, name: str) -> tuple[str, ...]:
        """Return the aliases of a model, sorted."""
        return self._aliases.of(name)


def not_loaded(name: str, loaded: Iterable[str]) -> ApiError:
    """Return the error for a model that is not loaded. `loaded`: the names and aliases of the loaded models."""
    return ApiError(MODEL_NOT_FOUND, f"model {name!r} is not loaded; loaded are: {', '.join(sorted(loaded)) or 'none'}", param="model")
