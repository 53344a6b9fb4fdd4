"""The configuration of encoders of images, and the files of image processors: what is read, what is assumed, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from compiler.frontend.cutting import has_processor, read_cutting
from compiler.frontend.decoder import BOTH, StepBounds, build_step
from compiler.frontend.errors import ConfigError
from compiler.frontend.layers.nn import WeightFormat
from compiler.frontend.registry import load_config, parse_config
from compiler.frontend.vision import MOST_PATCHES
from compiler.ir.dtypes import DType
from deploy.model_loading.files import ModelFiles, open_files
from deploy.model_loading.seeing import seeing_limits
from runtime.fits import Canvas, Capped, Centre, Filled, Free, Grid, Mixed, Stretched, Tiles
from server.images.cutting import Plan, crops_of
from tests.golden.vision import SUBJECTS
from tests.server.images.files import image

BOUNDS, F32 = StepBounds(max_tokens=256, max_seqs=64, max_context=512), WeightFormat(32)
IDEFICS3 = SUBJECTS["idefics3"]
CONFIG = IDEFICS3.config


@pytest.fixture
def files() -> ModelFiles:
    return open_files(IDEFICS3.folder)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen2_vl", "patch_size", 14),
        ("qwen2_vl", "merge_size", 4),
        ("qwen2_vl", "temporal_patch_size", 1),
        ("qwen2_vl", "min_pixels", 41 * 256),
        ("qwen2_vl", "max_pixels", 0),
        ("qwen2_vl", "do_resize", False),
        ("glm4v", "patch_size", 14),
        ("glm4v", "size", {"shortest_edge": 100 * 256, "longest_edge": 50 * 256}),
        ("mistral3", "patch_size", {"height": 8, "width": 16}),
        ("mistral3", "size", {"height": 96, "width": 96}),
        ("gemma4", "patch_size", 16),
        ("gemma4", "pooling_kernel_size", 3),
        ("gemma4", "do_normalize", True),
        ("gemma4", "do_resize", False),
        ("gemma4", "max_soft_tokens", 1025),
        ("gemma4", "max_soft_tokens", 81),  # more than the table of positions has columns of tokens
        ("gemma4", "resample", 0),
        ("lfm2_vl", "encoder_patch_size", 16),
        ("lfm2_vl", "downsample_factor", 4),
        ("lfm2_vl", "tile_size", 40),
        ("lfm2_vl", "tile_size", 1024),
        ("lfm2_vl", "max_image_tokens", 11),
        ("lfm2_vl", "max_image_tokens", 1025),
        ("lfm2_vl", "max_tiles", 1),
        ("lfm2_vl", "min_tiles", 1),
        ("lfm2_vl", "max_tiles", 65),
        ("lfm2_vl", "resample", 0),
        ("lfm2_vl", "do_rescale", False),
    ],
)
def test_other_processors_of_images_of_any_size_are_refused(tmp_path: Path, name: str, field: str, value: object) -> None:
    vision = load_config(SUBJECTS[name].folder).vision
    assert vision is not None
    with pytest.raises(ConfigError, match=f"{field} of .* expected"):
        read_cutting(written(tmp_path, "preprocessor_config.json", {**SUBJECTS[name].processor, field: value}), vision)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_file_of_the_processor_that_is_gone_from_behind_its_link_is_not_absent(tmp_path: Path, name: str) -> None:
    """A model that can do without it would be served as one that sees nothing, or would cut images in another way."""
    (tmp_path / name).symlink_to(tmp_path / "lost")
    with pytest.raises(ConfigError, match="lost, which does not exist"):
        has_processor(tmp_path)


def test_a_processor_that_cuts_no_tiles_may_name_any_number_of_them(tmp_path: Path) -> None:
    vision = load_config(SUBJECTS["lfm2_vl"].folder).vision
    assert vision is not None
    given = {**SUBJECTS["lfm2_vl"].processor, "min_tiles": 1, "do_image_splitting": False}
    fit = read_cutting(written(tmp_path, "preprocessor_config.json", given), vision).fit
    assert isinstance(fit, Mixed) and not fit.splits


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v", "mistral3", "pixtral"])
def test_no_image_has_more_patches_than_one_call_sees(tmp_path: Path, name: str) -> None:
    given, vision = dict(SUBJECTS[name].processor), load_config(SUBJECTS[name].folder).vision
    assert vision is not None
    sizes = {"qwen2_vl": {"max_pixels": 1 << 28}, "glm4v": {"size": {"shortest_edge": 12544, "longest_edge": 1 << 28}}}
    given |= sizes.get(name, {"size": {"longest_edge": 1 << 20}})
    found = replace(vision, cutting=read_cutting(written(tmp_path, "preprocessor_config.json", given), vision))
    assert found.most_squares * found.num_patches == MOST_PATCHES
    plan = Plan(found.crop_size, 1, found.cutting.fit, found.cutting.filter)
    for size in ((1, 190), (190, 1), (1900, 10), (3000, 2999), (641, 640)):
        _, (crop,) = crops_of(image(*size), plan)
        assert seeing_limits(found, load_config(SUBJECTS[name].folder)).fault(crop) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", 8),
        ("num_key_value_heads", 2),
        ("attention_bias", True),
        ("num_attention_heads", 5),
        ("pooling_kernel_size", 65),
        ("rope_parameters", {"rope_type": "linear"}),
        ("unheard_of", 1),
    ],
)
def test_other_encoders_of_gemma_4_are_refused(field: str, value: object) -> None:
    given = SUBJECTS["gemma4"].config
    with pytest.raises(ConfigError, match=field.removesuffix("_parameters")):
        parse_config({**given, "vision_config": {**given["vision_config"], field: value}})


@pytest.mark.parametrize("activation", ["relu2", "xielu"])
@pytest.mark.parametrize("name", ["llava", "internvl", "mistral3", "lfm2_vl"])
def test_activations_of_decoders_are_refused_in_encoders_and_connectors(name: str, activation: str) -> None:
    given = SUBJECTS[name].config
    for changed in ({"vision_config": {**given["vision_config"], "hidden_act": activation}}, {"projector_hidden_act": activation}):
        with pytest.raises(ConfigError, match=f"_act of .* is '{activation}', expected one of silu"):
            parse_config({**given, **changed})


@pytest.mark.parametrize("name", ["mistral3", "pixtral"])
def test_a_pixtral_encoder_has_the_sizes_of_its_class_unless_the_file_states_others(name: str) -> None:
    """The class of Mistral 3 has patches of 14 pixels, but only if there is no vision_config at all."""
    vision = parse_config({**SUBJECTS[name].config, "vision_config": {"model_type": "pixtral"}}).vision
    assert vision is not None
    assert (vision.patch_size, vision.hidden_size, vision.num_layers, vision.num_heads) == (16, 1024, 24, 16)


def test_an_image_whose_tokens_attend_to_each_other_fits_into_a_window(tmp_path: Path) -> None:
    subject = SUBJECTS["gemma4_both_ways"]
    text = {**subject.config["text_config"], "sliding_window": 69}
    written(written(tmp_path, "preprocessor_config.json", subject.processor), "config.json", {**subject.config, "text_config": text})
    with pytest.raises(ConfigError, match=r"an image has up to 70 tokens.*sliding_window is 69"):
        load_config(tmp_path)


def written(folder: Path, name: str, value: object) -> Path:
    (folder / name).write_text(json.dumps(value))
    return folder


def test_the_file_of_the_processor_is_read(tmp_path: Path, files: ModelFiles) -> None:
    vision, processor = files.config.vision, IDEFICS3.processor
    assert vision is not None
    with pytest.raises(ConfigError, match="has no preprocessor_config"):
        read_cutting(tmp_path, vision)
    later = read_cutting(written(tmp_path, "processor_config.json", {"image_processor": processor}), vision)
    found = read_cutting(written(tmp_path, "preprocessor_config.json", processor), vision)
    assert later == found
    assert (found.fit, found.mean) == (Tiles(longest_edge=144), (0.5, 0.4, 0.6))
    whole = read_cutting(written(tmp_path, "preprocessor_config.json", {**processor, "do_image_splitting": False}), vision)
    assert whole.fit == Tiles(longest_edge=144, splits=False)
    for name, value in (
        ("resample", 3),
        ("do_normalize", False),
        ("max_image_size", {"longest_edge": 32}),
        ("size", {"longest_edge": 1 << 20}),
        ("image_mean", [0.5]),
    ):
        with pytest.raises(ConfigError, match=name.removeprefix("max_image_").removesuffix("_size") if name == "size" else "expected"):
            read_cutting(written(tmp_path, "preprocessor_config.json", {**processor, name: value}), vision)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma3", "do_pan_and_scan", True),
        ("gemma3", "resample", 0),
        ("gemma3", "size", {"height": 48, "width": 96}),
        ("gemma3", "image_seq_length", 256),
        ("llava", "size", {"shortest_edge": 336}),
        ("llava", "crop_size", {"height": 48, "width": 24}),
        ("llava", "do_center_crop", False),
        ("llava", "do_pad", True),
        ("internvl", "min_patches", 2),
        ("internvl", "max_patches", 0),
        ("internvl", "use_thumbnail", False),
        ("internvl", "size", {"height": 448, "width": 448}),
        ("llama4", "size", {"height": 336, "width": 336}),
        ("llama4", "max_patches", 0),
        ("llama4", "max_patches", 65),
    ],
)
def test_other_ways_to_make_crops_are_refused(tmp_path: Path, name: str, field: str, value: object) -> None:
    vision = load_config(SUBJECTS[name].folder).vision
    assert vision is not None
    with pytest.raises(ConfigError, match=f"{field} of .* expected"):
        read_cutting(written(tmp_path, "preprocessor_config.json", {**SUBJECTS[name].processor, field: value}), vision)


def test_the_processor_says_how_an_image_fits_a_crop() -> None:
    fits = {name: vision.cutting.fit for name, subject in SUBJECTS.items() if (vision := load_config(subject.folder).vision) is not None}
    free = Free(least_pixels=12 * 256, most_pixels=40 * 256)
    mixed = Mixed(
        least_pixels=12 * 256, most_pixels=40 * 256, splits=True, least_crops=2, most_crops=4, tile_edge=48, unsplit_pixels=44 * 256
    )
    assert fits == {
        "idefics3": Tiles(longest_edge=144),
        "gemma3": Stretched(),
        "llava": Centre(),
        "llava_siglip": Stretched(),
        "internvl": Grid(most_crops=4),
        "llama4": Canvas(most_crops=6),
        **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), free),
        **dict.fromkeys(("glm4v", "glm4v_moe"), replace_fields(free, enlarges_edges=True)),
        "mistral3": Capped(96),
        "pixtral": Capped(50),
        "lfm2_vl": mixed,
        **dict.fromkeys(("gemma4", "gemma4_both_ways"), Filled(70 * 256)),
    }


@pytest.mark.parametrize(
    ("name", "filter", "mean"),
    [("gemma3", 2, 0.5), ("llava", 3, 0.48145466), ("llava_siglip", 3, 0.5), ("internvl", 3, 0.48145466), ("qwen2_vl", 3, 0.48145466)],
)
def test_what_the_file_of_the_processor_omits_is_that_of_its_class(tmp_path: Path, name: str, filter: int, mean: float) -> None:
    vision = load_config(SUBJECTS[name].folder).vision
    assert vision is not None
    given = {key: value for key, value in SUBJECTS[name].processor.items() if key not in ("resample", "image_mean", "image_std")}
    plain = parse_config(SUBJECTS[name].config).vision
    assert plain is not None
    found = read_cutting(written(tmp_path, "preprocessor_config.json", given), plain)
    assert (found.filter, found.mean[0]) == (filter, mean)


def test_a_qwen3_within_internvl_has_norms_of_heads() -> None:
    text = {**SUBJECTS["internvl"].config["text_config"], "model_type": "qwen3", "head_dim": 16}
    config = parse_config({**SUBJECTS["internvl"].config, "text_config": text})
    module = build_step(config, {}, BOUNDS, DType.F32, F32, entry=BOTH)
    assert any(weight.name.endswith("layers.0.self_attn.q_norm.weight") for weight in module.graph(BOTH).weights)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("idefics3", 2048),
        ("llava_siglip", 32_768),
        ("internvl", 32_768),
        ("glm4v", 32_768),
        ("glm4v_moe", 65_536),
        ("qwen2_vl", 32_768),
        ("qwen2_5_vl", 32_768),
        ("qwen3_vl", 128_000),
        ("mistral3", 131_072),
        ("pixtral", 131_072),
    ],
)
def test_a_decoder_has_the_context_of_its_class_unless_the_file_states_another(name: str, context: int) -> None:
    """Configurations of decoders within others leave out what equals the defaults of their class."""
    given = SUBJECTS[name].config
    text = {key: value for key, value in given["text_config"].items() if key != "max_position_embeddings"}
    assert parse_config({**given, "text_config": text}).max_context == context


def test_gemma_3_without_the_file_of_the_processor_only_reads_text(tmp_path: Path) -> None:
    assert load_config(written(tmp_path, "config.json", SUBJECTS["gemma3"].config)).vision is None
    assert parse_config({**SUBJECTS["gemma3"].config, "vision_config": {}}).vision is None
    with pytest.raises(ConfigError, match="has no preprocessor_config"):
        load_config(written(tmp_path, "config.json", SUBJECTS["llava"].config))


def test_a_processor_without_an_image_processor_only_reads_text(tmp_path: Path) -> None:
    """Mistral Small 3.1 has such a processor_config.json beside the file of the image processor."""
    subject = SUBJECTS["mistral3"]
    written(written(tmp_path, "config.json", subject.config), "processor_config.json", {"processor_class": "PixtralProcessor"})
    assert load_config(tmp_path).vision is None
    written(tmp_path, "processor_config.json", {"image_processor": subject.processor})
    assert load_config(tmp_path).vision is not None


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma3", "mm_tokens_per_image", 8),
        ("gemma3", "mm_tokens_per_image", 16),
        ("gemma3", "mm_tokens_per_image", 36),
        ("gemma3", "image_token_index", 500),
        ("llava", "vision_feature_select_strategy", "full"),
        ("llava", "vision_feature_layer", [-2, -5]),
        ("llava", "vision_feature_layer", -4),
        ("llava", "image_token_index", 91),
        ("llava_siglip", "vision_feature_select_strategy", "default"),
        ("internvl", "downsample_ratio", 0.3),
        ("internvl", "vision_feature_layer", -2),
        ("internvl", "image_token_id", 99),
        ("qwen2_vl", "image_token_id", 94),
        ("mistral3", "image_token_index", 93),
        ("mistral3", "vision_feature_layer", -2),
        ("pixtral", "vision_feature_select_strategy", "default"),
        ("glm4v", "image_token_id", 99),
        ("llama4", "image_token_index", 99),
    ],
)
def test_fields_that_no_program_follows_are_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{field} of config"):
        parse_config({**SUBJECTS[name].config, field: value})


@pytest.mark.parametrize(("layer", "count"), [(-1, 3), (-2, 2), (1, 1), (3, 3)])
def test_llava_reads_the_layer_that_its_configuration_names(layer: int, count: int) -> None:
    vision = parse_config({**SUBJECTS["llava"].config, "vision_feature_layer": layer}).vision
    assert vision is not None and vision.num_layers == count


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("vision_config", "image_size", 50),
        ("vision_config", "num_attention_heads", 5),
        ("vision_config", "num_channels", 1),
        ("text_config", "model_type", "mistral"),
        ("text_config", "qk_layer_norms", True),
    ],
)
def test_configurations_of_other_encoders_are_refused(part: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_config({**CONFIG, part: {**CONFIG[part], name: value}})


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3", "pixtral", "glm4v", "llama4"])
def test_the_base_of_the_rotation_by_row_and_column_is_read(name: str) -> None:
    given = SUBJECTS[name].config

    def theta(rope: object) -> float | None:
        vision = parse_config({**given, "vision_config": {**given["vision_config"], "rope_parameters": rope}}).vision
        return None if vision is None else vision.theta

    assert theta({"rope_type": "axial", "rope_theta": 500.0}) == 500.0
    assert theta({"rope_type": "default"}) == 10_000.0
    with pytest.raises(ConfigError, match=r"rope_type of rope_parameters of vision_config .* expected axial or default"):
        theta({"rope_type": "linear", "factor": 2.0})


@pytest.mark.parametrize(
    ("name", "part", "field", "value"),
    [
        ("qwen2_vl", "vision_config", "num_heads", 5),
        ("qwen2_vl", "vision_config", "in_channels", 4),
        ("qwen2_vl", "vision_config", "hidden_size", 65),
        ("qwen2_vl", "text_config", "rope_parameters", {"mrope_section": [2, 3, 4]}),
        ("qwen2_vl", "text_config", "rope_parameters", {"mrope_section": [2, 3, 3], "mrope_interleaved": True}),
        ("qwen2_5_vl", "vision_config", "window_size", 8),
        ("qwen2_5_vl", "vision_config", "fullatt_block_indexes", "all"),
        ("qwen3_vl", "vision_config", "num_position_embeddings", 37),
        ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [1, 0]),
        ("qwen3_vl", "vision_config", "deepstack_visual_indexes", [3]),
        ("mistral3", "vision_config", "head_dim", 16),
        ("mistral3", "vision_config", "num_attention_heads", 5),
        ("glm4v", "vision_config", "out_hidden_size", 65),
        ("glm4v", "vision_config", "image_size", 50),
        ("glm4v", "vision_config", "in_channels", 1),
        ("glm4v", "text_config", "rope_parameters", {"partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]}),
        ("glm4v", "text_config", "model_type", "glm4"),
        ("llama4", "vision_config", "intermediate_size", 80),
        ("llama4", "vision_config", "vision_output_dim", 64),
        ("llama4", "vision_config", "pixel_shuffle_ratio", 0.3),
        ("llama4", "vision_config", "norm_eps", 1e-6),
        ("llama4", "vision_config", "hidden_act", "silu"),
        ("llama4", "vision_config", "num_attention_heads", 8),
        ("llama4", "vision_config", "multi_modal_projector_bias", True),
    ],
)
def test_encoders_of_images_of_any_size_with_other_sizes_are_refused(name: str, part: str, field: str, value: object) -> None:
    config = SUBJECTS[name].config
    named = "mrope" if field == "rope_parameters" else field
    with pytest.raises(ConfigError, match=f"{named}.* of .* expected"):
        parse_config({**config, part: {**config[part], field: value}})


def test_an_image_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"image_token_id of config\.json is 102, expected a token of the vocabulary, below 102"):
        parse_config({**CONFIG, "image_token_id": 102})
