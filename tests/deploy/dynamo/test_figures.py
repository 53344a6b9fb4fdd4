"""The figures of a cache in the metrics of a server."""

from __future__ import annotations

from deploy.dynamo.figures import Figures, figures_in

PAGE = r"""# HELP vllm:kv_cache_usage_perc Used share of the KV pages, 0 to 1.
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.25
vllm:kv_cache_usage_perc{engine="0",model_name="b\"}"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="a"} 200.0
vllm:prefix_cache_hits_total{engine="0",model_name="a"} 50.0
vllm:cache_config_info{block_size="16",cache_dtype="bf16",enable_prefix_caching="True",engine="0",model_name="a",num_gpu_blocks="1000"} 1.0
"""


def test_figures_of_a_model() -> None:
    found = figures_in(PAGE, "a")
    assert found == Figures(16, 1000, 0.25, 200.0, 50.0)
    assert (found.num_used, found.hit_rate) == (250, 0.25)


def test_a_model_that_is_not_ready_has_none() -> None:
    found = figures_in(PAGE, "c")
    assert (found, found.num_used, found.hit_rate) == (Figures(), 0, None)


def test_names_with_signs_are_read() -> None:
    assert figures_in(PAGE, 'b"}').usage == 0.5
