"""Every operator has an entry in the tables INTERPRET and LEGALIZE, except for the operators that this file lists."""

from __future__ import annotations

from compiler.ir.op import OPS
from compiler.ops.tables import INTERPRET, LEGALIZE, VIEWS

BY_THE_MACHINE = {"shape_of", "tensor_to_shape"}  # operators that the virtual machine computes itself, without a loop nest


def known() -> set[str]:
    """Return the names of all operators except those that tests define. The latter have a dot in their names."""
    return {name for name in OPS if "." not in name}


def test_every_operator_has_every_meaning():
    assert known() == set(INTERPRET)
    assert known() - set(LEGALIZE) == BY_THE_MACHINE
    assert set(LEGALIZE) <= set(OPS)


def test_views():
    assert {"reshape", "expand_dims", "squeeze"} == VIEWS


def test_what_the_tables_promise():
    wanted = """
        add subtract multiply divide floor_divide modulo power minimum maximum clip less less_equal greater greater_equal equal not_equal
        logical_and logical_or logical_xor logical_not where cast negative abs exp log sqrt rsqrt tanh erf sin cos floor round sigmoid silu
        relu gelu gelu_tanh broadcast_to reshape permute_dims expand_dims squeeze concat split slice flip pad tril take gather
        scatter scatter_inplace full arange shape_of shape_to_tensor tensor_to_shape sum mean prod max min any all
        argmax argmin cumsum sort argsort top_k
        softmax log_softmax layer_norm rms_norm matmul linear embedding rope_angles rope quantize dequantize attention paged_attention
        kv_append unique nonzero uniform sample token_logprobs
    """
    assert set(wanted.split()) <= set(OPS)
