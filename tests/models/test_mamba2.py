# SPDX-License-Identifier: MIT
"""Mamba-2 against the PyTorch path that transformers has for the same checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config as HFConfig
from transformers.models.mamba2.modeling_mamba2 import Mamba2ForCausalLM as HFModel

from fla.layers import Mamba2
from fla.models import Mamba2Config, Mamba2ForCausalLM
from fla.utils import assert_close

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8, "state_size": 16, "vocab_size": 61}


def make(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    return Mamba2ForCausalLM(Mamba2Config(**SIZES, **kwargs))


def stir(model: Any) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"n_groups": 4}, {"use_bias": True, "use_conv_bias": False}, {"dt_limit": (0.01, 0.05)}],
    ids=lambda k: "-".join(k) or "plain",
)
def test_logits_and_gradients_of_transformers(kwargs: dict):
    installed = Version(transformers.__version__)
    if installed < Version("4.57"):
        pytest.skip("transformers 4.45 carries the state from chunk to chunk wrongly")
    if "n_groups" in kwargs and installed < Version("5.24"):
        pytest.skip("transformers up to 5.17 gives heads the wrong groups")
    ours = stir(make(**kwargs))
    named = {"time_step_limit" if name == "dt_limit" else name: value for name, value in kwargs.items()}
    theirs = HFModel(HFConfig(**SIZES, **{"n_groups": 1, "num_heads": 8, "chunk_size": 16, **named})).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randint(1, 61, (2, 37))
    ref, got = theirs(x).logits, ours(x).logits
    assert_close("logits", ref, got, 1e-5)
    dy = torch.randn_like(ref)
    wanted = dict(theirs.named_parameters())
    refs = dict(zip(wanted, torch.autograd.grad((ref * dy).sum(), [*wanted.values()]), strict=True))
    mine = dict(ours.named_parameters())
    gots = dict(zip(mine, torch.autograd.grad((got * dy).sum(), [*mine.values()]), strict=True))
    for name, grad in refs.items():
        assert_close(name, grad, gots[name], 1e-4)


def test_checkpoints_with_the_old_name_of_the_embedding():
    model, other = make(), stir(make())
    state = {name.replace("embeddings.", "embedding."): value for name, value in other.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(model.backbone.embeddings.weight, other.backbone.embeddings.weight)


def test_start_values_are_in_their_ranges():
    layer = Mamba2(
        hidden_size=64, head_dim=2, A_init_range=(2, 3), dt_min=0.01, dt_max=0.02, conv_init=0.5, D_has_hdim=True
    )
    assert ((layer.A_log.exp() - 2.5).abs() <= 0.5001).all()
    dt = torch.nn.functional.softplus(layer.dt_bias)
    assert ((dt - 0.015).abs() <= 0.005001).all()
    assert layer.D.shape == (128,)
    assert layer.conv1d.weight.abs().max() <= 0.5
    assert all(p._no_weight_decay for p in (layer.A_log, layer.D, layer.dt_bias))
    model = make()
    rescaled, plain = (
        m.backbone.layers[0].mixer.out_proj.weight for m in (model, make(rescale_prenorm_residual=False))
    )
    assert rescaled.std() > 2 * plain.std()


def test_other_forms_of_the_layer_decode_what_one_pass_gives():
    from fla.models.utils import Cache

    for kwargs in ({"rmsnorm": False, "D_has_hdim": True}, {"norm_before_gate": True, "hidden_act": "gelu"}):
        layer, x, cache = (
            Mamba2(hidden_size=16, head_dim=4, state_size=8, layer_idx=0, **kwargs),
            torch.randn(2, 9, 16),
            Cache(),
        )
        with torch.no_grad():
            parts = [layer(x[:, a:b], past_key_values=cache, use_cache=True)[0] for a, b in ((0, 5), (5, 6), (6, 9))]
            assert_close("y", layer(x)[0], torch.cat(parts, 1), 1e-5)


@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_bfloat16_keeps_the_residual_in_float32_where_asked(residual_in_fp32: bool):
    model = make(residual_in_fp32=residual_in_fp32).bfloat16().eval()
    out = model(torch.randint(1, 61, (1, 9)), output_hidden_states=True)
    assert out.hidden_states[1].dtype == (torch.float32 if residual_in_fp32 else torch.bfloat16)
    assert out.logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [({"A_init_range": (0, 3)}, "A_init_range"), ({"dt_limit": (2, 1)}, "dt_limit"), ({"dt_min": 0}, "dt_min")],
)
def test_wrong_ranges_are_named(kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        Mamba2Config(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [({"num_heads": 3}, "num_heads"), ({"n_groups": 3}, "n_groups"), ({"hidden_act": "no"}, "hidden_act")],
)
def test_wrong_sizes_of_the_layer_are_named(kwargs: dict, match: str):
    with pytest.raises(ValueError, match=match):
        Mamba2(hidden_size=32, head_dim=8, **kwargs)
