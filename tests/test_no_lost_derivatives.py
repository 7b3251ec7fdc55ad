# SPDX-License-Identifier: MIT
"""Second derivatives, forward-mode tangents and batched gradients are right or refused, in every module and op."""

from __future__ import annotations

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from fla import ops
from fla.backends import use_backend
from fla.modules import activations, causal_conv1d, grpo, rotary, token_shift
from fla.modules.fused_cross_entropy.ops import cross_entropy_loss
from fla.modules.fused_kl_div.ops import fused_kl_div_loss
from fla.modules.fused_linear_cross_entropy.ops import fused_linear_cross_entropy_loss
from fla.modules.l2warp import l2_warp
from fla.modules.norm import functions, fused_norm_gate, l2norm, layernorm, layernorm_gated
from fla.ops.hgrn import chunk_hgrn
from fla.ops.utils import (
    chunk_global_cumsum,
    chunk_local_cumsum,
    logsumexp_fwd,
    mean_pooling,
    pack_sequence,
    softmax_fwd,
    unpack_sequence,
)

BACKENDS = ["torch", *(["triton"] if importlib.util.find_spec("triton") else [])]
REFUSED = "differentiate twice"


def _cases():
    """Name, function of the tensors that have gradients, the tensors."""
    gen = torch.Generator().manual_seed(0)
    rn = lambda *shape: torch.randn(*shape, generator=gen)
    x, y, w, b = rn(2, 7, 16), rn(2, 7, 16), rn(16), rn(16)
    lw, lb = rn(8, 16), rn(8)
    cu = torch.tensor([0, 3, 7])
    target, cos, sin = torch.tensor([0, 3, 5, 2, 1]), rn(7, 4), rn(7, 4)
    fixed = rn(5, 16), rn(6, 16)
    cases = {
        **{f.__name__: (f, (x,)) for f in (
            activations.sigmoid, activations.logsigmoid, activations.swish, activations.elu_p1, activations.sqrelu,
            activations.fast_gelu_impl,
        )},
        **{f.__name__: (f, (x, y)) for f in (activations.swiglu, activations.sigmoidglu, activations.powglu)},
        **{f.__name__: (f, (x, y, lw, lb)) for f in (
            activations.swiglu_linear, activations.sigmoidglu_linear, activations.powglu_linear,
        )},
        "l2norm": (l2norm.l2norm, (x,)),
        "layer_norm": (layernorm.layer_norm, (x, w, b)),
        "rms_norm": (functools.partial(layernorm.rms_norm, prenorm=True), (x, w, b, y)),
        "group_norm": (functools.partial(layernorm.group_norm, num_groups=2), (x, w, b)),
        "layer_norm_linear": (layernorm.layer_norm_linear, (x, w, b, lw, lb)),
        "layernorm_fn": (layernorm_gated.layernorm_fn, (x, w, b, y)),
        "rms_norm_gated": (fused_norm_gate.rms_norm_gated, (x, y, w, b)),
        "rms_norm_swish_gate_linear": (fused_norm_gate.rms_norm_swish_gate_linear, (x, y, w, b, lw, lb)),
        "L2NormFunction": (functions.L2NormFunction.apply, (x,)),
        "LayerNormFunction": (functions.LayerNormFunction.apply, (x, w, b)),
        "LayerNormLinearFunction": (functions.LayerNormLinearFunction.apply, (x, w, b, lw, lb)),
        "LayerNormGatedFunction": (lambda *a: functions.LayerNormGatedFunction.apply(*a, "swish"), (x, y, w, b)),
        "LayerNormGatedLinearFunction": (functions.LayerNormGatedLinearFunction.apply, (x, y, w, b, lw, lb)),
        "token_shift": (token_shift.token_shift, (x,)),
        "packed token_shift": (lambda x: token_shift.token_shift(x, cu), (x[:1],)),
        "rotary_embedding": (lambda x: rotary.rotary_embedding(x.view(2, 7, 2, 8), cos.to(x), sin.to(x)), (x,)),
        "causal_conv1d": (functools.partial(causal_conv1d.causal_conv1d, activation="silu"), (x, rn(16, 4), b, y)),
        "packed causal_conv1d": (lambda *a: causal_conv1d.causal_conv1d(*a, cu_seqlens=cu), (x[:1], rn(16, 4))),
        "CausalConv1dFunction": (causal_conv1d.CausalConv1dFunction.apply, (x, rn(16, 4))),
        "cross_entropy_loss": (lambda x: cross_entropy_loss(x, target)[0], (rn(5, 6),)),
        "fused_linear_cross_entropy_loss": (
            lambda x, w: fused_linear_cross_entropy_loss(x, target, w), (rn(5, 16), rn(6, 16))
        ),
        "fused_kl_div_loss": (lambda x, w: fused_kl_div_loss(x, fixed[0], w, fixed[1]), (rn(5, 16), rn(6, 16))),
        "fused_grpo_loss": (lambda x: grpo.fused_grpo_loss(x, b[None, :4], target[None], w[:1]), (rn(1, 5, 6),)),
        "l2_warp": (lambda x: l2_warp(x.square().sum(), x, 3.0), (rn(1, 5, 6),)),
        "softmax_fwd": (functools.partial(softmax_fwd, dtype=None), (x,)),
        "logsumexp_fwd": (logsumexp_fwd, (x,)),
        "mean_pooling": (lambda x: mean_pooling(x[:, :, None], 4), (x,)),
        "chunk_local_cumsum": (lambda x: chunk_local_cumsum(x, 4, output_dtype=None), (x,)),
        "packed chunk_local_cumsum": (lambda x: chunk_local_cumsum(x, 4, cu_seqlens=cu, output_dtype=None), (x[:1],)),
        "chunk_global_cumsum": (lambda x: chunk_global_cumsum(x, output_dtype=None), (x,)),
        "pack_sequence": (lambda x: pack_sequence(x, cu), (x[:, :4],)),
        "unpack_sequence": (lambda x: unpack_sequence(x, cu), (x[0],)),
    }  # fmt: skip
    q, k, v = (0.5 * rn(1, 5, 1, 16) for _ in range(3))
    per_key, beta = -rn(1, 5, 1, 16).abs(), rn(1, 5, 1).sigmoid()
    decay, unit = per_key[..., 0].contiguous(), F.normalize(k, dim=-1)
    for form in ("chunk", "fused_recurrent"):
        op = lambda name, form=form: getattr(ops, f"{form}_{name}")
        order = (q, unit, v, unit, decay, beta) if form == "chunk" else (q, unit, unit, v, decay, beta)
        rest = {"gated_delta_rule": (q, unit, v, decay, beta), "comba": order}
        if form == "fused_recurrent":
            rest["gated_delta_rule"] = (q, unit, v, decay, None, None, beta)
        for name, args in {
            "linear_attn": (q.abs(), k.abs(), v), "retention": (q, k, v), "simple_gla": (q, k, v, decay),
            "gla": (q, k, v, per_key), "rwkv6": (q, k, v, per_key, rn(1, 16)), "gsa": (q, k, v, rn(1, 5, 1, 16)),
            "delta_rule": (q, unit, v, beta), "kda": (q, unit, v, per_key, beta), **rest,
        }.items():  # fmt: skip
            cases[f"{form}_{name}"] = op(name), args
        cases[f"{form}_hgrn"] = (
            chunk_hgrn if form == "chunk" else ops.fused_recurrent_hgrn,
            (v[:, :, 0], decay - v[:, :, 0] * 0),
        )
    return cases


def _expect(error, *words):
    if not any(x in str(error) for x in words):
        raise error


CASES = _cases()
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _run(name, args):
    """The sum of all results, weighed by constants."""
    found = [o for o in tree_leaves(CASES[name][0](*args)) if o is not None]
    return sum((o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in found)


def _leaves(name, dtype=torch.float32, shift=0.0, only=None):
    args = [None if x is None else x.to(dtype) for x in CASES[name][1]]
    moves = [shift if only in (None, i) else 0.0 for i in range(len(args))]
    return [None if x is None else (x + move * x.cos()).requires_grad_() for x, move in zip(args, moves, strict=True)]


def _penalty(name, leaves, create_graph):
    wanted = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(_run(name, leaves), wanted, create_graph=create_graph, allow_unused=True)
    return sum(g.square().sum() for g in grads if g is not None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(CASES))
def test_a_penalty_on_gradients_is_right_or_refused(name, backend):
    step = 1e-5
    with use_backend(backend):
        leaves = _leaves(name)
        penalty = _penalty(name, leaves, True)
    for i, x in enumerate(leaves):
        if x is None:
            continue
        try:
            # Beside a loss, as in training: what depends on nothing would raise alone.
            (found,) = torch.autograd.grad(penalty + x.sum(), x, retain_graph=True)
        except RuntimeError as error:
            _expect(error, REFUSED)
            continue
        found = ((found - 1) * x.detach().cos()).sum().double()
        with use_backend("torch"):
            high, low = (_penalty(name, _leaves(name, torch.float64, s, i), False) for s in (step, -step))
        torch.testing.assert_close(found, (high - low) / (2 * step), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["swiglu", "layer_norm", "rotary_embedding", "token_shift", "cross_entropy_loss"])
def test_plain_pytorch_on_the_cpu_is_differentiable_twice(name):
    leaves = _leaves(name)
    loss = _penalty(name, leaves, True) + sum(x.sum() for x in leaves)
    if name == "cross_entropy_loss":
        with pytest.raises(RuntimeError, match=REFUSED):
            loss.backward()
    else:
        loss.backward()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(CASES))
def test_a_tangent_is_kept_or_refused(name, backend, gradients):
    leaves = [None if x is None else x.detach() for x in _leaves(name)]
    with use_backend(backend), forward_ad.dual_level():
        duals = [
            None if x is None else forward_ad.make_dual(x.requires_grad_(gradients), x.detach().cos()) for x in leaves
        ]
        try:
            found = forward_ad.unpack_dual(_run(name, duals)).tangent
        except (NotImplementedError, RuntimeError) as error:
            _expect(error, "forward-mode", "forward mode", "jvp")
            return
    assert found is not None
    step = 1e-5
    with use_backend("torch"), torch.no_grad():
        high, low = (_run(name, _leaves(name, torch.float64, s)) for s in (step, -step))
    torch.testing.assert_close(found.double(), (high - low) / (2 * step), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(CASES))
def test_batched_gradients_are_right_or_refused(name, backend):
    with use_backend(backend):
        leaves = _leaves(name)
        x, loss = next(x for x in leaves if x is not None), _run(name, leaves)
        try:
            (found,) = torch.autograd.grad(loss, x, torch.tensor([1.0, -2.0]), is_grads_batched=True, retain_graph=True)
        except RuntimeError as error:
            _expect(error, "one gradient at a time")
            return
        (want,) = torch.autograd.grad(loss, x)
    torch.testing.assert_close(found, torch.stack([want, -2 * want]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_may_come_from_inference_mode(backend):
    with torch.inference_mode():
        cu = torch.tensor([0, 2, 5])
    x, v, taps = (torch.randn(*shape) for shape in ((1, 5, 1, 16), (1, 5, 16), (16, 4)))
    calls = {
        "gla": lambda cu: ops.chunk_gla(q, x, x, -x.abs(), cu_seqlens=cu)[0],
        "simple_gla": lambda cu: ops.chunk_simple_gla(q, x, x, -x[..., 0].abs(), cu_seqlens=cu)[0],
        "gated_delta_rule": lambda cu: ops.chunk_gated_delta_rule(
            q, F.normalize(x, dim=-1), x, -x[..., 0].abs(), x[..., 1].sigmoid(), cu_seqlens=cu
        )[0],
        "kda": lambda cu: ops.chunk_kda(q, F.normalize(x, dim=-1), x, -x.abs(), x[..., 1].sigmoid(), cu_seqlens=cu)[0],
        "hgrn": lambda cu: ops.fused_recurrent_hgrn(q[:, :, 0], -v.abs(), cu_seqlens=cu)[0],
        "conv": lambda cu: causal_conv1d.causal_conv1d(q[:, :, 0], taps, cu_seqlens=cu)[0],
        "shift": lambda cu: token_shift.token_shift(q[:, :, 0], cu),
        "rotary": lambda cu: rotary.rotary_embedding(q, v[0, :, :4], v[0, :, 4:8], cu_seqlens=cu),
        "pooling": lambda cu: mean_pooling(q, 2, cu),
        "cumsum": lambda cu: chunk_local_cumsum(q, 2, cu_seqlens=cu),
        "pack": lambda cu: unpack_sequence(q[0], cu),
    }
    for call in calls.values():
        q = torch.randn(1, 5, 1, 16, requires_grad=True)
        with use_backend(backend):
            grads = [torch.autograd.grad(call(c).square().sum(), q)[0] for c in (cu, cu.clone())]
        assert torch.equal(*grads)
