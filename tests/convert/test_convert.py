# SPDX-License-Identifier: MIT
"""Converted checkpoints compute what the originals do, and come back unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fla.convert import (
    ConversionError,
    convert_back,
    convert_checkpoint,
    convert_config,
    convert_state_dict,
)
from fla.utils import assert_close

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_theta": 5000.0, "rms_norm_eps": 1e-4}),
    "tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 7}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
}


def original(kind: str, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    cls, config, options = KINDS[kind]
    model = cls(config(**{**SIZES, **options, **kwargs}, attn_implementation="eager")).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 61, (2, 19))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_stay_the_same(kind: str, tmp_path: Path):
    theirs, x = original(kind), tokens()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        ref = theirs(x).logits
        assert_close("logits", ref, ours(x).logits, 1e-5)
        assert_close("loaded", ref, back(x).logits, 1e-5)
    assert type(back).__name__ == "TransformerForCausalLM"
    if kind == "tied":
        assert ours.lm_head.weight is ours.model.embeddings.weight


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_changes_no_bit(kind: str):
    theirs = original(kind)
    source, config = theirs.state_dict(), theirs.config.to_dict()
    ours = convert_state_dict(config, source)
    fields, state = convert_back(convert_config(config), ours)
    assert fields["model_type"] == theirs.config.model_type
    for name in state:
        assert torch.equal(state[name], source[name]), name
    assert source.keys() - state.keys() <= {"lm_head.weight"}
    again = type(theirs.config)(**{**fields, "attn_implementation": "eager"})
    model = type(theirs)(again).eval()
    model.load_state_dict(state, strict=kind != "tied")
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, theirs(tokens()).logits)


def test_dtype_and_tokenizer_go_along(tmp_path: Path):
    original("llama").save_pretrained(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    model = convert_checkpoint(tmp_path / "a", tmp_path / "b", torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"head_dim": 16}, "head_dim"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
    ],
)
def test_what_cannot_be_computed_is_named_and_nothing_written(change: dict, match: str, tmp_path: Path):
    original("llama").save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name != "rope_parameters"}
    path.write_text(json.dumps({**config, **change}))
    with pytest.raises(ConversionError, match=match):
        convert_checkpoint(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_parameters_that_do_not_fit_are_named(tmp_path: Path):
    theirs = original("llama")
    config, state = theirs.config.to_dict(), theirs.state_dict()
    with pytest.raises(ConversionError, match=r"nothing is known to do with surplus"):
        convert_state_dict(config, {**state, "surplus": torch.zeros(1)})
    with pytest.raises(ConversionError, match=r"has no model\.norm\.weight"):
        convert_state_dict(config, {n: t for n, t in state.items() if n != "model.norm.weight"})
    with pytest.raises(ConversionError, match=r"config\.json"):
        convert_checkpoint(tmp_path, tmp_path / "b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match="safetensors"):
        convert_checkpoint(tmp_path, tmp_path / "b")
    with pytest.raises(ConversionError, match="not an empty folder"):
        convert_checkpoint(tmp_path, tmp_path)
    torch.save({**state, "model.norm.weight": torch.ones(5)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"model\.norm\.weight must have shape \(32,\), got \(5,\)"):
        convert_checkpoint(tmp_path, tmp_path / "b")


def test_a_pickle_that_holds_more_than_tensors_is_refused(tmp_path: Path):
    theirs = original("llama")
    (tmp_path / "config.json").write_text(json.dumps(theirs.config.to_dict(), default=str))
    torch.save({"model.norm.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=r"weights_only|Weights only"):
        convert_checkpoint(tmp_path, tmp_path / "b")


RWKV = {"model_type": "rwkv6", "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 61, "head_size": 8}


def rwkv6_state(seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint in the layout that RWKV-6 is published in."""
    torch.manual_seed(seed)
    D, H, r, g, width = 16, 2, 3, 5, 32
    shapes: dict[str, tuple[int, ...]] = {"rwkv.embeddings.weight": (61, D), "head.weight": (61, D)}
    norms = ["rwkv.blocks.0.pre_ln", "rwkv.ln_out"]
    for i in range(2):
        a, f = f"rwkv.blocks.{i}.attention", f"rwkv.blocks.{i}.feed_forward"
        norms += [f"rwkv.blocks.{i}.ln1", f"rwkv.blocks.{i}.ln2", f"{a}.ln_x"]
        shapes |= {f"{a}.time_maa_{n}": (1, 1, D) for n in "xwkvrg"}
        shapes |= {f"{a}.time_maa_w1": (D, 5 * r), f"{a}.time_maa_w2": (5, r, D)}
        shapes |= {f"{a}.time_decay": (1, 1, D), f"{a}.time_decay_w1": (D, g), f"{a}.time_decay_w2": (g, D)}
        shapes |= {f"{a}.time_faaaa": (H, D // H)}
        shapes |= {f"{a}.{n}.weight": (D, D) for n in ("receptance", "key", "value", "gate", "output")}
        shapes |= {f"{f}.time_maa_k": (1, 1, D), f"{f}.time_maa_r": (1, 1, D)}
        shapes |= {f"{f}.key.weight": (width, D), f"{f}.value.weight": (D, width), f"{f}.receptance.weight": (D, D)}
    state = {name: torch.randn(shape, dtype=torch.float64) * 0.3 for name, shape in shapes.items()}
    for name in norms:
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(D, dtype=torch.float64)
        state[f"{name}.bias"] = 0.1 * torch.randn(D, dtype=torch.float64)
    return state


def rwkv6_logits(s: dict[str, Tensor], x: Tensor) -> Tensor:
    """RWKV-6 written down, token by token, with the names and layouts of its checkpoints; ``x`` ``[T]``."""

    def norm(h: Tensor, name: str) -> Tensor:
        return F.layer_norm(h, (16,), s[f"{name}.weight"], s[f"{name}.bias"], 1e-5)

    h = norm(s["rwkv.embeddings.weight"][x], "rwkv.blocks.0.pre_ln")
    for i in range(2):
        b = f"rwkv.blocks.{i}"
        a, f = f"{b}.attention", f"{b}.feed_forward"
        y = norm(h, f"{b}.ln1")
        d = F.pad(y, (0, 0, 1, 0))[:-1] - y
        low = torch.tanh((y + d * s[f"{a}.time_maa_x"][0]) @ s[f"{a}.time_maa_w1"]).unflatten(1, (5, 3))
        mixed = torch.einsum("tnr,nrd->ntd", low, s[f"{a}.time_maa_w2"])
        into = {n: y + d * (s[f"{a}.time_maa_{n}"][0] + m) for n, m in zip("wkvrg", mixed, strict=True)}
        r, k, v, gate = (
            into[n] @ s[f"{a}.{name}.weight"].T
            for n, name in (("r", "receptance"), ("k", "key"), ("v", "value"), ("g", "gate"))
        )
        w = s[f"{a}.time_decay"][0] + torch.tanh(into["w"] @ s[f"{a}.time_decay_w1"]) @ s[f"{a}.time_decay_w2"]
        r, k, v, w = (t.unflatten(1, (2, 8)) for t in (r, k, v, torch.exp(-torch.exp(w))))
        S, out = torch.zeros(2, 8, 8, dtype=torch.float64), []
        for t in range(len(x)):
            kv = k[t][..., None] * v[t][:, None]
            out.append(torch.einsum("hk,hkv->hv", r[t], S + s[f"{a}.time_faaaa"][..., None] * kv))
            S = S * w[t][..., None] + kv
        # The epsilon of this norm is 1e-5 * head_size_divisor ** 2.
        o = F.group_norm(torch.stack(out).flatten(1), 2, s[f"{a}.ln_x.weight"], s[f"{a}.ln_x.bias"], 64e-5)
        h = h + (o * F.silu(gate)) @ s[f"{a}.output.weight"].T
        y = norm(h, f"{b}.ln2")
        d = F.pad(y, (0, 0, 1, 0))[:-1] - y
        key = F.relu((y + d * s[f"{f}.time_maa_k"][0]) @ s[f"{f}.key.weight"].T) ** 2
        gate = torch.sigmoid((y + d * s[f"{f}.time_maa_r"][0]) @ s[f"{f}.receptance.weight"].T)
        h = h + gate * (key @ s[f"{f}.value.weight"].T)
    return norm(h, "rwkv.ln_out") @ s["head.weight"].T


def test_rwkv6_logits_stay_the_same(tmp_path: Path):
    from safetensors.torch import save_file

    state = rwkv6_state()
    config = {**RWKV, "intermediate_size": 32}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    save_file(state, tmp_path / "a" / "model.safetensors")
    convert_checkpoint(tmp_path / "a", tmp_path / "b")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval().double()
    x = tokens()
    with torch.no_grad():
        ref = torch.stack([rwkv6_logits(state, row) for row in x])
        assert_close("logits", ref, model(x).logits, 1e-6)


def test_rwkv6_there_and_back_changes_no_bit():
    from fla.convert import RWKV6, apply

    state, config = rwkv6_state(), {**RWKV, "intermediate_size": 32}
    back = apply(RWKV6, config, convert_state_dict(config, state), reverse=True)
    assert back.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name


def test_sizes_of_rwkv6():
    config = convert_config({**RWKV, "hidden_size": 2560, "attention_hidden_size": 2560, "head_size": 64})
    assert (config.num_heads, config.intermediate_size, config.proj_low_rank_dim) == (40, 8960, 32)
    for change, match in (({"head_size": 7}, "head_size"), ({"head_size_divisor": 6}, "head_size_divisor")):
        with pytest.raises(ConversionError, match=match):
            convert_config({**RWKV, **change})
