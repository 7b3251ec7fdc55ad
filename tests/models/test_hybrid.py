# SPDX-License-Identifier: MIT
"""Hybrid models: softmax attention in some layers of every family. A new family takes part by being in the index."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fla.decoding import StaticDecode
from fla.layers.attn import Attention
from fla.models._index import FAMILIES
from fla.models.utils import Cache
from fla.utils import assert_close

EOS = 2
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 2,
    "head_dim": 8,
    "expand": 1,
    "expand_ratio": 2,
    "gate_low_rank_dim": 6,
    "intermediate_size": 64,
    "num_slots": 8,
    "pad_token_id": 0,
    "proj_low_rank_dim": 4,
    "state_size": 16,
    "vocab_size": 61,
}
FULL = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "rope_theta": 500.0}
WINDOWED = {"layers": [1], "num_heads": 2, "num_kv_heads": 1, "window_size": 6}
# Two kinds of attention beside the family's mixer.
MIXED = [{**WINDOWED, "layers": [0]}, {**FULL, "layers": [2]}]
every_family = pytest.mark.parametrize("entry", FAMILIES, ids=lambda e: e.model_type)
every_plan = pytest.mark.parametrize("attn", [FULL, WINDOWED, MIXED], ids=["full", "windowed", "mixed"])


def make(entry: Any, attn: Any = WINDOWED, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    package = importlib.import_module(f"fla.models.{entry.package}")
    sizes = {name: value for name, value in TINY.items() if name in package.FAMILY.fields}
    model = AutoModelForCausalLM.from_config(getattr(package, entry.names[0])(**{**sizes, "attn": attn, **kwargs}))
    with torch.no_grad():  # logits apart from zero, so that differences show
        for p in model.parameters():
            p.mul_(1 if p.dim() < 2 else 4)
        model.lm_head.weight[EOS] = 0  # never the best
    return model


def attention_layers(model: Any) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def tokens(B: int = 2, T: int = 12) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 61, (B, T))


def padded(B: int, T: int, pads: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    x, mask = tokens(B, T), torch.ones(B, T, dtype=torch.long)
    for i, pad in enumerate(pads):
        x[i, :pad], mask[i, :pad] = 0, 0
    return x, mask


@every_family
def test_the_plan_decides_what_a_layer_is(entry: Any):
    model, plain = make(entry, MIXED), make(entry, None)
    found = {a.layer_idx: a for a in attention_layers(model)}
    plain_layers = [] if entry.model_type != "transformer" else [1]
    assert sorted(found) == sorted([0, *plain_layers, 2])
    sizes = [(a.num_heads, a.num_kv_heads, a.window_size, a.rope_theta) for a in (found[0], found[2])]
    assert sizes == [(2, 1, 6, 10000.0), (4, 2, None, 500.0)]
    assert found[2].q_proj.bias is not None
    # The keys of the layer that stays are those of the family; the others differ in the mixer alone.
    of = [{n for n in m.state_dict() if f"layers.{i}." in n} for m in (model, plain) for i in (1, 2)]
    assert of[0] == of[2]
    mixer = "mixer" if any(".mixer." in n for n in of[3]) else "attn"
    own = {f"{mixer}.{n}" for n in found[2].state_dict()}
    assert {n.split("layers.2.")[1] for n in of[1] if f".{mixer}." in n} == own
    assert {n for n in of[1] if f".{mixer}." not in n} == {n for n in of[3] if f".{mixer}." not in n}


@every_family
def test_saved_hybrids_come_back(entry: Any, tmp_path: Any):
    model, x = make(entry, MIXED).eval(), tokens()
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.attn == model.config.attn
    back = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(back(x).logits, model(x).logits)


@every_family
def test_one_spec_alone_or_in_a_list(entry: Any):
    x, models = tokens(), [make(entry, FULL), make(entry, [FULL])]
    with torch.no_grad():
        assert_close("logits", models[0](x).logits, models[1](x).logits, 1e-5)


@every_family
@every_plan
def test_packed_training_is_separate_training(entry: Any, attn: Any):
    packed, separate, x = make(entry, attn), make(entry, attn), tokens(3, 11)
    rows = [x[0], x[1, :4], x[2]]
    labels = torch.cat([torch.cat([torch.tensor([-100]), row[1:]]) for row in rows])[None]
    cu = torch.tensor([0, 11, 15, 26])
    loss = packed(torch.cat(rows)[None], labels=labels, cu_seqlens=cu, num_items_in_batch=1).loss
    ref = sum(separate(row[None], labels=row[None], num_items_in_batch=1).loss for row in rows)
    assert_close("loss", ref, loss, 1e-5)
    ref.backward()
    loss.backward()
    for (name, a), b in zip(separate.named_parameters(), packed.parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-4)


# G05, G16
@every_family
@every_plan
def test_prefill_and_steps_with_a_growing_mask(entry: Any, attn: Any):
    model, (x, mask) = make(entry, attn).eval(), padded(3, 24, (0, 3, 15))
    with torch.no_grad():
        out = model(x[:, :20], attention_mask=mask[:, :20], use_cache=True)
        logits, cache = [out.logits], out.past_key_values
        for t in range(20, 24):
            out = model(x[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
        assert [cache.get_seq_length(i) for i in range(3)] == [24] * 3
        joined = torch.cat(logits, 1)
        for i, row in enumerate(mask):
            assert_close("logits", model(x[i : i + 1, row == 1]).logits, joined[i : i + 1, row == 1], 1e-4)


@every_family
def test_chunked_prefill(entry: Any):
    model, x, cache, parts = make(entry, MIXED).eval(), tokens(2, 90), Cache(), []
    with torch.no_grad():
        for a, b in ((0, 5), (5, 6), (6, 80), (80, 90)):
            parts.append(model(x[:, a:b], past_key_values=cache, use_cache=True).logits)
        assert_close("logits", model(x).logits, torch.cat(parts, 1), 1e-4)


@every_family
@every_plan
def test_greedy_generation_of_left_padded_prompts(entry: Any, attn: Any):
    model, pads = make(entry, attn).eval(), (4, 0, 7)
    x, mask = padded(3, 10, pads)
    out = model.generate(x, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for i, pad in enumerate(pads):
        alone = model.generate(
            x[i : i + 1, pad:],
            attention_mask=mask[i : i + 1, pad:],
            max_new_tokens=5,
            do_sample=False,
            use_cache=False,
        )
        assert torch.equal(out[i, 10:], alone[0, 10 - pad :])


@every_family
def test_beam_search_is_beam_search_without_a_cache(entry: Any):
    model, (x, mask) = make(entry, MIXED).eval(), padded(2, 9, (0, 3))
    kwargs = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(x, **kwargs), model.generate(x, use_cache=False, **kwargs))


@every_family
def test_rows_of_a_cache_are_taken_repeated_moved_and_reset(entry: Any):
    model, x, cache = make(entry, MIXED).eval(), tokens(2, 9), Cache()
    with torch.no_grad():
        model(x, past_key_values=cache, use_cache=True)
        step = tokens(1, 1).expand(3, 1)
        wanted = [model(torch.cat([x[i : i + 1], step[:1]], 1)).logits[:, -1:] for i in (1, 0, 1)]
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2, 1]))
        for i in range(3):
            cache.offload(i, only_non_sliding=False)
            cache.prefetch(i, only_non_sliding=False)
        assert cache.batch_size == 3
        logits = model(step, past_key_values=cache, use_cache=True).logits
        assert_close("logits", torch.cat(wanted), logits, 1e-4)
        cache.reset()
        assert cache.get_seq_length(2) == 0
        assert_close("again", model(x).logits, model(x, past_key_values=cache, use_cache=True).logits, 1e-5)


@every_family
def test_a_cache_is_cropped_in_all_layers_or_in_none(entry: Any):
    model, x, cache = make(entry, FULL).eval(), tokens(2, 9), Cache()
    with torch.no_grad():
        model(x, past_key_values=cache, use_cache=True)
        if entry.model_type == "transformer":  # nothing but attention can be rolled back
            cache.crop(7)
            logits = model(x[:, 7:], past_key_values=cache, use_cache=True).logits
            assert_close("logits", model(x).logits[:, 7:], logits, 1e-5)
            return
        with pytest.raises(NotImplementedError, match="cannot be rolled back"):
            cache.crop(7)
        assert [cache.get_seq_length(i) for i in range(3)] == [9] * 3
        assert cache[1]["attn_state"][0].shape[1] == 9
        cache.crop(0)


@every_family
def test_autocast(entry: Any):
    model, x = make(entry, MIXED), tokens(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x, labels=x).loss
    loss.backward()
    assert_close("loss", model(x, labels=x).loss, loss.float(), 3e-2)
    assert all(p.grad is not None and p.grad.dtype == p.dtype and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=3).shape == (2, 23)


@every_family
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpointing_changes_no_gradient(entry: Any):
    x, models = tokens(), [make(entry, MIXED), make(entry, MIXED)]
    models[1].gradient_checkpointing_enable()
    for model in models:
        model(x, labels=x).loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-6)


# The window of 6 goes round more than once.
@every_family
@pytest.mark.parametrize(
    ("device", "dtype", "limit"),
    [
        pytest.param("cpu", torch.float32, 1e-5, id="cpu"),
        pytest.param("cuda", torch.bfloat16, 2e-2, id="graph", marks=pytest.mark.gpu),
    ],
)
def test_steps_in_place_give_what_the_model_gives(entry: Any, device: str, dtype: torch.dtype, limit: float):
    sizes = {"hidden_size": 256, "head_dim": 64, "num_heads": 4} if device == "cuda" else {}
    fields = importlib.import_module(f"fla.models.{entry.package}").FAMILY.fields
    model = make(entry, MIXED, **{n: size for n, size in sizes.items() if n in fields}).eval().to(device, dtype)
    x, mask = (t.to(device) for t in padded(3, 24, (0, 2, 5)))
    with torch.no_grad():
        plain = model(x[:, :9], attention_mask=mask[:, :9], use_cache=True).past_key_values
        decode = StaticDecode(model, plain, attention_mask=mask[:, :9], max_length=23)
        assert (decode.graph is not None) == (device == "cuda")
        for t in range(9, 23):
            step = {"attention_mask": mask[:, : t + 1], "use_cache": True}
            ref = model(x[:, t : t + 1], past_key_values=plain, **step).logits[:, -1]
            assert_close(f"step {t}", ref, decode.step(x[:, t]), limit)
        back, step = decode.cache(), {"attention_mask": mask, "use_cache": True}
        ref, last = (model(x[:, 23:], past_key_values=c, **step).logits for c in (plain, back))
        assert_close("after", ref, last, limit)


@pytest.mark.parametrize("attn", [FULL, WINDOWED], ids=["full", "windowed"])
def test_compiled_forward_is_the_forward(attn: Any):
    entry = next(e for e in FAMILIES if e.model_type == "kda")
    model, x = make(entry, attn, num_hidden_layers=2).eval(), tokens()
    torch.compiler.reset()  # the decoder's code is shared, and Dynamo counts compilations by code
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close("logits", model(x, use_cache=False).logits, compiled(x, use_cache=False).logits, 1e-5)


def test_compiled_training_is_training():
    entry = next(e for e in FAMILIES if e.model_type == "kda")
    models, x = [make(entry, MIXED), make(entry, MIXED)], tokens().view(1, 24)
    torch.compiler.reset()
    compiled = torch.compile(models[1], backend="aot_eager", fullgraph=True)
    for run in (models[0], compiled):
        run(x, labels=x, cu_seqlens=torch.tensor([0, 5, 24])).loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-5)
