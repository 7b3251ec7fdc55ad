# SPDX-License-Identifier: MIT
"""What every family of models must do. A new family takes part by being in the index.

``tests/data/state_dicts/<model_type>.json`` holds the keys and shapes of a block that the reference has at these sizes,
without the norms and the MLP, which all families share, and of what the model has beside its blocks (``model.``); or
all keys and shapes, for families with other blocks.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fla.backends import trace
from fla.decoding import StaticDecode
from fla.models._index import FAMILIES
from fla.models.utils import Cache
from fla.modules._plain import is_plain_linear
from fla.utils import assert_close

EOS = 2
# Sizes for whichever of these fields a family has.
TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "expand_ratio": 16,
    "vocab_size": 61,
    "intermediate_size": 40,
    "pad_token_id": 0,
}
# What goes beside or before them in some.
TINY_OF = {
    "gsa": {"num_slots": 8},
    "hgrn": {"expand_ratio": 2},
    "mamba2": {"state_size": 16},
    "rwkv6": {"proj_low_rank_dim": 4, "gate_low_rank_dim": 6, "intermediate_size": 64},
    "samba": {"attn": {"layers": [0], "num_heads": 2, "window_size": 9}},
}
STATE_DICTS = Path(__file__).parents[1] / "data" / "state_dicts"
every_family = pytest.mark.parametrize("entry", FAMILIES, ids=lambda e: e.model_type)


def make_config(entry: Any, **kwargs: Any) -> Any:
    package = importlib.import_module(f"fla.models.{entry.package}")
    tiny = {**TINY, **TINY_OF.get(entry.model_type, {})}
    sizes = {name: value for name, value in tiny.items() if name in package.FAMILY.fields}
    return getattr(package, entry.names[0])(**{**sizes, **kwargs})


def make(entry: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(entry, **kwargs))
    with torch.no_grad():  # logits apart from zero, so that differences show
        for p in model.parameters():
            p.mul_(1 if p.dim() < 2 else 4)
        model.lm_head.weight[EOS] = 0  # never the best
    return model


def tokens(B: int = 2, T: int = 12) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 61, (B, T))


def greedy(model: Any, x: Tensor, steps: int) -> Tensor:
    with torch.no_grad():
        for _ in range(steps):
            x = torch.cat([x, model(x, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return x


@every_family
def test_state_dict_of_the_reference(entry: Any):
    expected = json.loads((STATE_DICTS / f"{entry.model_type}.json").read_text())
    if "lm_head.weight" not in expected:
        whole = {name: expected.pop(name) for name in [*expected] if name.startswith("model.")}
        block = {
            "attn_norm.weight": [32],
            **expected,
            "mlp_norm.weight": [32],
            "mlp.gate_proj.weight": [40, 32],
            "mlp.up_proj.weight": [40, 32],
            "mlp.down_proj.weight": [32, 40],
        }
        expected = {
            "model.embeddings.weight": [61, 32],
            **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()},
            **whole,
            "model.norm.weight": [32],
            "lm_head.weight": [61, 32],
        }
    model = make(entry)
    assert {name: list(p.shape) for name, p in model.state_dict().items()} == expected
    renamed = {name.replace("g_norm_swish_gate", "g_norm") for name in expected}  # not fused, it has another name
    assert make(entry, fuse_norm=False).state_dict().keys() == renamed
    assert not list(model.buffers())


@every_family
def test_config_round_trip(entry: Any, tmp_path: Path):
    config = make_config(entry, my_own_field=[1, 2])
    config.save_pretrained(tmp_path)
    back = AutoConfig.from_pretrained(tmp_path)
    assert type(back) is type(config)
    assert {**back.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
    assert set(type(config)().to_dict()) >= {type(config).attribute_map.get(name, name) for name in config.fields}


@every_family
def test_saved_models_come_back(entry: Any, tmp_path: Path):
    model, x = make(entry).eval(), tokens()
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(back).__name__ == entry.names[1]
    assert type(back).__module__ == f"fla.models.{entry.package}.modeling_{entry.package}"
    with torch.no_grad():
        assert torch.equal(back(x).logits, model(x).logits)


@every_family
@pytest.mark.parametrize("linear", [True, False])
def test_every_parameter_has_a_gradient(entry: Any, linear: bool):
    model, x = make(entry, fuse_cross_entropy=not linear, fuse_linear_cross_entropy=linear), tokens(2, 70)
    out = model(x, labels=x)
    out.loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name
        assert p.grad.abs().sum() > 0, name
    wanted = torch.nn.functional.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert_close("loss", wanted, out.loss, 1e-5)


# Adapters and quantised layers take the place of projections, and hooks watch them: none may be passed by.
@every_family
@pytest.mark.parametrize("training", [True, False])
def test_every_projection_is_called(entry: Any, training: bool):
    model, seen = make(entry, num_hidden_layers=1).train(training), set()
    linears = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, module in linears.items():
        module.register_forward_hook(lambda *args, name=name: seen.add(name))
    model(tokens(), labels=tokens())
    assert seen == linears.keys()


@every_family
def test_packed_training_is_separate_training(entry: Any):
    packed, separate, x = make(entry), make(entry), tokens(3, 11)
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


@every_family
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpointing_changes_no_gradient(entry: Any):
    x, models = tokens(), [make(entry), make(entry)]
    models[1].gradient_checkpointing_enable()
    losses = [model(x, labels=x).loss for model in models]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-6)


# V08: checkpointing that loses `cu_seqlens`.
@every_family
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_checkpointing_keeps_packed_sequences_apart(entry: Any):
    x, cu, models = tokens(1, 14), torch.tensor([0, 5, 14]), [make(entry), make(entry)]
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in models:
        model(x, labels=x, cu_seqlens=cu).loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-6)


@every_family
def test_bfloat16_weights_train(entry: Any):
    model, x = make(entry).bfloat16(), tokens()
    model(x, labels=x).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@every_family
def test_prefill_and_steps_with_a_growing_mask(entry: Any):
    model, x, mask = make(entry).eval(), tokens(3, 76), torch.ones(3, 76, dtype=torch.long)
    for i, pad in enumerate((0, 3, 17)):
        mask[i, :pad] = 0
    with torch.no_grad():
        out = model(x[:, :70], attention_mask=mask[:, :70], use_cache=True)
        logits, cache = [out.logits], out.past_key_values
        for t in range(70, 76):
            out = model(x[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)
            assert out.past_key_values is cache
            logits.append(out.logits)
        joined = torch.cat(logits, 1)
        for i, row in enumerate(mask):
            assert_close("logits", model(x[i : i + 1, row == 1]).logits, joined[i : i + 1, row == 1], 1e-4)


@every_family
def test_chunked_prefill(entry: Any):
    model, x, cache, parts = make(entry).eval(), tokens(2, 150), Cache(), []
    with torch.no_grad():
        for a, b in ((0, 70), (70, 71), (71, 150)):
            parts.append(model(x[:, a:b], past_key_values=cache, use_cache=True).logits)
        assert_close("logits", model(x).logits, torch.cat(parts, 1), 1e-4)


@every_family
def test_greedy_generation_of_left_padded_prompts(entry: Any):
    model, x = make(entry).eval(), tokens(3, 10)
    mask = torch.ones_like(x)
    for i, pad in enumerate((4, 0, 7)):
        x[i, :pad], mask[i, :pad] = 0, 0
    out = model.generate(x, attention_mask=mask, max_new_tokens=5, do_sample=False)
    for i, pad in enumerate((4, 0, 7)):
        assert torch.equal(out[i, 10:], greedy(model, x[i : i + 1, pad:], 5)[0, 10 - pad :])


@every_family
def test_convolutions_that_step_together_change_no_token(entry: Any, monkeypatch: pytest.MonkeyPatch):
    model, x = make(entry).eval(), tokens(3, 10)
    mask = torch.ones_like(x)
    x[0, :4], mask[0, :4] = 0, 0
    kwargs = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    wanted = model.generate(x, **kwargs)
    monkeypatch.setattr("fla.modules.causal_conv1d.together._on_host", lambda x: False)
    assert torch.equal(wanted, model.generate(x, **kwargs))


@every_family
def test_beam_search_is_beam_search_without_a_cache(entry: Any):
    model, x = make(entry).eval(), tokens()
    kwargs = {"attention_mask": torch.ones_like(x), "max_new_tokens": 5, "num_beams": 3, "do_sample": False}
    assert torch.equal(model.generate(x, **kwargs), model.generate(x, use_cache=False, **kwargs))


@every_family
def test_generating_in_place_gives_what_generate_gives(entry: Any):
    model, x = make(entry).eval(), tokens(3, 10)
    mask = torch.ones_like(x)
    for i, pad in enumerate((4, 0, 7)):
        x[i, :pad], mask[i, :pad] = 0, 0
    for beams in (1, 2):
        kwargs = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
        kwargs |= {"num_beams": beams, "num_return_sequences": beams}
        plain, static = model.generate(x, **kwargs), model.generate(x, cache_implementation="static", **kwargs)
        assert torch.equal(plain.sequences, static.sequences)
        last, longer = plain.sequences[:, -1:], torch.nn.functional.pad(mask, (0, 6), value=1)
        step = {"attention_mask": longer.repeat_interleave(beams, 0), "use_cache": True}
        with torch.no_grad():  # the caches that come back are the same, and go on as usual
            ref, ours = (model(last, past_key_values=out.past_key_values, **step) for out in (plain, static))
        assert_close("next", ref.logits, ours.logits, 1e-5)
        assert ours.past_key_values.get_seq_length() == 16


@every_family
def test_compiled_forward_is_the_forward(entry: Any):
    model, x = make(entry, num_hidden_layers=1).eval(), tokens()
    torch.compiler.reset()  # the decoder's code is shared, and Dynamo counts compilations by code
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close("logits", model(x, use_cache=False).logits, compiled(x, use_cache=False).logits, 1e-5)


def gradients(model: Any, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x, labels=x).loss.backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@every_family
def test_projections_that_are_computed_together_change_no_gradient(entry: Any, monkeypatch: pytest.MonkeyPatch):
    model, x = make(entry).train(), tokens()
    wanted, joined = gradients(model, x), []

    def join(x: Tensor, layers: Any) -> bool:
        joined.append(len(layers) > 1 and all(is_plain_linear(layer) for layer in layers))
        return joined[-1]

    monkeypatch.setattr("fla.layers._recurrent.joinable", join)
    monkeypatch.setattr("fla.modules._linears.joinable", join)
    for (name, ref), ours in zip(wanted.items(), gradients(model, x).values(), strict=True):
        assert_close(name, ref, ours, 1e-5)
    assert any(joined) or entry.model_type in ("mamba2", "rwkv6")


@pytest.mark.gpu
@every_family
def test_training_on_the_gpu_is_training_on_the_cpu(entry: Any):
    fields = importlib.import_module(f"fla.models.{entry.package}").FAMILY.fields
    sizes = {name: size for name, size in {"hidden_size": 256, "head_dim": 64}.items() if name in fields}
    model, x = make(entry, **sizes).train(), tokens(2, 70)
    with trace() as on_cpu:
        wanted = gradients(model, x)
    with trace() as on_gpu:
        ours = gradients(model.cuda(), x.cuda())
    # Calls that the PyTorch path makes in turn have a depth.
    assert [(c.function, "triton") for c in on_cpu if not c.depth] == [(c.function, c.backend) for c in on_gpu]
    for name, ref in wanted.items():
        assert_close(name, ref, ours[name], 1e-3)


@every_family
@pytest.mark.parametrize(
    ("device", "dtype", "limit"),
    [
        pytest.param("cpu", torch.float32, 1e-5, id="cpu"),
        pytest.param("cuda", torch.bfloat16, 1e-2, id="graph", marks=pytest.mark.gpu),
    ],
)
def test_steps_in_place_give_what_the_model_gives(entry: Any, device: str, dtype: torch.dtype, limit: float):
    fields = importlib.import_module(f"fla.models.{entry.package}").FAMILY.fields
    sizes = {"hidden_size": 256, "head_dim": 64} if device == "cuda" else {}
    model = make(entry, **{name: size for name, size in sizes.items() if name in fields}).eval().to(device, dtype)
    x = tokens(2, 14).to(device)
    with torch.no_grad():
        cache, plain = (model(x[:, :6], use_cache=True).past_key_values for _ in range(2))
        decode = StaticDecode(model, cache)
        assert (decode.graph is not None) == (device == "cuda")
        for t in range(6, 13):
            ref = model(x[:, t : t + 1], past_key_values=plain, use_cache=True).logits[:, -1]
            assert_close(f"step {t}", ref, decode.step(x[:, t]), limit)
        assert cache.get_seq_length() == 6  # the caller's cache is left alone
        back = decode.cache()
        assert back.get_seq_length() == plain.get_seq_length() == 13
        ref, last = (model(x[:, 13:], past_key_values=c, use_cache=True).logits for c in (plain, back))
        assert_close("after", ref, last, limit)


def test_what_cannot_be_decoded_in_place_is_named():
    of, x = {entry.model_type: entry for entry in FAMILIES}, tokens()
    model = make(of["transformer"]).eval()
    cache = model(x, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="evaluation"):
        StaticDecode(make(of["gla"]), cache)
    with pytest.raises(ValueError, match="empty"):
        StaticDecode(model, Cache())
    with pytest.raises(ValueError, match="max_length"):
        StaticDecode(model, cache, max_length=12)
    with pytest.raises(ValueError, match="attention_mask"):
        StaticDecode(model, cache, attention_mask=torch.ones(2, 5))
    decode = StaticDecode(model, cache, max_length=13)
    decode.step(x[:, 0])
    with pytest.raises(ValueError, match="max_length"):
        decode.step(x[:, 0])


@every_family
def test_caches_go_on_in_another_order_and_are_cropped_whole_or_not_at_all(entry: Any):
    model, x = make(entry).eval(), tokens(3, 9)
    order = torch.tensor([2, 0, 0])
    with torch.no_grad():
        cache = model(x[:, :8], use_cache=True).past_key_values
        cache.reorder_cache(order)
        ref = model(torch.cat([x[order, :8], x[:, 8:]], 1)).logits[:, -1:]
        assert_close("logits", ref, model(x[:, 8:], past_key_values=cache, use_cache=True).logits, 1e-4)
        states = [{name: value for name, value in (entry or {}).items() if value is not None} for entry in cache]
        cache.crop(0)  # removes nothing
        assert cache.get_seq_length() == 9
        if all(state.keys() == {"attn_state"} for state in states):
            cache.crop(8)
            assert_close("again", ref, model(x[:, 8:], past_key_values=cache, use_cache=True).logits, 1e-4)
            return
        with pytest.raises(NotImplementedError, match="cannot be rolled back"):
            cache.crop(8)
        assert cache.get_seq_length() == 9
