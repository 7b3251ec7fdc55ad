# SPDX-License-Identifier: MIT
"""The Mamba layer against the PyTorch path of transformers, and the plan of Samba."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from transformers.models.mamba.modeling_mamba import MambaConfig as HFConfig
from transformers.models.mamba.modeling_mamba import MambaMixer

from fla.layers import Mamba
from fla.models import SambaConfig, SambaForCausalLM
from fla.models.utils import Cache
from fla.utils import assert_close


def make(**kwargs: Any) -> Mamba:
    torch.manual_seed(0)
    layer = Mamba(hidden_size=24, intermediate_size=48, layer_idx=0, **{"state_size": 4, **kwargs})
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return layer


@pytest.mark.parametrize("slices", [1, 5])
@pytest.mark.parametrize(
    "kwargs", [{}, {"use_bias": True, "use_conv_bias": False, "dt_rank": 3}, {"hidden_act": "relu"}], ids=str
)
def test_output_and_gradients_of_transformers(kwargs: dict, slices: int, monkeypatch: pytest.MonkeyPatch):
    if "hidden_act" in kwargs and Version(transformers.__version__) < Version("5.16"):
        pytest.skip("its PyTorch path gates with the activation of the convolution, its kernels with SiLU")
    monkeypatch.setattr(importlib.import_module("fla.layers.mamba"), "SLICE", 2 * 19 * 48 * 4 // slices)
    layer, x = make(**kwargs), torch.randn(2, 19, 24)
    named = {{"dt_rank": "time_step_rank"}.get(name, name): value for name, value in kwargs.items()}
    theirs: Any = MambaMixer(HFConfig(hidden_size=24, intermediate_size=48, state_size=4, **named), layer_idx=0)
    theirs.load_state_dict(layer.state_dict())
    ref, got = getattr(theirs, "slow_forward", theirs)(x), layer(x)[0]
    assert_close("y", ref, got, 1e-5)
    ref.sin().sum().backward()
    got.sin().sum().backward()
    mine = dict(layer.named_parameters())
    for name, p in theirs.named_parameters():
        assert_close(name, p.grad, mine[name].grad, 1e-4)


@pytest.mark.parametrize("slices", [1, 5])
def test_packing_padding_and_cache(slices: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.import_module("fla.layers.mamba"), "SLICE", 2 * 19 * 48 * 4 // slices)
    layer, x = make(), torch.randn(2, 19, 24)
    with torch.no_grad():
        cu = torch.tensor([0, 4, 19])
        assert_close("packed", layer(x[:1, 4:])[0], layer(x[:1], cu_seqlens=cu)[0][:, 4:], 1e-5)
        mask = torch.ones(2, 19)
        mask[0, :3] = 0
        assert_close("padded", layer(x[:1, 3:])[0], layer(x, mask)[0][:1, 3:], 1e-5)
        cache, parts = Cache(), []
        for a, b in ((0, 5), (5, 6), (6, 19)):
            parts.append(layer(x[:, a:b], past_key_values=cache, use_cache=True)[0])
        assert_close("cached", layer(x)[0], torch.cat(parts, 1), 1e-5)
        assert list(cache[0]["recurrent_state"].shape) == [2, 48, 4]


def test_start_values():
    layer = Mamba(hidden_size=64, intermediate_size=96, dt_init="constant", dt_scale=2.0, dt_min=0.01, dt_max=0.02)
    assert layer.time_step_rank == 4
    assert_close("A", torch.arange(1.0, 17).expand(96, 16), layer.A_log.exp(), 1e-6)
    assert (layer.dt_proj.weight == 1).all()
    dt = F.softplus(layer.dt_proj.bias)
    assert ((dt - 0.015).abs() <= 0.005001).all()
    assert all(p._no_weight_decay for p in (layer.A_log, layer.D))
    with pytest.raises(ValueError, match="dt_init"):
        Mamba(dt_init="zero")
    # The start survives the initialisation of a whole model, and a rescaled residual stream is one.
    sizes: Any = {"hidden_size": 36, "num_hidden_layers": 4, "vocab_size": 61}
    models = [SambaForCausalLM(SambaConfig(**sizes, rescale_prenorm_residual=rescale)) for rescale in (True, False)]
    rescaled, plain = (model.backbone.layers[2] for model in models)
    assert F.softplus(plain.mixer.dt_proj.bias).max() < 0.11
    assert rescaled.mixer.out_proj.weight.std() > 1.5 * plain.mixer.out_proj.weight.std()
    assert models[0].backbone.layers[1].mixer.window_size == 2048


def test_the_usual_plan_of_samba_fits_fewer_layers():
    assert SambaConfig().attn["layers"] == [1, 3, 5, 7, 9, 11, 13, 15, 17]
    small = SambaConfig(num_hidden_layers=4)
    assert small.attn["layers"] == [1, 3]
    saved = SambaConfig().to_dict()
    assert SambaConfig.from_dict(saved, num_hidden_layers=4).num_hidden_layers == 4
    assert SambaConfig(**{**saved, "num_hidden_layers": 4, "transformers_version": "5.0"}).attn["layers"] == [1, 3]
    plan = dict(saved["attn"])
    with pytest.raises(ValueError, match="layers"):
        SambaConfig(num_hidden_layers=4, attn=plan)


@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_bfloat16_keeps_the_residual_in_float32_where_asked(residual_in_fp32: bool):
    sizes: Any = {"hidden_size": 36, "num_hidden_layers": 2, "vocab_size": 61}
    model = SambaForCausalLM(SambaConfig(**sizes, residual_in_fp32=residual_in_fp32)).bfloat16().eval()
    out = model(torch.randint(1, 61, (1, 9)), output_hidden_states=True)
    assert out.hidden_states[1].dtype == (torch.float32 if residual_in_fp32 else torch.bfloat16)
    assert out.logits.dtype == torch.bfloat16
