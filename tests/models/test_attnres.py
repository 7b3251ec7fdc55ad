# SPDX-License-Identifier: MIT
"""Attention over residuals in every family that has the field, against its definition."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fla.models import RWKV6Config, RWKV6ForCausalLM, SambaConfig, SambaForCausalLM
from fla.models._index import FAMILIES
from fla.models.utils import Cache
from fla.utils import assert_close

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 2,
    "head_dim": 8,
    "expand_ratio": 2,
    "intermediate_size": 40,
    "num_slots": 8,
    "vocab_size": 61,
}


def row(entry: Any) -> Any:
    return importlib.import_module(f"fla.models.{entry.package}").FAMILY


HAVE = [e for e in FAMILIES if "attnres_block_size" in row(e).fields and e.model_type != "samba"]
every_family = pytest.mark.parametrize("entry", HAVE, ids=lambda e: e.model_type)
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
every_size = pytest.mark.parametrize("size", [1, 2, 4])


def make(entry: Any, size: int | None, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    sizes = {name: value for name, value in TINY.items() if name in row(entry).fields}
    config = row(entry).get(f"{entry.stem}Config")(**{**sizes, "attnres_block_size": size, **kwargs})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 if p.dim() < 2 else 4)
        for name, p in model.named_parameters():
            if "res_proj" in name:
                p.normal_(0, 0.5)
            if "norm" in name and p.dim() == 1:
                p.uniform_(0.5, 1.5)
    return model


def tokens(B: int = 2, T: int = 12) -> Tensor:
    return torch.randint(3, 61, (B, T), generator=torch.Generator().manual_seed(1))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def reference(model: Any, x: Tensor, size: int) -> Tensor:
    """Logits, part by part as the definition has it."""
    base = model.model
    finished, running = [], base.embeddings(x)

    def enter(module: Any, name: str, norm: Any) -> Tensor:
        sums = torch.stack([*finished, running])
        query, scale = getattr(module, f"{name}res_proj").weight[0], getattr(module, f"{name}res_norm").weight
        shares = (rms(sums, scale) @ query).softmax(0)
        return rms((shares[..., None] * sums).sum(0), norm.weight)

    bounds = getattr(base, "lower_bounds", None)
    for i, layer in enumerate(base.layers):
        shares = None if bounds is None else bounds.softmax(0)[1 : i + 1].sum(0)
        for part, name in enumerate(("attn", "mlp")):
            entering = enter(layer, f"{name}_", getattr(layer, f"{name}_norm"))
            out = layer.attn(entering, lower_bound=shares)[0] if name == "attn" else layer.mlp(entering)
            if (2 * i + part) % size == 0:
                finished.append(running)
                running = out
            else:
                running = running + out
    return model.lm_head(enter(base, "", base.norm))


@every_family
@every_size
def test_logits_and_gradients_of_the_definition(entry: Any, size: int):
    models, x = [make(entry, size), make(entry, size)], tokens()
    got, wanted = models[0](x).logits, reference(models[1], x, size)
    assert_close("logits", wanted, got, 1e-5)
    got.sin().sum().backward()
    wanted.sin().sum().backward()
    for (name, a), b in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-4)


@every_family
def test_keys_and_start_values(entry: Any):
    with_, without = (set(make(entry, size).state_dict()) for size in (2, None))
    blocks = {
        f"model.layers.{i}.{p}_res_{k}.weight" for i in range(3) for p in ("attn", "mlp") for k in ("proj", "norm")
    }
    assert with_ - without == blocks | {"model.res_proj.weight", "model.res_norm.weight"}
    assert without <= with_
    sizes = {name: value for name, value in TINY.items() if name in row(entry).fields}
    model = AutoModelForCausalLM.from_config(row(entry).get(f"{entry.stem}Config")(**sizes, attnres_block_size=2))
    assert all((p == 0).all() for n, p in model.named_parameters() if "res_proj" in n)
    assert list(model.model.res_proj.weight.shape) == [1, 32]


@every_family
def test_packing_cache_and_checkpointing(entry: Any):
    model, x = make(entry, 2), tokens(2, 11)
    with torch.no_grad():
        packed = model(x.view(1, 22), cu_seqlens=torch.tensor([0, 11, 22])).logits
        assert_close("packed", model(x).logits, packed.view(2, 11, -1), 1e-5)
        model.eval()
        cache, parts = Cache(), []
        for a, b in ((0, 7), (7, 8), (8, 11)):
            parts.append(model(x[:, a:b], past_key_values=cache, use_cache=True).logits)
        assert_close("cached", model(x).logits, torch.cat(parts, 1), 1e-4)
        hidden = model(x, output_hidden_states=True).hidden_states
        assert len(hidden) == 4
    models = [make(entry, 2), make(entry, 2)]
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for m in models:
        m(x, labels=x).loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-6)


def test_reentrant_checkpointing_is_refused():
    model, x = make(HAVE[0], 2), tokens()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(x, labels=x)


def test_compiled_forward_is_the_forward():
    entry = next(e for e in HAVE if e.model_type == "transformer")
    model, x = make(entry, 2).eval(), tokens()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close("logits", model(x, use_cache=False).logits, compiled(x, use_cache=False).logits, 1e-5)


def test_families_without_it_say_so():
    with pytest.raises(NotImplementedError, match="attnres_block_size"):
        SambaForCausalLM(SambaConfig(hidden_size=36, num_hidden_layers=2, attnres_block_size=2))
    with pytest.raises(NotImplementedError, match="attnres_block_size"):
        RWKV6ForCausalLM(RWKV6Config(hidden_size=32, num_hidden_layers=2, attnres_block_size=2))
