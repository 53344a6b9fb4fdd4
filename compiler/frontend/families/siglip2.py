"""SigLIP 2 for images of any size (NaFlex): SigLIP, but an image nearly keeps its proportions."""

from __future__ import annotations

from compiler.frontend.config import ModelConfig
from compiler.frontend.cutting import NAFLEX
from compiler.frontend.families import siglip
from compiler.frontend.families.lfm2_vl import ENCODER, read_naflex
from compiler.frontend.family import EncoderFamily
from compiler.frontend.fields import Fields
from compiler.frontend.vision import NO_TOKEN, Connector

TEXT = {**siglip.TEXT, "model_type": "siglip2_text_model"}


def read(fields: Fields) -> ModelConfig:
    siglip.require_head(fields.fields("vision_config", ENCODER))
    return siglip.read_padded(fields, TEXT, read_naflex(fields, connector=Connector.PROBE, merge=1, image_token=NO_TOKEN, cutting=NAFLEX))


FAMILY = EncoderFamily(
    *(("siglip2",), read, siglip.layer, None),
    prefix="text_model.",
    embed=siglip.embed,
    layers="encoder.layers",
    last_norm="final_layer_norm",
    join=siglip.joined,
)
