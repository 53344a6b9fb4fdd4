"""Decide from the configuration of a model and the headers of its weights whether the model can be served, and for which requests. All
commands share this stage, which refuses a model before anything is compiled."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.frontend.accounting import require_weights
from compiler.frontend.errors import WeightMismatch
from compiler.ir.module import IRModule
from deploy.model_loading.files import Formed, ModelFiles
from deploy.model_loading.known import carried, refusals
from deploy.model_loading.modes import Encoder, Mode, Transcriber, mode_of
from server.interfaces import LoadError
from server.messages import ErrorCode


@dataclass(frozen=True, kw_only=True, eq=False)
class Servable(Formed):
    """The state of a load once it is certain that the model can be served."""

    mode: Mode
    module: IRModule  # the program of the mode: all that the model computes
    part: IRModule | None  # the program of this process or of each rank; None: this process computes the whole model on one device
    embeds: bool  # whether the model serves embeddings

    @property
    def serves(self) -> tuple[str, ...]:
        """Name what the model serves. The server refuses requests for anything else."""
        classes = self.files.config.classes
        if classes is not None:
            return ("classify", "rerank and score of pairs of texts") if len(classes.names) == 1 else ("classify",)
        if isinstance(self.mode, Transcriber):
            return ("transcriptions and translations of speech",)
        generates = ("chat and completions",) if self.mode.generates else ()
        embeddings = "embeddings of texts and images" if self._embeds_images else "embeddings"
        return (*generates, embeddings, "rerank and score by cosine") if self.embeds else generates

    @property
    def _embeds_images(self) -> bool:
        """Whether the model embeds images. A decoder with vision that embeds texts sees no images."""
        return isinstance(self.mode, Encoder) and self.files.config.vision is not None

    @property
    def embedding_note(self) -> str:
        """Say how the model's embeddings and scores are computed. Return "" if the model serves no embeddings."""
        if not self.embeds:
            return ""
        cosine = "rerank and score compare embeddings by their cosine"
        if self.mode.generates:
            return f"the model was not trained for embeddings: the embedding of a text is the hidden state of its last token; {cosine}"
        embedding = self.files.config.embedding
        if self._embeds_images:
            return f"texts and images have vectors in one space; {cosine}"
        if isinstance(self.mode, Encoder) and not embedding.is_stated:
            return f"the model's files state no pooling, so the pooling is {embedding.pooling}; {cosine}"
        return cosine


@refusals()
def choose_program(known: Formed) -> Servable:
    """Choose the mode, and build its program and the part of it that this process computes. Raise LoadError if a setting of the load does
    not go with the model, or if the weights, apart from those that the mode names as unused, are not exactly those of the program."""
    files, mode = known.files, mode_of(known.files, known.load)
    module = mode.module()
    try:
        require_weights(module, mode.weights, mode.unused)
    except WeightMismatch as error:
        raise LoadError(ErrorCode.LOAD_REFUSED, f"{error}{_task(files)}") from error
    # A decoder that generates text also has hidden states, but they are no embeddings unless the model was trained for that. It serves
    # embeddings only if the load asks for them.
    embeds = files.config.classes is None and files.config.hearing is None and (known.load.embeddings or not mode.generates)
    return Servable(**carried(known, Formed), mode=mode, module=module, part=mode.part(), embeds=embeds)


def _task(files: ModelFiles) -> str:
    """Explain why weights are unused, if they belong to an unsupported classification head."""
    classifiers = [name for name in files.architectures if "ForSequenceClassification" in name or "ForTokenClassification" in name]
    if not classifiers:
        return ""
    remedy = "use a model that classifies whole texts, generates text or computes embeddings"
    return f". The model is a {classifiers[0]}: its classification head is not supported; {remedy}"
