"""The config.json of every family becomes a ModelConfig: the same fields for all families, and rotary embeddings as in transformers. Errors
name a remedy."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordLevel

from compiler.frontend.config import Activation, EncoderConfig
from compiler.frontend.errors import ConfigError, ModelError, UnknownModel
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.frontend.registry import FAMILIES, load_config, parse_config
from compiler.frontend.rope import LinearScaling, Llama3Scaling, LongScaling, Rope, YarnScaling
from compiler.frontend.sentence import EmbeddingConfig, Pooling
from compiler.ir.dtypes import DType
from compiler.ir.graph.atoms import Var
from compiler.ir.types import tensor
from tests.unreadable import make_faulty

GOLDEN = Path(__file__).parents[2] / "golden" / "models"

MODELS = Path(__file__).parents[2] / "golden" / "models"
CAUSAL = sorted(path.parent.name for path in MODELS.glob("*/golden.npz") if "inv_freq" in np.load(path))

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def small(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    return {**SMALL, "model_type": model_type, **changes}


@pytest.mark.parametrize("case", CAUSAL)
def test_positions_turn_as_in_transformers(case: str) -> None:
    config, golden = load_config(MODELS / case), np.load(MODELS / case / "golden.npz")
    assert config.rope is not None
    frequencies, scale = config.rope.frequencies(config.max_context)
    np.testing.assert_allclose(frequencies, golden["inv_freq"], rtol=1e-6)
    assert scale == pytest.approx(golden["rope_scale"], rel=1e-6)
    if "local_inv_freq" in golden:
        assert config.local_rope is not None
        np.testing.assert_allclose(config.local_rope.frequencies(config.max_context)[0], golden["local_inv_freq"], rtol=1e-6)


def test_defaults_are_those_of_transformers() -> None:
    llama = parse_config(small())
    assert (llama.num_kv_heads, llama.head_dim, llama.norm_eps, llama.max_context) == (4, 16, 1e-6, 2048)
    assert (llama.attention_scale, llama.windows, llama.rope) == (0.25, (None,) * 3, Rope(10000.0, 16))
    assert not (llama.tie_word_embeddings or llama.qkv_bias or llama.mlp_bias)
    assert parse_config(small("mistral")).windows == (4096,) * 3
    assert parse_config(small("mistral", sliding_window=None)).windows == (None,) * 3
    assert parse_config(small("qwen3")).head_dim == 128
    gemma2 = parse_config(small("gemma2"))
    assert (gemma2.attention_softcap, gemma2.logit_softcap, gemma2.windows) == (50.0, 30.0, (4096, None, 4096))
    assert (gemma2.tie_word_embeddings, gemma2.norm_offset) == (True, 1.0)
    gemma3 = parse_config(small("gemma3_text", num_hidden_layers=7, rope_scaling={"rope_type": "linear", "factor": 8}))
    assert gemma3.windows == (4096,) * 5 + (None,) + (4096,)
    assert (gemma3.attention_softcap, gemma3.max_context) == (None, 131072)
    assert gemma3.rope_of_layer(5) == Rope(1e6, 256, LinearScaling(8.0))
    assert gemma3.rope_of_layer(6) == Rope(1e4, 256)


@pytest.mark.parametrize(
    ("case", "context"),
    [
        *((case, 4096) for case in ("arcee", "helium", "nemotron", "olmoe", "stablelm", "starcoder2", "phi3")),
        *((case, 8192) for case in ("cohere", "cohere2", "gemma", "gemma2")),
        *((case, 32_768) for case in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3")),
        *((case, 131_072) for case in ("ernie4_5", "ernie4_5_moe", "gemma3", "glm", "glm4", "glm4_moe", "mistral", "mixtral")),
        ("seed_oss", 524_288),
        ("olmo2", 2048),
    ],
)
def test_the_context_of_a_family_counts_where_the_file_states_none(case: str, context: int) -> None:
    values = json.loads((MODELS / case / "config.json").read_text())
    text = values.get("text_config", values)
    del text["max_position_embeddings"]
    assert parse_config(values).max_context == context


@pytest.mark.parametrize(("case", "theta"), [("mixtral", 1e6), ("qwen2_vl", 1e6), ("qwen2_5_vl", 1e6), ("apertus", 12e6)])
def test_the_base_of_rope_of_a_family_counts_where_the_file_states_none(case: str, theta: float) -> None:
    values = json.loads((MODELS / case / "config.json").read_text())
    text = values.get("text_config", values)
    scaling = text.pop("rope_scaling", {"rope_type": "default"})
    del text["rope_theta"]
    for name in ("rope_scaling", "rope_parameters"):
        text[name] = scaling
        assert (rope := parse_config(values).rope) is not None and rope.theta == theta
        text[name] = {**text.pop(name), "rope_theta": 77.0}
        assert (rope := parse_config(values).rope) is not None and rope.theta == 77.0
        del text[name]


@pytest.mark.parametrize(
    ("case", "written"),
    [
        ("qwen2_moe", {"sliding_window": 0}),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": 0, "layer_types": ["full_attention"] * 4}),
        ("internlm3", {"bias": None, "qkv_bias": None, "attention_bias": True, "mlp_bias": True}),
    ],
)
def test_files_that_transformers_wrote_again_are_read(case: str, written: dict[str, Any]) -> None:
    values = json.loads((MODELS / case / "config.json").read_text())
    if case == "exaone4":
        values = {**values, "sliding_window": None, "layer_types": None}
    assert parse_config({**values, **written}) == parse_config(values)


def test_files_that_transformers_4_wrote_again_are_read() -> None:
    """It writes some model types in another way, and fields of the decoder for encoders."""

    def read(case: str) -> dict[str, Any]:
        return json.loads((GOLDEN.parent / case / "config.json").read_text())

    granite, lfm2, glm = read("models/granitemoe"), read("vision_models/lfm2_vl"), read("vision_models/glm4v_moe")
    assert parse_config({**granite, "position_embedding_type": "rope"}) == parse_config(granite)
    assert parse_config({**lfm2, "model_type": "lfm2-vl"}) == parse_config(lfm2)
    assert parse_config({**glm, "text_config": {**glm["text_config"], "model_type": "Glm4vMoe_text"}}) == parse_config(glm)
    with pytest.raises(ConfigError, match=r"model_type of text_config of config\.json is 'glm4v_text', expected glm4v_moe_text"):
        parse_config({**glm, "text_config": {**glm["text_config"], "model_type": "glm4v_text"}})
    with pytest.raises(ConfigError, match=r"position_embedding_type of config\.json is 'nope', expected rope"):
        parse_config({**granite, "position_embedding_type": "nope"})
    for name in ("qwen2_5_omni", "qwen3_omni_moe"):
        given = read(f"omni_models/{name}")
        thinker = dict(given["thinker_config"])
        for part in ("vision_config", "audio_config"):
            thinker[part] = {**thinker[part], "tie_word_embeddings": True}
        assert parse_config({**given, "thinker_config": thinker}) == parse_config(given)


@pytest.mark.parametrize(("stated", "local"), [({"local_rope_theta": None}, 5e4), ({"local_rope_theta": 7.0}, 7.0), ({}, 1e4)])
def test_windows_of_modernbert_may_have_the_base_of_other_layers(stated: dict[str, Any], local: float) -> None:
    values = json.loads((MODELS / "modernbert" / "config.json").read_text())
    values = {name: value for name, value in values.items() if not name.startswith("rope") and not name.endswith("rope_theta")}
    config = parse_config({**values, "global_rope_theta": 5e4, **stated})
    assert config.rope is not None and config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (5e4, local)


@pytest.mark.parametrize(
    ("model_type", "name", "kind"),
    [
        ("gemma3_text", "rope_local_base_freq", "sliding_attention"),
        ("modernbert", "local_rope_theta", "sliding_attention"),
        ("modernbert", "global_rope_theta", "full_attention"),
    ],
)
def test_older_fields_beside_rope_parameters_may_only_repeat_them(model_type: str, name: str, kind: str) -> None:
    """transformers 4 keeps rope_parameters, which it does not know, and writes its own fields beside them."""
    kinds = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    values = small(model_type, rope_parameters=kinds)
    assert parse_config({**values, name: kinds[kind]["rope_theta"]}) == parse_config(values)
    with pytest.raises(
        ConfigError, match=rf"{name} of config\.json is 1000\.0, expected .* rope_parameters\.{kind}\.rope_theta, the newer"
    ):
        parse_config({**values, name: 1000.0})


def test_phi_3_was_trained_on_contexts_of_4096_tokens_if_its_file_does_not_say_so() -> None:
    values = json.loads((MODELS / "phi3-longrope" / "config.json").read_text())
    del values["original_max_position_embeddings"]
    rope = parse_config({**values, "max_position_embeddings": 8192}).rope
    assert rope is not None and isinstance(rope.scaling, LongScaling) and rope.scaling.original_context == 4096


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_the_outer_original_context_of_phi_3_overrides_that_of_the_rope(name: str) -> None:
    """As in transformers, whose configuration of this family always has the outer field. Other families keep that of the rope."""
    values = json.loads((MODELS / "phi3-longrope" / "config.json").read_text())
    longrope = values.pop("rope_scaling")
    rope = parse_config({**values, name: {**longrope, "original_max_position_embeddings": 64}}).rope
    assert rope is not None and rope == parse_config({**values, name: longrope}).rope
    assert isinstance(rope.scaling, LongScaling) and rope.scaling.original_context == 32
    other = {
        **small(),
        "rope_scaling": {**longrope, "short_factor": [1] * 8, "long_factor": [2] * 8},
        "original_max_position_embeddings": 32,
    }
    other["rope_scaling"]["original_max_position_embeddings"] = 64
    rope = parse_config(other).rope
    assert rope is not None and isinstance(rope.scaling, LongScaling) and rope.scaling.original_context == 64


@pytest.mark.parametrize("case", ["ministral3", "mixtral", "phi3", "phimoe", "starcoder2"])
def test_kinds_of_layers_that_disagree_with_the_one_window_are_refused(case: str) -> None:
    """transformers ignores `layer_types` in these families when it masks attention."""
    values = json.loads((MODELS / case / "config.json").read_text())
    count = values["num_hidden_layers"]
    full, sliding = ["full_attention"] * count, ["sliding_attention"] * count
    with_window, without = ({**values, "sliding_window": window} for window in (8, None))
    assert parse_config({**with_window, "layer_types": sliding}) == parse_config(with_window)
    assert parse_config({**without, "layer_types": full}) == parse_config(without)
    for kinds in (full, [*full[1:], "sliding_attention"]):
        with pytest.raises(ConfigError, match=r"layer_types of .* expected sliding_attention for all layers, as sliding_window is 8"):
            parse_config({**with_window, "layer_types": kinds})
    with pytest.raises(ConfigError, match=r"sliding_window of .* expected a number of tokens"):
        parse_config({**without, "layer_types": sliding})


@pytest.mark.parametrize("case", ["qwen2_moe", "qwen3_moe"])
def test_a_window_of_a_qwen_with_experts_is_refused(case: str) -> None:
    """transformers would give it to every other layer of the former and to all layers of the latter, unlike in Qwen2 and Qwen3."""
    values = json.loads((MODELS / case / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"use_sliding_window of config\.json is True, expected false, as in all models"):
        parse_config({**values, "use_sliding_window": True, "sliding_window": 8})


def test_windows_follow_the_layers() -> None:
    window = {"sliding_window": 8, "use_sliding_window": True}
    assert parse_config(small("qwen2", **window, max_window_layers=2)).windows == (None, None, 8)
    assert parse_config(small("qwen2", **{**window, "use_sliding_window": False})).windows == (None,) * 3
    assert parse_config(small("qwen2", **{**window, "sliding_window": None}, max_window_layers=0)).windows == (None,) * 3
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert parse_config(small("gemma2", sliding_window=8, layer_types=types)).windows == (None, 8, None)
    with pytest.raises(ConfigError, match="layer_types of config"):
        parse_config(small("gemma2", layer_types=types[:2]))


@pytest.mark.parametrize(
    ("scaling", "expected", "max_context"),
    [
        (None, None, 64),
        ({"type": "linear", "factor": 2}, LinearScaling(2.0), 128),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
            Llama3Scaling(8.0, 1.0, 4.0, 16),
            64,
        ),
        ({"type": "yarn", "factor": 4.0}, YarnScaling(4.0, 64, 32.0, 1.0, 0.1 * np.log(4.0) + 1, True), 256),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
            YarnScaling(4.0, 16, 32.0, 1.0, 1.0, True),
            64,
        ),
    ],
)
def test_scalings_in_either_vocabulary(scaling: dict[str, Any] | None, expected: object, max_context: int) -> None:
    old = parse_config(small(max_position_embeddings=64, rope_theta=5000.0, rope_scaling=scaling))
    new = parse_config(small(max_position_embeddings=64, rope_parameters={"rope_theta": 5000.0, **(scaling or {})}))
    assert old == new
    assert old.rope == Rope(5000.0, 16, expected)  # type: ignore[arg-type]  # a scaling or None
    assert old.max_context == max_context


def test_encoders() -> None:
    bert, roberta, mpnet = (load_config(MODELS / case) for case in ("bert", "roberta", "mpnet"))
    assert bert.encoder == EncoderConfig(num_positions=66, position_offset=0, num_segments=2)
    assert roberta.encoder == EncoderConfig(num_positions=66, position_offset=2, num_segments=1)
    assert mpnet.encoder == EncoderConfig(num_positions=66, position_offset=2, num_segments=0, relative_buckets=32)
    assert (bert.max_context, roberta.max_context, mpnet.max_context) == (66, 64, 64)
    assert not bert.is_causal
    assert load_config(MODELS / "bert-cls").activation == Activation.GELU_TANH


@pytest.mark.parametrize("case", ["bert", "roberta", "camembert", "xlm-roberta", "electra", "distilbert", "mpnet"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_an_encoder_is_read_whatever_its_head_for_masked_tokens_shares(case: str, is_tied: bool) -> None:
    """transformers 5 writes the field into the file of every encoder."""
    values = json.loads((MODELS / case / "config.json").read_text())
    assert parse_config({**values, "tie_word_embeddings": is_tied}) == parse_config(values)


def test_pooling_beside_the_model() -> None:
    assert load_config(MODELS / "bert").embedding == EmbeddingConfig(Pooling.MEAN, True, max_tokens=48, is_stated=True)
    prompts = (("query", "Find: "), ("document", ""))
    assert load_config(MODELS / "bert-cls").embedding == EmbeddingConfig(Pooling.CLS, False, prompts, "query", 64, is_stated=True)
    assert load_config(MODELS / "qwen3-embedding").embedding.pooling == Pooling.LAST
    assert load_config(MODELS / "llama").embedding == EmbeddingConfig(Pooling.LAST, True)


@pytest.mark.parametrize(
    ("sentence", "tokenizer", "expected"),
    [
        ({"max_seq_length": 48}, 20, 48),
        ({}, 20, 20),
        ({"max_seq_length": None}, 20, 20),
        ({}, 131_072, None),
        ({}, int(1e30), None),
        ({}, None, None),
    ],
)
def test_the_longest_text_may_be_that_of_the_tokenizer(
    tmp_path: Path, sentence: dict[str, Any], tokenizer: int | None, expected: int | None
) -> None:
    """Newer versions of sentence-transformers store it there."""
    shutil.copytree(MODELS / "bert", tmp_path, dirs_exist_ok=True)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(sentence))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": tokenizer}))
    assert load_config(tmp_path).embedding.max_tokens == expected
    (tmp_path / "modules.json").unlink()
    assert load_config(tmp_path).embedding.max_tokens == sentence.get("max_seq_length")


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_the_first_versions_of_sentence_transformers_named_a_file_by_the_model(tmp_path: Path, kind: str) -> None:
    shutil.copytree(MODELS / "bert", tmp_path, dirs_exist_ok=True)
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / f"sentence_{kind}_config.json")
    assert load_config(tmp_path).embedding.max_tokens == 48
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 20}))
    assert load_config(tmp_path).embedding.max_tokens == 20
    (tmp_path / "sentence_bert_config.json").unlink()
    (tmp_path / f"sentence_{kind}_config.json").write_text(json.dumps({"do_lower_case": True}))
    with pytest.raises(ConfigError, match=f"do_lower_case of sentence_{kind}_config.json is True, expected false"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("normalizer", "lowers"),
    [
        (normalizers.BertNormalizer(), True),
        (normalizers.BertNormalizer(lowercase=False), False),
        (normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]), True),
        (normalizers.Sequence([normalizers.NFD()]), False),
        (None, False),
    ],
)
def test_texts_may_be_lower_case_if_the_tokenizer_makes_them_so(tmp_path: Path, normalizer: Any, lowers: bool) -> None:
    """sentence-transformers then lower-cases a second time, which changes nothing but a capital sigma at the end of a word."""
    shutil.copytree(MODELS / "distilbert", tmp_path, dirs_exist_ok=True)
    expected = load_config(tmp_path)
    tokenizer = Tokenizer(WordLevel({"a": 0}, "a"))
    tokenizer.normalizer = normalizer
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    stated = json.loads((tmp_path / "sentence_bert_config.json").read_text())
    (tmp_path / "sentence_bert_config.json").unlink()
    (tmp_path / "sentence_distilbert_config.json").write_text(json.dumps({**stated, "do_lower_case": True}))
    if lowers:
        assert load_config(tmp_path) == expected
    else:
        with pytest.raises(ConfigError, match=r"do_lower_case of sentence_distilbert_config\.json is True, expected false, because"):
            load_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.CNN"}], "Transformer, Pooling, Dense, Normalize or LogitScore"),
        (
            "modules.json",
            [{"type": "models.Transformer"}, {"type": "models.Dense"}],
            "expected Dense only after Pooling or Dense, but it follows Transformer",
        ),
        (
            "modules.json",
            [
                {"type": "models.Transformer"},
                {"type": "models.Pooling", "path": "1_Pooling"},
                {"type": "models.Normalize"},
                {"type": "models.Dense"},
            ],
            "expected Dense only after Pooling or Dense, but it follows Normalize",
        ),
        (
            "modules.json",
            [{"type": "models.Transformer"}, {"type": "models.Normalize"}, {"type": "models.Pooling", "path": "1_Pooling"}],
            "expected Pooling only after Transformer or LogitScore, but it follows Normalize",
        ),
        (
            "modules.json",
            [{"type": "models.Pooling", "path": "1_Pooling"}, {"type": "models.Transformer"}],
            "expected Transformer only after Transformer, but it follows Pooling",
        ),
        ("modules.json", [{"type": "models.Normalize", "module_input_name": "token_embeddings"}], "expected sentence_embedding"),
        ("modules.json", {}, "not a list"),
        ("modules.json", [{"type": "x.Pooling", "path": "../elsewhere"}], "the name of a folder"),
        ("1_Pooling/config.json", {"pooling_mode_attention": True}, "attention, expected one of mean_tokens"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "expected one of"),
        ("1_Pooling/config.json", {"pooling_mode": "attention"}, "one of mean, cls, lasttoken, max, weightedmean, mean_sqrt_len_tokens"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "an object of texts"),
        ("config_sentence_transformers.json", {"prompts": {"a": "b"}, "default_prompt_name": "c"}, "one of a"),
    ],
)
def test_what_sentence_files_ask_for_is_honoured_or_refused(tmp_path: Path, file: str, content: object, message: str) -> None:
    (tmp_path / "1_Pooling").mkdir()
    for name in ("config.json", "modules.json", "1_Pooling/config.json"):
        (tmp_path / name).write_text((MODELS / "bert" / name).read_text())
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path)


SENTENCE_FILES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json")


@pytest.mark.parametrize("name", SENTENCE_FILES)
def test_a_file_that_is_gone_from_behind_its_link_is_not_absent(tmp_path: Path, name: str) -> None:
    """Such as one of the hub's cache whose content was lost. Without it, texts would have other vectors."""
    shutil.copytree(MODELS / "bert-cls", tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "lost")
    with pytest.raises(ConfigError, match=f"{Path(name).name} cannot be read: it is a link to .*lost, which does not exist"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", SENTENCE_FILES)
def test_a_file_that_cannot_be_looked_for_is_not_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    shutil.copytree(MODELS / "bert-cls", tmp_path, dirs_exist_ok=True)
    make_faulty(monkeypatch, tmp_path / name)
    with pytest.raises((ConfigError, OSError), match="Input/output error"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "config.json has no vocab_size, expected an integer from 1"),
        ({"vocab_size": "many"}, "vocab_size of config.json is 'many', expected an integer from 1"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, r"a divisor of num_attention_heads \(4\)"),
        ({"hidden_act": "swoosh"}, "hidden_act.*one of silu"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type.*one of default, dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of config.json has no factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0.5}}, "at least 1"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "a list of 8 positive numbers"),
        ({"rope_scaling": [1]}, "expected an object"),
        ({"partial_rotary_factor": 0.5}, "expected all of them for llama"),
        ({"partial_rotary_factor": 1e20}, "dimensions of a head would be rotated"),
        ({"use_bidirectional_attention": True}, "not supported for llama: use_bidirectional_attention: True. Delete"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "novel": 3}}, "rope_scaling.novel: 3"),
        ({"is_causal": False, "model_type": "gemma"}, "is_causal of config.json is False, expected true"),
        (
            {"model_type": "mistral3", "text_config": {"is_causal": False}},
            "is_causal of text_config of config.json is False, expected true",
        ),
        ({"is_causal": False, "architectures": ["LlamaForSequenceClassification"]}, "expected no classification head, because attention"),
        (
            {"model_type": "llama_bidirec", "pooling": "weighted_avg"},
            "pooling of config.json is 'weighted_avg', expected one of avg, cls, la",
        ),
        (
            {"model_type": "qwen2", "is_causal": False, "use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window of config.json is True, expected false, because windows are supported in causal attention only",
        ),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(small(**changes))


def test_a_gemma_whose_tokens_see_the_future_is_an_encoder() -> None:
    """A config of model type gemma3_text whose tokens attend to later tokens is an EmbeddingGemma encoder. The window of such an encoder is
    centred on a token, so half of the window lies before the token."""
    config = parse_config(small("gemma3_text", use_bidirectional_attention=True, sliding_window=12, num_hidden_layers=6))
    assert config.family == "embeddinggemma" and not config.is_causal
    assert config.encoder is not None and config.encoder.reaches == (6, 6, 6, 6, 6, None)


@pytest.mark.parametrize("both_ways", [False, True])
def test_a_soft_cap_of_the_attention_of_gemma_3_is_refused(both_ways: bool) -> None:
    """transformers ignores the field, so it is unknown whether the model was trained with one."""
    with pytest.raises(ConfigError, match=r"attn_logit_softcapping of config\.json is 50\.0, expected null: transformers has no soft cap"):
        parse_config(small("gemma3_text", use_bidirectional_attention=both_ways, attn_logit_softcapping=50.0))


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_decoder_whose_attention_is_not_causal_is_an_encoder(model_type: str) -> None:
    config = parse_config(small(model_type, is_causal=False))
    assert config.family == "llama_bidirec" and not config.is_causal
    assert (config.qkv_bias, config.head_norms) == (model_type == "qwen2", model_type == "qwen3")
    assert config.embedding == EmbeddingConfig(Pooling.LAST, True)
    assert parse_config(small(model_type, is_causal=True)) == parse_config(small(model_type))


def test_kimi_k2_is_deepseek_v3_under_another_name() -> None:
    values = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    expected, found = parse_config(values), parse_config({**values, "model_type": "kimi_k2"})
    assert replace(found, family="deepseek_v3") == expected and FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]


def test_transformers_calls_a_mistral_with_kinds_of_layers_ministral() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    written = small("ministral", layer_types=kinds, sliding_window=16)
    found = parse_config(written)
    assert found.windows == (16, None, 16)
    assert replace(found, family="mistral") == parse_config({**written, "model_type": "mistral"})


PHI_MOE = json.loads((MODELS / "phimoe" / "config.json").read_text())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 3}, "num_experts_per_tok of config.json is 3, expected 2"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type of rope_scaling of config.json is None, expected default or longrope",
        ),
        ({"rope_scaling": {**PHI_MOE["rope_scaling"], "short_mscale": None}}, "rope_scaling of config.json has no short_mscale"),
    ],
)
def test_what_phi_moe_cannot_have_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**PHI_MOE, **changes})


def test_phi_moe_scales_rotations_by_the_longest_context() -> None:
    rope = parse_config(PHI_MOE).rope
    assert rope is not None and [rope.frequencies(context)[1] for context in (32, 33)] == [1.1, 1.25]
    plain = parse_config({name: value for name, value in PHI_MOE.items() if not name.startswith("rope")})
    assert plain.rope == Rope(1e6, 16) and plain.mixture is not None and plain.mixture.sparse_limit == 0.5


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func of config.json is 'softmax', expected sigmoid"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type of config.json is 'per_head', expected per_layer"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias of config.json is False, expected true"),
        ("minimax_m2", {"use_routing_bias": 1}, "use_routing_bias of config.json is 1, expected true"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size of config.json is 8, expected 0"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, r"attn_type_list of config.json is \[1, 0\], expected a list of ones"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func of config.json is 'softmax', expected sigmoid"),
        ("dots1", {"topk_method": "greedy"}, "topk_method of config.json is 'greedy', expected noaux_tc"),
        ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq of config.json is 2, expected 1"),
        ("apertus", {"qk_norm": False}, "qk_norm of config.json is False, expected true"),
        ("apertus", {"post_norm": True}, "post_norm of config.json is True, expected false"),
    ],
)
def test_what_no_model_of_a_family_has_is_refused(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**json.loads((MODELS / case / "config.json").read_text()), **changes})


def test_minicpm_computes_its_factors_from_its_sizes() -> None:
    minicpm = small("minicpm", num_hidden_layers=4, scale_emb=12, scale_depth=1.4, dim_model_base=16)
    config = parse_config(minicpm)
    assert (config.embedding_scale, config.residual_scale, config.logit_scale) == (12.0, 0.7, 0.25)
    assert config.tie_word_embeddings and config.attention_scale == 0.25
    with pytest.raises(ConfigError, match=r"config.json has no scale_depth"):
        parse_config({**minicpm, "scale_depth": None})
    for field, value in (("num_experts", 8), ("sparse_config", {"topk": 64})):
        with pytest.raises(ConfigError, match=field):
            parse_config({**minicpm, field: value})


def test_minimax_m2_rotates_part_of_each_head() -> None:
    rope = parse_config(small("minimax_m2", head_dim=32, num_key_value_heads=2, rotary_dim=16)).rope
    assert rope == Rope(5e6, 16)


def test_dots1_has_windows_behind_its_last_full_layer() -> None:
    dots1 = small("dots1", num_hidden_layers=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    assert parse_config({**dots1, "max_window_layers": 3}).windows == (None, None, None, 4096)
    assert parse_config({**dots1, "max_window_layers": 3, "sliding_window": None}).windows == (None,) * 4
    assert parse_config(dots1).windows == (None,) * 4


def test_dots1_may_state_how_experts_are_chosen() -> None:
    """Published files have fields that transformers does not read: vLLM has no defaults for them."""
    dots1 = small("dots1", num_hidden_layers=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    assert parse_config({**dots1, "topk_method": "noaux_tc", "moe_layer_freq": 1}) == parse_config(dots1)


def test_apertus_has_the_defaults_of_transformers() -> None:
    config = parse_config(small("apertus", hidden_act=None, rope_theta=None))
    assert (config.activation, config.norm_eps) == (Activation.XIELU, 1e-5)
    assert config.rope == Rope(12e6, config.head_dim, Llama3Scaling(8.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize("activation", ["relu2", "xielu"])
@pytest.mark.parametrize(
    ("case", "field", "message"),
    [
        ("bert", "hidden_act", "hidden_act of config.json is '{}', expected one of silu"),
        ("modernbert", "hidden_activation", "the activation of config.json is {}, which no encoder has"),
    ],
)
def test_activations_that_no_encoder_has_are_refused(case: str, field: str, message: str, activation: str) -> None:
    values = json.loads((MODELS / case / "config.json").read_text())
    with pytest.raises(ConfigError, match=message.format(activation)):
        parse_config({**values, field: activation})


def test_command_r_was_trained_on_more_than_its_positions() -> None:
    command_r = small("cohere", max_position_embeddings=8192, model_max_length=131_072)
    assert parse_config(command_r).max_context == 131_072
    assert parse_config({**command_r, "model_max_length": None}).max_context == 8192


def test_internlm_2_has_biases_unless_the_file_denies_it() -> None:
    with_bias, without = parse_config(small("internlm2")), parse_config(small("internlm2", bias=False))
    assert with_bias == replace(without, qkv_bias=True, output_bias=True) and not (without.qkv_bias or with_bias.mlp_bias)


def test_exaone_has_former_names_of_fields() -> None:
    exaone = {name: value for name, value in small("exaone", num_layers=5, layer_norm_epsilon=1e-4).items() if name != "num_hidden_layers"}
    config = parse_config({**exaone, "activation_function": "gelu"})
    assert (config.num_layers, config.norm_eps, config.activation) == (5, 1e-4, Activation.GELU)


def test_models_of_nvidia_state_their_pooling_in_the_configuration() -> None:
    assert parse_config(small("llama_bidirec")).embedding.pooling == Pooling.MEAN
    assert parse_config(small("llama_bidirec", pooling="last")).embedding.pooling == Pooling.LAST


@pytest.mark.parametrize("field", ["moe_every_n_layers", "prenorm", "rotary_scaling_factor", "qkv_proj_bias"])
def test_another_layer_of_nomic_is_refused(field: str) -> None:
    values = json.loads((GOLDEN / "nomic_bert" / "config.json").read_text())
    with pytest.raises(
        ConfigError, match=f"{field} of config.json is .*, expected no value, because any value selects a layer that is not supported"
    ):
        parse_config({**values, field: 2 if field == "moe_every_n_layers" else True})


def test_a_nested_text_model_is_read_as_one_of_its_own() -> None:
    flat = json.loads((GOLDEN / "qwen3_5_moe" / "config.json").read_text())
    nested = {"model_type": "qwen3_5_moe", "text_config": flat, "vision_config": {"model_type": "qwen3_5_moe"}}
    assert parse_config(nested) == parse_config(flat)


def test_metadata_and_what_asks_for_nothing_may_stay_unread() -> None:
    metadata = {"transformers_version": "5.0", "torch_dtype": "bfloat16", "attention_dropout": 0.1, "eos_token_id": [1, 2], "_name": "x"}
    nothing = {"use_mrope": False, "novel": None, "num_experts": 0, "pruned": {}}
    assert parse_config(small(**metadata, **nothing)) == parse_config(small())


@pytest.mark.parametrize("case", ["llama", "mistral3"])
def test_a_field_that_names_another_file_of_weights_is_refused(case: str) -> None:
    """transformers reads the weights from the file that the field names, even if there is a model.safetensors."""
    values = json.loads((MODELS / case / "config.json").read_text())
    for name in (None, "model.safetensors", "model.safetensors.index.json"):
        assert parse_config({**values, "transformers_weights": name}) == parse_config(values)
    with pytest.raises(ConfigError, match=r"transformers_weights of config\.json is 'other\.safetensors', expected model\.safetensors or"):
        parse_config({**values, "transformers_weights": "other.safetensors"})
    assert parse_config({**values, "transformers.js_config": {"dtype": "q4"}}) == parse_config(values)


def test_dynamic_scaling_grows_from_the_declared_context() -> None:
    """transformers and vLLM do not read the original context for this scaling, which changes nothing within the declared context."""
    plain = small(max_position_embeddings=64, rope_scaling={"type": "dynamic", "factor": 2.0})
    stated = small(max_position_embeddings=64, rope_scaling={**plain["rope_scaling"], "original_max_position_embeddings": 16})
    rope = parse_config(stated).rope
    assert rope == parse_config(plain).rope and rope is not None
    np.testing.assert_array_equal(rope.frequencies(64)[0], Rope(10000.0, 16).frequencies(64)[0])


def test_mscale_of_zero_counts_as_absent() -> None:
    yarn = {"type": "yarn", "factor": 4.0}
    assert parse_config(small(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0.0})) == parse_config(small(rope_scaling=yarn))


@pytest.mark.parametrize(("inputs", "advice"), [(208, "choose int8$"), (96, "choose int8 or int4-32$")])
def test_a_group_that_does_not_fit_advises_groups_that_do(inputs: int, advice: str) -> None:
    net = Net({}, WeightFormat(4, 64))
    rows = Var("rows", tensor((1, inputs), DType.F32))
    with pytest.raises(ConfigError, match=advice), net.function("f", [rows]):
        net.linear(rows, "layer", inputs, 32)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func of config.json is 'softmax', expected sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method of config.json is 'greedy', expected noaux_tc"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias of config.json is True, expected false"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min of config.json is 0.5, expected at most"),
        ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window of config.json is True, expected false"),
    ],
)
def test_other_mixtures_are_refused(case: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**json.loads((MODELS / case / "config.json").read_text()), **changes})


def test_hunyuan_stretches_the_base_by_alpha() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    assert parse_config(small("hunyuan_v1_dense", rope_scaling=scaling)).rope == Rope(10000.0 * 1000 ** (16 / 14), 16)


def test_layers_without_rotation() -> None:
    assert parse_config(small("smollm3", num_hidden_layers=4)).unrotated == {3}
    assert parse_config(small("smollm3", no_rope_layers=[1, 0, 1])).unrotated == {1}
    assert parse_config(small("cohere2", num_hidden_layers=4)).unrotated == {3}
    assert parse_config(small("exaone4", sliding_window_pattern="LG")).unrotated == {1, 2}
    assert parse_config(small("exaone4", sliding_window_pattern=2)).unrotated == {1}  # a number gives the last layer a window, too
    assert parse_config(small("exaone4", sliding_window=None)).unrotated == set()
    with pytest.raises(ConfigError, match="no_rope_layers"):
        parse_config(small("smollm3", no_rope_layers=[1, 2, 0]))


def test_unknown_models_are_refused_with_what_is_known() -> None:
    with pytest.raises(UnknownModel, match=r"'rwkv' is not known; known are apertus, arcee, bert, camembert.*xlm-roberta$"):
        parse_config({"model_type": "rwkv", "attention_hidden_size": 1})


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path)
    for content in ("{", "[" * 100_000, "[]", "\xff"):
        (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_config(tmp_path)


def test_an_adapter_is_refused_with_the_way_to_merge_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}))
    with pytest.raises(ModelError, match=r"it is an adapter \(LoRA\) for 'org/base'.*merge_and_unload"):
        load_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"adapter_config.json is \[\], expected an object"):
        load_config(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelError, match=r"params\.json belongs to a publisher's own format; take the model's files for transformers"):
        load_config(tmp_path)


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    """With peft, transformers applies it to its base or to the weights. The folder does not say whether the weights have it already."""
    (tmp_path / "config.json").write_text(json.dumps(small()))
    assert load_config(tmp_path).family == "llama"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "org/base"}))
    assert load_config(tmp_path).family == "llama", "without weights of an adapter, only its configuration is left over"
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"has adapter_config\.json beside its config\.json: .* adapter \(LoRA\) for 'org/base'.*a copy"):
        load_config(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "factor", "rope_type"]), inner),
    max_leaves=5,
)
OPTIONAL = {"head_dim", "num_key_value_heads", "rope_scaling", "rope_parameters", "rope_theta", "sliding_window"}
NAMES = sorted((SMALL.keys() | OPTIONAL) - {"model_type"})


@given(st.sampled_from(sorted(FAMILIES)), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
def test_any_values_parse_or_are_refused(family: str, changes: dict[str, Any]) -> None:
    try:
        config = parse_config(small(family, **changes))
    except ModelError:
        return
    assert len(config.windows) == config.num_layers
    assert config.num_heads % config.num_kv_heads == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_method": "group_limited_greedy"}, "topk_method of config.json is 'group_limited_greedy', expected greedy"),
        ({"norm_topk_prob": True}, "norm_topk_prob of config.json is True, expected false"),
        ({"attention_bias": True}, "attention_bias of config.json is True, expected false"),
    ],
)
def test_latents_of_other_kinds_are_refused(changes: dict[str, Any], message: str) -> None:
    values = json.loads((MODELS / "deepseek_v2" / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        parse_config({**values, **changes})


def test_all_heads_attend_to_one_latent() -> None:
    """In DeepSeek V2 all query heads attend to one latent head. The attention scale is computed from the full head size, and multiplied by
    the square of the factor that YaRN prescribes for extended contexts."""
    config = load_config(MODELS / "deepseek_v2")
    assert (config.num_kv_heads, config.head_dim, config.num_heads) == (1, 32 + 8, 4)
    assert config.attention_scale == pytest.approx(24**-0.5 * (0.1 * 0.707 * math.log(4) + 1) ** 2)
    assert config.rope is not None and (config.rope.size, config.rope.interleaved) == (8, True)
