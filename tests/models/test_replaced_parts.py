# SPDX-License-Identifier: MIT
"""What trainers put in place of parts of a model: adapters, hooks, losses. None of it may be passed by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fla.models import KDAConfig, KDAForCausalLM
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss, GatedMLP
from fla.utils import assert_close


class Adapter(nn.Module):
    """A low-rank addition to a frozen projection, which still offers its weight, as peft's does."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def make(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 8, "vocab_size": 61}
    return KDAForCausalLM(KDAConfig(**config, intermediate_size=40, **kwargs))


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 61, (2, 12))


@pytest.mark.parametrize(
    "name", [*(f"attn.{x}_proj" for x in "qkvbo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")), "lm_head"]
)
@pytest.mark.parametrize("training", [True, False])
def test_adapters_take_part(name: str, training: bool):
    model, x = make().train(training), tokens()
    before = model(x, labels=x).loss
    path = name if name == "lm_head" else f"model.layers.0.{name}"
    parent, _, last = path.rpartition(".")
    model.requires_grad_(False)
    adapter = Adapter(model.get_submodule(path))
    setattr(model.get_submodule(parent), last, adapter)
    loss = model(x, labels=x).loss
    assert abs(loss - before) > 1e-7
    loss.backward()
    assert adapter.up.weight.grad.abs().sum() > 0
    assert adapter.down.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("act", ["swish", "powlu"])
def test_hooks_of_the_down_projection_run(act: str):
    torch.manual_seed(0)
    mlp, x = GatedMLP(16, intermediate_size=24, hidden_act=act), torch.randn(2, 3, 16)
    fused, seen = mlp(x), []
    handle = mlp.down_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    assert_close("output", fused, mlp(x), 1e-6)
    assert len(seen) == 1
    handle.remove()
    mlp(x)
    assert len(seen) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss, FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss])
def test_every_criterion_fits_every_configuration(criterion: type, fuse: bool, training: bool):
    model, x = make(fuse_cross_entropy=fuse).train(training), tokens()
    own = model(x, labels=x).loss
    model.criterion = criterion()
    out = model(x, labels=x)
    assert_close("loss", own, out.loss, 1e-5)
    assert (out.logits is None) == (criterion is FusedLinearCrossEntropyLoss)


@pytest.mark.parametrize("training", [True, False])
def test_labels_of_another_shape_are_named(training: bool):
    model, x = make().train(training), tokens()
    with pytest.raises(ValueError, match=r"`labels`.*\[2, 12\].*\[2, 5\]"):
        model(x, labels=x[:, :5])
    with pytest.raises(ValueError, match="`shift_labels`"):
        model(x, shift_labels=x[:1])


def test_wrong_inputs_are_named():
    model, x = make().eval(), tokens()
    with pytest.raises(ValueError, match="`input_ids`"):
        model(x[0])
    with pytest.raises(ValueError, match="`logits_to_keep`"):
        model(x, logits_to_keep=-1)
    with pytest.raises(ValueError, match=r"`cu_seqlens`.*list"):
        model(x[:1], cu_seqlens=[0, 12])
    for mask in (torch.ones(1, 12), torch.ones(3, 12), [[1] * 12] * 2):
        with pytest.raises(ValueError, match="`attention_mask`"):
            model(x, attention_mask=mask)
