# SPDX-License-Identifier: MIT
"""Kernels of the delta family under the modes and transforms of autograd, and over axes of no length."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

pytest.importorskip("triton")

from fla.backends import use_backend
from fla.ops.comba import chunk_comba, fused_recurrent_comba
from fla.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.gdn2 import chunk_gdn2
from fla.ops.kda import chunk_kda, fused_recurrent_kda

OPS = {
    "gdn": chunk_gated_delta_rule, "gdn recurrent": fused_recurrent_gated_delta_rule, "delta": chunk_delta_rule,
    "delta recurrent": fused_recurrent_delta_rule, "comba": chunk_comba, "comba recurrent": fused_recurrent_comba,
    "kda": chunk_kda, "kda recurrent": fused_recurrent_kda, "gdn2": chunk_gdn2,
}  # fmt: skip
FEW = ["gdn", "gdn recurrent", "kda", "kda recurrent"]

pytestmark = pytest.mark.usefixtures("poisoned")


def inputs(name, B=1, T=3, K=16, V=16):
    gen = torch.Generator().manual_seed(0)
    rn = lambda *s: torch.randn(*s, generator=gen)
    vector = name.startswith(("kda", "gdn2"))
    x = {"q": rn(B, T, 1, K), "k": F.normalize(rn(B, T, 1, K), dim=-1), "v": rn(B, T, 1, V)}
    if not name.startswith("delta"):
        x["g"] = F.logsigmoid(rn(B, T, 1, *((K,) if vector else ())))
    if name.startswith("comba"):
        x["p"] = rn(B, T, 1, K)
    if name == "gdn2":
        x |= {"b": rn(B, T, 1, K).sigmoid(), "w": rn(B, T, 1, V).sigmoid()}
    else:
        x["beta"] = rn(B, T, 1).sigmoid()
    return {**x, "initial_state": rn(B, 1, K, V)}


@pytest.mark.parametrize("axis", ["B", "T", "K", "V"])
@pytest.mark.parametrize("name", list(OPS))
def test_axes_of_no_length_give_zeros_and_gradients(name, axis):
    x = {n: t.requires_grad_() for n, t in inputs(name, **{axis: 0}).items()}
    with use_backend("triton"):
        o, ht = OPS[name](**x, scale=1.0, output_final_state=True)
    assert o.shape == x["v"].shape
    assert (o == 0).all()
    assert torch.equal(ht, x["initial_state"]) or axis != "T"
    (o.sum() + ht.sum()).backward()
    if axis == "T":
        assert (x["initial_state"].grad == 1).all()


@pytest.mark.parametrize("name", FEW)
def test_the_output_may_be_written_to_where_nothing_is_normed(name):
    with use_backend("triton", strict=True):
        grads = []
        for inplace in (False, True):
            x = {n: t.requires_grad_() for n, t in inputs(name).items()}
            o = OPS[name](**x)[0]
            o = o.mul_(2.0) if inplace else o * 2.0
            grads.append(torch.autograd.grad(o.square().sum(), list(x.values())))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", FEW)
def test_transforms_and_tangents_are_refused(name):
    x = inputs(name)
    with use_backend("triton", strict=True):
        call = lambda q: OPS[name](**{**x, "q": q})[0]
        for transform in (torch.func.grad(lambda q: call(q).sum()), torch.vmap(lambda q: call(q[None]))):
            with pytest.raises(RuntimeError, match=r"compute no torch\.func transforms"):
                transform(x["q"])
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            call(forward_ad.make_dual(x["q"], x["q"]))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_a_penalty_on_gradients_is_refused_not_dropped(name, backend):
    x = {n: t.requires_grad_() for n, t in inputs(name).items()}
    with use_backend(backend, strict=True):
        o = OPS[name](**x)[0]
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (o.sum() + dq.square().sum()).backward()
