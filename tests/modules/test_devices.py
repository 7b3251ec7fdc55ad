# SPDX-License-Identifier: MIT
"""Tensors of two devices in one call are refused by name: a kernel would read wild addresses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fla.modules import activations as A
from fla.modules.causal_conv1d import causal_conv1d
from fla.modules.fused_cross_entropy import cross_entropy_loss
from fla.modules.fused_kl_div import fused_kl_div_loss
from fla.modules.fused_linear_cross_entropy import fused_linear_cross_entropy_loss
from fla.modules.norm import fused_norm_gate as G
from fla.modules.norm import layernorm as L
from fla.modules.norm import layernorm_gated as M
from fla.modules.rotary import rotary_embedding
from fla.modules.token_shift import token_shift


def t(*shape: int, **kw) -> Tensor:
    return torch.zeros(shape, **kw)


# Each call, and arguments: shapes of those on the CPU, and by name the one that is on another device.
CASES = {
    "swiglu": (A.swiglu, [(4, 8)], {"y": (4, 8)}),
    "swiglu_linear": (lambda **k: A.swiglu_linear(bias=None, **k), {"x": (4, 8), "y": (4, 8)}, {"weight": (5, 8)}),
    "rms_norm": (lambda **k: L.rms_norm(bias=None, **k), {"x": (4, 8)}, {"weight": (8,)}),
    "layer_norm": (lambda **k: L.layer_norm(weight=None, **k), {"x": (4, 8)}, {"bias": (8,)}),
    "residual": (
        lambda **k: L.layer_norm(weight=None, bias=None, **k), {"x": (4, 8)}, {"residual": (4, 8)},
    ),
    "norm linear": (
        lambda **k: L.layer_norm_linear(norm_weight=None, norm_bias=None, linear_bias=None, **k),
        {"x": (4, 8)}, {"linear_weight": (5, 8)},
    ),
    "gated": (lambda **k: G.rms_norm_gated(weight=None, bias=None, **k), {"x": (4, 8)}, {"g": (4, 8)}),
    "grouped": (lambda **k: M.layernorm_fn(bias=None, **k), {"x": (4, 8), "weight": (8,)}, {"z": (4, 8)}),
    "kl": (
        fused_kl_div_loss, {"x": (4, 8), "target_x": (4, 8), "weight": (5, 8)}, {"target_weight": (5, 8)},
    ),
    "conv": (causal_conv1d, {"x": (1, 4, 8)}, {"weight": (8, 4)}),
    "rotary": (rotary_embedding, {"x": (1, 4, 2, 8), "cos": (4, 4)}, {"sin": (4, 4)}),
    "token shift": (token_shift, {"x": (1, 4, 8)}, {"cache": (1, 8)}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_a_tensor_elsewhere_is_named(name: str):
    fn, here, elsewhere = CASES[name]
    args = [t(*s) for s in here] if isinstance(here, list) else []
    kw = {n: t(*s) for n, s in here.items()} if isinstance(here, dict) else {}
    ((away, shape),) = elsewhere.items()
    with pytest.raises(ValueError, match=rf"{away}.*meta"):
        fn(*args, **kw, **{away: t(*shape, device="meta")})


@pytest.mark.parametrize("away", ["target", "weight", "bias"])
def test_losses(away: str):
    where = dict.fromkeys(("target", "weight", "bias"), "cpu") | {away: "meta"}
    target = torch.zeros(4, dtype=torch.long, device=where["target"])
    weight, bias = t(5, 8, device=where["weight"]), t(5, device=where["bias"])
    with pytest.raises(ValueError, match=rf"`{away}`.*meta"):
        fused_linear_cross_entropy_loss(t(4, 8), target, weight, bias)
    if away == "target":
        with pytest.raises(ValueError, match=r"`target`.*meta"):
            cross_entropy_loss(t(4, 8), target)
