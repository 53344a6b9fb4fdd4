"""A mixture of experts in place of an MLP: a router chooses experts per token, rows are grouped by expert, and the outputs of a
token's experts are summed."""

from __future__ import annotations

import numpy as np

from compiler.frontend.joint import joint_name
from compiler.frontend.layers.decoder import Branch, Layer, activated, gated_mlp, scaled
from compiler.frontend.layers.nn import Net, WeightFormat
from compiler.frontend.mixture import ClippedGate, ExpertNames, Mixture, Scoring
from compiler.ir.graph.atoms import Constant, ScalarValue, Var
from compiler.ops.elementwise import ABS, CLIP, DIVIDE, EQUAL, GREATER, MAXIMUM, MINIMUM, MULTIPLY, SIGMOID, SUBTRACT, WHERE
from compiler.ops.embedding import EMBEDDING
from compiler.ops.index import GATHER, TAKE
from compiler.ops.normalize import SOFTMAX
from compiler.ops.reduce import ANY, SUM
from compiler.ops.routing import GROUP_ROWS, SUM_ROWS, TOP_EXPERTS

ROUTER_FORMAT = WeightFormat(32)  # f32, since an error in the router's logits changes which experts are chosen

NOTHING = ScalarValue(-np.inf, "f32")


def mixture(names: ExpertNames, dense: Branch = gated_mlp) -> Branch:
    """Return a branch that applies the experts, or `dense` in the dense layers."""

    def branch(layer: Layer, h: Var) -> Var:
        found = layer.step.config.mixture
        assert found is not None, layer.step.config.family
        return dense(layer, h) if layer.number in found.dense_layers else experts(layer, h, found, names)

    return branch


def experts(layer: Layer, h: Var, m: Mixture, names: ExpertNames, *, routed: Var | None = None) -> Var:
    """Apply the router, the experts and, if there is one, the shared expert to `h`, and return the sum of their weighted outputs. If
    `routed` is given, the router reads it instead of `h`."""
    net, outer = layer.step.net, m.outer_size or layer.step.config.hidden_size
    chosen, shares = _route(layer, h if routed is None else routed, m, names)
    rows = net.call(GROUP_ROWS, chosen, count=m.num_experts)
    tokens, numbers, places = (net.field(rows, i) for i in range(3))
    x = net.call(EMBEDDING, net.call(MULTIPLY, h, shares) if m.scales_inputs else h, tokens)
    *widening, down = (layer.name(joint_name(name)) for name in names.of_experts)
    wide = [net.expert_linear(x, name, numbers, m.num_experts, outer, m.size, bias=m.bias) for name in widening]
    y = net.expert_linear(_activated(layer, wide, m), down, numbers, m.num_experts, m.size, outer, bias=m.bias)
    if m.scales_inputs:
        found = net.call(EMBEDDING, y, net.reshape(places, layer.step.t))
    else:
        found = net.call(SUM_ROWS, y, places, shares)
    if names.shared is None or not m.shared_size:
        return found
    both, back = (f"{names.shared}.gate_proj", f"{names.shared}.up_proj"), f"{names.shared}.down_proj"
    shared = gated_mlp(layer, h, both, back, m.shared_size)
    if names.shared_gate is not None:
        gate = net.linear(h, layer.name(names.shared_gate), layer.step.config.hidden_size, 1, format=ROUTER_FORMAT)
        shared = net.call(MULTIPLY, shared, net.call(SIGMOID, gate))
    return net.add(found, shared)


def _activated(layer: Layer, wide: list[Var], m: Mixture) -> Var:
    if len(wide) == 1:
        return activated(layer, wide[0])
    gate, up = wide
    return layer.step.net.call(MULTIPLY, activated(layer, gate), up) if m.clipped is None else _clipped(layer.step.net, gate, up, m.clipped)


def _clipped(net: Net, g: Var, u: Var, gate: ClippedGate) -> Var:
    g = net.call(MINIMUM, g, ScalarValue(gate.limit, "f32"))
    u = net.call(CLIP, u, ScalarValue(-gate.limit, "f32"), ScalarValue(gate.limit, "f32"))
    return net.call(MULTIPLY, net.call(MULTIPLY, g, net.call(SIGMOID, net.scale(g, gate.alpha))), net.add(u, ScalarValue(1.0, "f32")))


def _route(layer: Layer, h: Var, m: Mixture, names: ExpertNames) -> tuple[Var, Var]:
    """Return the experts of each token and their weights in the sum, both [tokens, chosen]."""
    net, c = layer.step.net, layer.step.config
    found = net.linear(h, layer.name(names.router), c.hidden_size, m.num_experts, bias=m.bias, format=ROUTER_FORMAT)
    if m.sparse_limit is not None:
        return _mix_sparsely(net, found, m, m.sparse_limit)
    scores = net.call(SOFTMAX, found) if m.scoring is Scoring.SOFTMAX else net.call(SIGMOID, found)
    judged = found if m.scales_inputs else scores  # if inputs are scaled, experts rank by logits, as large logits have equal sigmoids
    if names.correction is not None:
        judged = net.add(scores, _correction(layer, names.correction, names.correction_rank, m.num_experts))
    chosen = net.call(TOP_EXPERTS, judged if m.num_groups == 1 else _in_best_groups(layer, judged, m), k=m.num_chosen)
    shares = net.call(GATHER, scores, chosen, axis=1)
    if m.normalized:
        shares = net.call(DIVIDE, shares, net.call(SUM, shares, axes=[1], keepdims=True))
    if names.scales is not None:
        shares = net.call(MULTIPLY, shares, net.call(TAKE, net.vector(layer.name(names.scales), m.num_experts), chosen, axis=0))
    return chosen, scaled(layer.step, shares, m.scale)


def _mix_sparsely(net: Net, logits: Var, m: Mixture, limit: float) -> tuple[Var, Var]:
    """Return what `_route` returns, by SparseMixer (Liu et al., arXiv 2409.12136). Experts are chosen one after another. The weight of an
    expert is its probability in a softmax over the experts that were not chosen before it and whose logits are not much smaller than its
    own: by a relative distance of at most `limit`."""
    rest, shares, numbers = logits, logits, Constant(np.arange(m.num_experts, dtype=np.int32))
    for _ in range(m.num_chosen):
        best = net.call(TOP_EXPERTS, rest, k=1)
        top, is_best = net.call(GATHER, rest, best, axis=1), net.call(EQUAL, numbers, best)
        distance = net.call(DIVIDE, net.call(SUBTRACT, top, logits), net.call(MAXIMUM, net.call(ABS, logits), top))
        near = net.call(WHERE, net.call(GREATER, distance, ScalarValue(limit, "f32")), NOTHING, rest)
        shares = net.call(WHERE, is_best, net.call(SOFTMAX, near), shares)
        rest = net.call(WHERE, is_best, NOTHING, rest)
    chosen = net.call(TOP_EXPERTS, logits, k=m.num_chosen)
    return chosen, net.call(GATHER, shares, chosen, axis=1)


def _correction(layer: Layer, name: str, rank: int, count: int) -> Var:
    net = layer.step.net
    if rank == 1:
        return net.vector(layer.name(name), count)
    return net.reshape(net.as_f32(net.weight(layer.name(name), 1, count)), count)


def _in_best_groups(layer: Layer, scores: Var, m: Mixture) -> Var:
    """Return the scores of the experts in the best groups, and -infinity for all other experts. Groups rank by the sum of their two best
    scores."""
    net, t, each = layer.step.net, layer.step.t, m.num_experts // m.num_groups
    by_group = net.reshape(scores, t * m.num_groups, each)
    two = net.call(GATHER, by_group, net.call(TOP_EXPERTS, by_group, k=min(2, each)), axis=1)
    sums = net.reshape(net.call(SUM, two, axes=[1]), t, m.num_groups)
    best = net.call(TOP_EXPERTS, sums, k=m.num_chosen_groups)
    numbers = Constant(np.arange(m.num_groups, dtype=np.int32))
    is_best = net.call(ANY, net.call(EQUAL, net.reshape(best, t, m.num_chosen_groups, 1), numbers), axes=[1])
    masked = net.call(WHERE, net.reshape(is_best, t, m.num_groups, 1), net.reshape(scores, t, m.num_groups, each), NOTHING)
    return net.reshape(masked, t, m.num_experts)
