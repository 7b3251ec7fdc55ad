# SPDX-License-Identifier: MIT
"""Generation: the cache is used, and what comes out is what the model says without one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from fla.models import KDAConfig, KDAForCausalLM
from fla.models.generation_utils import FLAGenerationMixin, FLAUnsupportedCacheGenerationMixin
from fla.models.utils import Cache, LegacyFLACache
from fla.utils import assert_close

EOS = 2


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = KDAConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=2,
        head_dim=8,
        vocab_size=61,
        intermediate_size=40,
        pad_token_id=0,
    )
    model = KDAForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 if p.dim() < 2 else 6)
        model.lm_head.weight[EOS] = 0  # never the best
    return model


def prompt(B: int = 2, T: int = 9) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 61, (B, T))


def greedy(model: Any, x: Tensor, steps: int) -> Tensor:
    with torch.no_grad():
        for _ in range(steps):
            x = torch.cat([x, model(x, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return x


@pytest.fixture
def calls(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(new tokens, tokens in the cache) of every forward pass of the decoder."""
    seen: list[tuple[int, int]] = []
    forward = model.model.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs["past_key_values"]
        seen.append((kwargs["input_ids"].shape[1], 0 if cache is None else cache.get_seq_length()))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", spy)
    return seen


def test_steps_of_decoding_see_the_cache(model: Any, calls: list):
    x = prompt()
    out = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=5, do_sample=False)
    assert calls == [(9, 0), (1, 9), (1, 10), (1, 11), (1, 12)]
    assert torch.equal(out, greedy(model, x, 5))


def test_without_a_cache(model: Any, calls: list):
    x = prompt()
    kwargs = {"attention_mask": torch.ones_like(x), "max_new_tokens": 4, "do_sample": False}
    out = model.generate(x, use_cache=False, **kwargs)
    assert [c[1] for c in calls] == [0, 0, 0, 0]
    assert torch.equal(out, model.generate(x, **kwargs))


def test_sampling_is_repeatable_and_several_sequences_come_back(model: Any):
    x = prompt()
    kwargs = {"max_new_tokens": 4, "do_sample": True, "num_return_sequences": 3, "top_k": 0}
    outs = []
    for use_cache in (True, True, False):
        torch.manual_seed(5)
        outs.append(model.generate(x, attention_mask=torch.ones_like(x), use_cache=use_cache, **kwargs))
    assert outs[0].shape == (6, 13)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_given_by_the_caller_is_filled_and_continued(model: Any, name: str):
    x = prompt(1)
    cache = Cache()
    first = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=3, do_sample=False, **{name: cache})
    assert cache.get_seq_length() == 11
    with torch.no_grad():
        logits = model(first[:, 11:], **{name: cache}, use_cache=True).logits
        assert_close("logits", model(first).logits[:, -1:], logits, 1e-5)
    again = torch.cat([first, prompt(1, 4)], 1)
    out = model.generate(
        again, attention_mask=torch.ones_like(again), max_new_tokens=3, do_sample=False, past_key_values=cache
    )
    assert torch.equal(out, greedy(model, again, 3))


def test_both_names_of_the_cache_at_once(model: Any):
    x, cache = prompt(1), Cache()
    model(x, past_key_values=cache, cache=cache, use_cache=True)
    assert cache.get_seq_length() == 9
    with pytest.raises(ValueError, match="two names"):
        model(x, past_key_values=cache, cache=Cache())
    # Named without any cache, it must not reach the layers.
    model(x, cache=None)


# G14: a cache that the framework made.
def test_foreign_caches(model: Any):
    x = prompt(1)
    out = model(x, past_key_values=DynamicCache(), use_cache=True)
    assert isinstance(out.past_key_values, Cache)
    used = DynamicCache()
    used.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    with pytest.raises(TypeError, match="DynamicCache"):
        model(x, past_key_values=used)
    static = object.__new__(StaticCache)  # its constructor differs between versions
    with pytest.raises(TypeError, match="StaticCache holds keys and values"):
        model(x, past_key_values=static)
    with pytest.raises(TypeError, match="StaticCache holds keys and values"):
        model.generate(x, past_key_values=static, max_new_tokens=2)
    old = LegacyFLACache()
    model(x[:, :5], past_key_values=old, use_cache=True)
    assert old.get_seq_length() == 5
    with torch.no_grad():
        step = model(x[:, 5:], past_key_values=tuple(old.states), use_cache=True)
        assert_close("logits", model(x).logits[:, 5:], step.logits, 1e-5)


def test_inputs_of_a_step(model: Any):
    x, cache = prompt(1), Cache()
    mask = torch.ones_like(x)
    inputs = model.prepare_inputs_for_generation(
        x, past_key_values=cache, attention_mask=mask, cache_position=torch.tensor([8]), logits_to_keep=1
    )
    assert inputs["input_ids"].tolist() == x[:, 8:].tolist()
    assert inputs["attention_mask"] is mask
    assert inputs.get("cache", inputs.get("past_key_values")) is cache
    assert inputs["logits_to_keep"] == 1
    assert inputs["use_cache"] is True
    plain = model.prepare_inputs_for_generation(x, cache=cache, next_sequence_length=2)
    assert "logits_to_keep" not in plain
    with pytest.warns(DeprecationWarning, match="num_logits_to_keep"):
        assert model.prepare_inputs_for_generation(x, num_logits_to_keep=3)["logits_to_keep"] == 3


def test_embeddings_as_the_prompt(model: Any):
    x = prompt()
    out = model.generate(
        inputs_embeds=model.model.embeddings(x),
        attention_mask=torch.ones_like(x),
        max_new_tokens=4,
        do_sample=False,
    )
    assert torch.equal(out[:, -4:], greedy(model, x, 4)[:, 9:])


def test_guessing_ahead_is_refused(model: Any):
    x = prompt(1)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(x, assistant_model=model, max_new_tokens=3, do_sample=False)


def test_errors_about_the_cache_are_translated():
    class Base:
        def __init__(self, text: str) -> None:
            self.text = text

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise AttributeError(self.text)

    class Model(FLAUnsupportedCacheGenerationMixin):
        def __init__(self, text: str) -> None:
            self.text = text

    original = FLAGenerationMixin.__mro__[1].generate
    FLAGenerationMixin.__mro__[1].generate = Base.generate  # type: ignore[method-assign,assignment]
    try:
        with pytest.raises(AttributeError, match="not supported for Model"):
            Model("no attribute past_key_values").generate()
        with pytest.raises(AttributeError, match=r"^something else$"):
            Model("something else").generate()
    finally:
        FLAGenerationMixin.__mro__[1].generate = original  # type: ignore[method-assign]


def test_transformers_is_told_not_to_make_a_cache(model: Any):
    assert model._supports_default_dynamic_cache() is False
    assert type(model)._supports_default_dynamic_cache() is False


def test_positions_that_run_out_in_place_are_made_longer():
    from fla.decoding import InPlaceCache
    from fla.models import TransformerConfig, TransformerForCausalLM

    config = TransformerConfig(
        hidden_size=32, num_hidden_layers=1, num_heads=2, vocab_size=61, intermediate_size=40, max_position_embeddings=4
    )
    transformer, x = TransformerForCausalLM(config).eval(), prompt(2, 1100)
    with torch.no_grad():
        cache = InPlaceCache()
        transformer(x[:, :6], past_key_values=cache, use_cache=True)
        for t in range(6, 1060):
            out = transformer(x[:, t : t + 1], past_key_values=cache, use_cache=True)
            if t in (6, 1029, 1030, 1031, 1059):
                ref = transformer(x[:, : t + 1], use_cache=False).logits[:, -1:]
                assert_close(f"step {t}", ref, out.logits, 1e-4)
        assert cache.get_seq_length() == 1060
        # Several tokens at once, and training, leave that form.
        ref = transformer(x[:, :1066], use_cache=False).logits[:, -6:]
        assert_close("many", ref, transformer(x[:, 1060:1066], past_key_values=cache, use_cache=True).logits, 1e-4)


def test_a_cache_of_the_caller_goes_before_static(model: Any):
    x, cache = prompt(), Cache()
    out = model.generate(x, past_key_values=cache, cache_implementation=None, max_new_tokens=3, do_sample=False)
    assert torch.equal(out, greedy(model, x, 3))
    assert cache.get_seq_length() == 11


def test_generate_decodes_in_place_by_itself_where_nobody_notices(model: Any, monkeypatch: pytest.MonkeyPatch):
    from fla import decoding

    made: list[int] = []
    init = decoding.StaticDecode.__init__

    def count(self: Any, model: Any, cache: Any, **kwargs: Any) -> None:
        made.append(cache.get_seq_length())
        init(self, model, cache, **kwargs)

    monkeypatch.setattr(decoding.StaticDecode, "__init__", count)
    x = prompt()
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    kwargs = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 14}
    plain = model.generate(x, **kwargs)
    beams = model.generate(x, num_beams=2, **kwargs)
    assert not made  # not on the CPU
    monkeypatch.setattr(decoding, "suits", lambda model: True)
    assert torch.equal(model.generate(x, **kwargs), plain)
    assert made == [9 + decoding.PLAIN_STEPS]
    assert torch.equal(model.generate(x, num_beams=2, **kwargs), beams)
    assert len(made) == 2
    for other in ({"cache_implementation": "dynamic"}, {"use_cache": False}, {"max_new_tokens": 8}):
        assert torch.equal(model.generate(x, **{**kwargs, **other}), plain[:, : 9 + other.get("max_new_tokens", 14)])
    assert len(made) == 2


def test_a_step_that_cannot_be_captured_is_taken_as_usual(model: Any, monkeypatch: pytest.MonkeyPatch):
    from fla import decoding

    x = prompt()
    plain = model.generate(x, do_sample=False, max_new_tokens=14)
    monkeypatch.setattr(decoding, "suits", lambda model: True)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(decoding.StaticDecode, "__init__", refuse)
    out = model.generate(x, do_sample=False, max_new_tokens=14, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert "not permitted when stream" in out.past_key_values.refused
    with pytest.raises(RuntimeError, match="not permitted"):
        model.generate(x, do_sample=False, max_new_tokens=14, cache_implementation="static")


def test_what_a_step_in_place_does_not_return_is_computed_as_usual(model: Any):
    from fla.decoding import InPlaceCache

    x = prompt(2, 14)
    with torch.no_grad():
        cache = InPlaceCache()
        model(x[:, :6], past_key_values=cache, use_cache=True)
        for t in range(6, 14):
            asked = {9: {"output_hidden_states": True}, 11: {"labels": x[:, 11:12]}, 12: {"return_dict": False}}
            out = model(x[:, t : t + 1], past_key_values=cache, use_cache=True, **asked.get(t, {}))
            ref = model(x[:, : t + 1], use_cache=False).logits[:, -1:]
            assert_close(f"step {t}", ref, out[0] if t == 12 else out.logits, 1e-5)
            assert (cache._steps is None) == (t in asked)
            assert t != 9 or len(out.hidden_states) == 3
            assert t != 11 or out.loss is not None


def test_which_models_decode_in_place_unasked():
    from fla.decoding import suits
    from fla.models import TransformerConfig, TransformerForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 61, "intermediate_size": 40}
    model = KDAForCausalLM(KDAConfig(**sizes, head_dim=8)).eval()
    assert suits(model, "cpu")
    assert not suits(model)  # there is no graph on the CPU
    assert not suits(model.train(), "cpu")
    handle = model.eval().model.layers[0].register_forward_hook(lambda *_: None)
    assert not suits(model, "cpu")
    handle.remove()
    assert suits(model, "cpu")
    model.lm_head = type("Adapter", (torch.nn.Linear,), {})(32, 61)
    assert not suits(model.eval(), "cpu")
    # Keys and values of all tokens would be looked at in every step.
    assert not suits(TransformerForCausalLM(TransformerConfig(**sizes)).eval(), "cpu")
    attn = {"layers": [0], "num_heads": 2}
    assert not suits(KDAForCausalLM(KDAConfig(**sizes, head_dim=8, attn=attn)).eval(), "cpu")


@pytest.mark.gpu
def test_generate_replays_a_graph(model: Any, monkeypatch: pytest.MonkeyPatch):
    from fla import decoding

    replayed: list[int] = []
    step = decoding.StaticDecode.step

    def count(self: Any, tokens: Tensor) -> Tensor:
        replayed.append(self.graph is not None)
        return step(self, tokens)

    monkeypatch.setattr(decoding.StaticDecode, "step", count)
    on_gpu, x = copy.deepcopy(model).cuda(), prompt().cuda()
    kwargs = {"attention_mask": torch.ones_like(x), "do_sample": False, "max_new_tokens": 20}
    plain = on_gpu.generate(x, cache_implementation="dynamic", **kwargs)
    assert not replayed
    assert torch.equal(on_gpu.generate(x, **kwargs), plain)
    assert replayed == [True] * (19 - decoding.PLAIN_STEPS)
