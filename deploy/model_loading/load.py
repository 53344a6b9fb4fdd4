"""Load a model, in a worker process before it serves."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from deploy.model_loading.description import Described
from deploy.model_loading.known import Asked, Progress, begin
from deploy.model_loading.stages import advance
from deploy.model_loading.weights import damage
from server.engine.scheduling.pace import Pace
from server.engine.worker import LoadedModel
from server.interfaces import LoadError
from server.messages import Load, QualityLabel

log = logging.getLogger(__name__)


def load_model(load: Load, progress: Progress) -> LoadedModel:
    """Load a model from its source. Every expected failure is a LoadError whose message contains a remedy."""
    if load.stages:
        from deploy.stages.assemble import require_supported  # only here: other loads do without its imports

        require_supported(load)
    asks = load.label and not load.restart
    return loaded(replace(begin(load, progress), measure=_measured_label if asks else None))


def _measured_label(load: Load, progress: Progress) -> QualityLabel | None:
    """Measure the quality label. If that is impossible, log why and return None: the model can be served."""
    from deploy.quality.measure import label_of  # only here, because its imports take time, and because it runs stages itself

    try:
        return label_of(load, progress)
    except LoadError as error:
        log.warning("%s has no quality label: %s", load.name, error.message)
        return None


def loaded(begun: Asked) -> LoadedModel:
    """Run the stages of a load that have not run yet, and return the loaded model."""
    if begun.load.stages:
        from deploy.stages.assemble import assemble  # only here, for the same reason as in `load_model`

        begun = assemble(begun)
    known = advance(begun, Described)
    session, packed = known.session, known.packed  # functions of the result must not refer to `known`, which would keep its memory
    model, costs = known.step_model, known.costs
    return LoadedModel(
        known.ready,
        model,
        known.embed_model,
        known.eos_ids,
        known.tokenizer_source.reader() if known.mode.generates else None,
        pace=None if model is None or costs is None else Pace(model.limits.max_tokens, costs, known.load.max_gap_ms / 1000),
        relay=known.relay,
        settle=session.device.settle,
        damage=partial(damage, packed),
        card_usage=lambda: session.device.card_usage,
    )
