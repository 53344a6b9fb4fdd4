"""The activation xIELU (Huang and Schlag, arXiv 2411.13010), whose parameters are weights of the layer."""

from __future__ import annotations

from compiler.frontend.layers.nn import Net
from compiler.ir.graph.atoms import ScalarValue, Var
from compiler.ops.elementwise import ABS, EXP, GREATER, LOG, MINIMUM, MULTIPLY, NEGATIVE, RELU, SUBTRACT, WHERE

ONE = ScalarValue(1.0, "f32")


def xielu(net: Net, x: Var, module: str) -> Var:
    """Compute `p x^2 + b x` if x is positive, and `n (exp(min(x, e)) - 1 - x) + b x` otherwise. Here p is softplus(`alpha_p`), n is b +
    softplus(`alpha_n`), b is `beta` and e is `eps`. `module` is the name of the activation, which has these weights."""
    rising, falling = (_softplus(net, net.vector(f"{module}.{name}", 1)) for name in ("alpha_p", "alpha_n"))
    slope, limit = (net.as_f32(net.weight(f"{module}.{name}")) for name in ("beta", "eps"))
    grown = net.call(MULTIPLY, rising, net.call(MULTIPLY, x, x))
    bent = net.call(SUBTRACT, net.call(SUBTRACT, net.call(EXP, net.call(MINIMUM, x, limit)), ONE), x)
    shrunk = net.call(MULTIPLY, net.add(slope, falling), bent)
    chosen = net.call(WHERE, net.call(GREATER, x, ScalarValue(0.0, "f32")), grown, shrunk)
    return net.add(chosen, net.call(MULTIPLY, slope, x))


def _softplus(net: Net, x: Var) -> Var:
    """Compute log(1 + exp(x)) without overflow."""
    small = net.call(EXP, net.call(NEGATIVE, net.call(ABS, x)))
    return net.add(net.call(RELU, x), net.call(LOG, net.add(small, ONE)))
