# SPDX-License-Identifier: MIT
"""Every public op compiles whole, and the compiled call equals the eager one: outputs, states, gradients."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from fla.backends import DispatchedOp

ROOMS = [
    "kda",
    "gated_delta_rule",
    "delta_rule",
    "gla",
    "simple_gla",
    "retention",
    "linear_attn",
    "lightning_attn",
    "comba",
    "gdn2",
    "rwkv6",
]
T, H, K, V = 70, 2, 8, 4


def public_ops() -> Iterator[Any]:
    seen: set[DispatchedOp] = set()  # a short name is the same op
    for room in ROOMS:
        module = importlib.import_module(f"fla.ops.{room}")
        for name in sorted(vars(module)):
            op = getattr(getattr(module, name), "op", None)
            # What takes q (or r), k and v: the gate helpers have tests of their own below.
            if (
                isinstance(op, DispatchedOp)
                and {"k", "v"} <= set(op.signature.parameters)
                and not (op in seen or op.inplace)
            ):
                seen.add(op)
                yield pytest.param(getattr(module, name), id=name)


OPS = list(public_ops())

# Ops whose `g` is one log-decay per head; elsewhere it is one per key channel.
SCALAR_GATES = ("gated_delta_rule", "simple_gla", "comba")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)


def call(fn: Any, *, varlen: bool, states: bool = True, length: int = T) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors that are differentiated and other arguments for an op, read off its parameter names."""
    parameters = fn.op.signature.parameters
    B, N = (1, 3) if varlen else (2, 2)
    # Positive q and k: the normaliser of linear attention divides by their products.
    tensors: dict[str, Any] = {
        "r" if fn.op.operation == "rwkv6" else "q": torch.rand(B, length, H, K),
        "k": F.normalize(torch.rand(B, length, H, K), dim=-1),
        "v": torch.randn(B, length, H, V),
    }
    for gate, size in (("g", K), ("gk", K), ("gv", V)):
        if gate in parameters:
            per_head = gate == "g" and fn.op.operation in SCALAR_GATES
            tensors[gate] = F.logsigmoid(torch.randn(B, length, H) if per_head else torch.randn(B, length, H, size))
    if "beta" in parameters:
        tensors["beta"] = torch.rand(B, length, H)
    if fn.op.operation == "comba":
        tensors["p"] = F.normalize(torch.rand(B, length, H, K), dim=-1)
    elif fn.op.operation == "gdn2":
        tensors |= {"b": torch.rand(B, length, H, K), "w": torch.rand(B, length, H, V)}
    elif fn.op.operation == "rwkv6":
        tensors |= {"w": F.logsigmoid(torch.randn(B, length, H, K)), "u": torch.rand(H, K)}
    rest: dict[str, Any] = {"scale": 0.3} if "scale" in parameters else {}
    if "initial_state" in parameters and states:
        rest["output_final_state"] = True
        tensors["initial_state"] = torch.rand(N, H, K, V)
        if fn.op.operation == "linear_attn":
            rest["normalize"] = True
            tensors["initial_state"] = (tensors["initial_state"], torch.rand(N, 1, H, K))
    if varlen:
        rest["cu_seqlens"] = torch.tensor([0, 5, 6, length])
    if "layer_idx" in parameters:
        rest |= {"layer_idx": 1, "num_layers": 4}
    return tensors, rest


def run(fn: Any, tensors: dict[str, Any], rest: dict[str, Any]) -> tuple[Any, list[torch.Tensor | None]]:
    """The result and the gradient of every leaf, of a loss that weighs all outputs."""
    clone = lambda t: t.detach().clone().requires_grad_()
    given = {n: tuple(map(clone, t)) if isinstance(t, tuple) else clone(t) for n, t in tensors.items()}
    result = fn(**given, **rest)
    outputs = [o for o in tree_leaves(result) if isinstance(o, torch.Tensor)]
    loss = sum(
        (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view(o.shape)).sum() for o in outputs
    )
    loss.backward()
    return torch.utils._pytree.tree_map(lambda o: None if o is None else o.detach(), result), [
        leaf.grad for leaf in tree_leaves(given)
    ]


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("fn", OPS)
def test_compiled_call_equals_the_eager_one(fn, varlen):
    if varlen and "cu_seqlens" not in fn.op.signature.parameters:
        pytest.skip("has no cu_seqlens")
    tensors, rest = call(fn, varlen=varlen)
    compiled = torch.compile(lambda **kwargs: fn(**kwargs), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, tensors, rest), run(fn, tensors, rest), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fn", OPS)
def test_call_without_states_and_gradients_returns_the_same_structure(fn):
    tensors, rest = call(fn, varlen=False, states=False)
    compiled = torch.compile(lambda **kwargs: fn(**kwargs), fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**tensors, **rest), fn(**tensors, **rest), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fn", [p for p in OPS if p.id in ("chunk_kda", "chunk_simple_gla", "chunk_gated_delta_rule")])
def test_one_graph_serves_every_length(fn):
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda **kwargs: fn(**kwargs), fullgraph=True, backend=count)
    for length in (70, 33, 128):
        tensors, rest = call(fn, varlen=False, length=length)
        for name in {"q", "k", "v", "g", "beta"} & set(tensors):
            torch._dynamo.mark_dynamic(tensors[name], 1)
        torch.testing.assert_close(compiled(**tensors, **rest), fn(**tensors, **rest), rtol=1e-6, atol=1e-6)
    assert len(graphs) == 1


def test_layer_around_chunk_kda_trains_under_inductor():
    from fla.ops.kda import chunk_kda

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(16, H * (3 * K + V + 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, g, v, beta = self.project(x).split([H * K, H * K, H * K, H * V, H], -1)
            heads = lambda t: t.unflatten(-1, (H, -1))
            o, _ = chunk_kda(
                heads(q), heads(k), heads(v), F.logsigmoid(heads(g)), beta.sigmoid(), use_qk_l2norm_in_kernel=True
            )
            return o.flatten(-2)

    layer, x = Layer(), torch.randn(2, 20, 16)
    compiled = torch.compile(layer, fullgraph=True)
    found = []
    for run_it in (layer, compiled):
        layer.zero_grad()
        y = run_it(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_gate_and_flags_inside_the_op():
    from fla.ops.kda import chunk_kda

    tensors, rest = call(chunk_kda, varlen=False)
    tensors |= {"g": torch.randn(2, T, H, K), "A_log": torch.randn(H), "dt_bias": torch.randn(H * K)}
    rest |= {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    rest |= {"state_v_first": True, "return_intermediate_states": True}
    tensors["initial_state"] = tensors["initial_state"].transpose(-1, -2)
    with torch.no_grad():
        compiled = torch.compile(lambda **kwargs: chunk_kda(**kwargs), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(**tensors, **rest), chunk_kda(**tensors, **rest), rtol=1e-6, atol=1e-6)


def test_bad_input_is_named_while_tracing_and_bad_offsets_at_run_time():
    from fla.ops.kda import chunk_kda

    tensors, rest = call(chunk_kda, varlen=True)
    compiled = torch.compile(lambda **kwargs: chunk_kda(**kwargs), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="`beta` must have shape"):
        compiled(**{**tensors, "beta": tensors["beta"][0]}, **rest)
    compiled(**tensors, **rest)
    with pytest.raises(ValueError, match="`cu_seqlens` must not decrease"):
        compiled(**tensors, **{**rest, "cu_seqlens": torch.tensor([0, 6, 5, T])})


def test_kda_gate_compiles_with_gradients():
    from fla.ops.kda.gate import fused_kda_gate

    tensors = {"g": torch.randn(2, T, H, K), "A_log": torch.randn(H), "dt_bias": torch.randn(H * K)}
    compiled = torch.compile(lambda **kwargs: fused_kda_gate(**kwargs), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, tensors, {}), run(fused_kda_gate, tensors, {}), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("room", ROOMS)
def test_every_op_states_its_outputs(room):
    module = importlib.import_module(f"fla.ops.{room}")
    ops = [f.op for f in vars(module).values() if isinstance(getattr(f, "op", None), DispatchedOp)]
    assert ops
    without = {op.name for op in ops if op.outputs is None and "v" in op.signature.parameters and not op.inplace}
    assert not without


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fn", [p for p in OPS if p.id in ("chunk_kda", "chunk_gated_delta_rule", "chunk_simple_gla")])
def test_two_training_steps_on_the_gpu_equal_eager(fn, mode):
    tensors, _ = call(fn, varlen=False, states=False, length=128)
    tensors = {n: t.repeat(1, 1, 1, 8).cuda() if t.dim() == 4 else t.cuda() for n, t in tensors.items()}
    compiled = torch.compile(lambda **kwargs: fn(**kwargs), fullgraph=True, mode=mode)
    expected = run(fn, tensors, {})
    for _ in range(2):
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(run(compiled, tensors, {}), expected, rtol=1e-3, atol=1e-3)
