# SPDX-License-Identifier: MIT
"""The cache: states, counts, windows, transformations, old forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fla.models.utils import Cache, FLACache, FLALayer, LegacyFLACache

KEYS = {"recurrent_state", "attn_state", "conv_state", "ffn_state"}


def filled(layers: int = 2, B: int = 3, offset: int = 5) -> Cache:
    cache = Cache()
    for i in range(layers):
        cache.update(
            recurrent_state=torch.arange(B * 4.0).view(B, 2, 2) + i,
            conv_state=(torch.arange(B * 1.0).view(B, 1, 1), None),
            layer_idx=i,
            offset=offset,
        )
    return cache


def steps(n: int, start: int = 0, B: int = 1) -> tuple[Tensor, Tensor]:
    t = torch.arange(start, start + n, dtype=torch.float32).view(1, n, 1).expand(B, n, 2)
    return t.clone(), -t


def test_entries_have_the_four_fields_and_none_keeps_what_was_there():
    cache = Cache()
    state = torch.ones(1, 2)
    entry = cache.update(recurrent_state=state, layer_idx=0, offset=4)
    assert set(entry) == KEYS
    cache.update(conv_state=torch.zeros(1, 2, 3), layer_idx=0, offset=1)
    assert cache[0]["recurrent_state"] is state
    assert cache[0]["conv_state"] is not None
    assert cache.get_seq_length() == 5


def test_every_layer_counts_its_own_tokens():
    cache, seen = Cache(), []
    for step in (7, 1, 1):
        for layer in range(3):
            seen.append(cache.get_seq_length(layer))
            cache.update(recurrent_state=torch.ones(1), layer_idx=layer, offset=step)
    assert seen == [0, 0, 0, 7, 7, 7, 8, 8, 8]
    assert cache.get_seq_length(9) == 0
    assert cache.get_seq_length(None) == 9


def test_layers_are_counted_indexed_and_reset():
    cache = filled()
    assert len(cache) == 2
    assert [set(entry) for entry in cache] == [KEYS, KEYS]
    for i in (2, -1):
        with pytest.raises(KeyError):
            cache[i]
    cache.reset()
    assert len(cache) == 2
    assert cache[0] is None
    assert cache.get_seq_length() == 0
    assert not cache.has_previous_state()
    cache.update(recurrent_state=torch.ones(1), layer_idx=0, offset=2)
    assert cache.get_seq_length() == 2


def test_a_later_layer_can_come_first():
    cache = Cache()
    cache.update(recurrent_state=torch.ones(1), layer_idx=2, offset=3)
    assert len(cache) == 3
    assert cache[0] is None
    assert [cache.get_seq_length(i) for i in range(3)] == [0, 0, 3]


@pytest.mark.parametrize("writes", [[3, 1, 1], [4, 1, 6], [10, 1, 1], [2, 3, 2, 1]])
@pytest.mark.parametrize("window", [None, 4])
def test_attention_states_grow_within_their_window(writes: list[int], window: int | None):
    layer, held, total = FLALayer(), [], 0
    for n in writes:
        entry = layer.update(attn_state=steps(n, total), cache_kwargs={"window_size": window})
        held.append((entry["attn_state"][0], entry["attn_state"][0].clone()))
        total += n
        expected = torch.arange(total, dtype=torch.float32)[-(window or total) :]
        assert torch.equal(entry["attn_state"][0][0, :, 0], expected)
        assert torch.equal(entry["attn_state"][1][0, :, 0], -expected)
        # Counted before anything is dropped.
        assert layer.get_seq_length() == total
    # What a caller still holds is not written over.
    assert all(torch.equal(now, then) for now, then in held)
    assert layer.is_sliding == (window is not None)
    assert layer.window_size == window


def test_the_window_is_remembered_and_mask_sizes_follow_it():
    layer = FLALayer()
    assert layer.get_mask_sizes(5) == (5, 0)
    layer.update(attn_state=steps(3), cache_kwargs={"window_size": 4})
    layer.update(attn_state=steps(9, 3))
    assert layer.state["attn_state"][0].shape[1] == 4
    assert layer.get_mask_sizes(1) == (4, 9)
    assert layer.get_mask_sizes(torch.arange(12, 14)) == (5, 9)
    cache = Cache()
    assert cache.get_mask_sizes(7) == cache.get_mask_sizes(7, 0) == (7, 0)
    cache.update(recurrent_state=torch.ones(1), offset=20)
    assert cache.get_mask_sizes(2, 0) == (22, 0)


def test_a_wrong_attention_state_changes_nothing():
    cache = filled()
    with pytest.raises(ValueError, match="attn_state"):
        cache.update(attn_state=torch.ones(3, 1, 2), conv_state=torch.ones(1), layer_idx=0)
    assert cache.get_seq_length() == 5
    assert cache[0]["conv_state"][1] is None


@dataclass
class Levels:
    """A state object, as log-linear attention has one."""

    values: list[Tensor]
    depth: int


def test_beam_reordering_reaches_every_tensor():
    cache = filled()
    cache.update(ffn_state={"a": [torch.arange(3)]}, recurrent_state=Levels([torch.arange(3)], 7), layer_idx=1)
    before = cache[0]["recurrent_state"]
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(cache[0]["recurrent_state"], before[[2, 0, 0]])
    assert cache[0]["conv_state"][0].flatten().tolist() == [2, 0, 0]
    assert cache[1]["ffn_state"]["a"][0].tolist() == [2, 0, 0]
    assert cache[1]["recurrent_state"].values[0].tolist() == [2, 0, 0]
    assert cache[1]["recurrent_state"].depth == 7


def test_batch_operations():
    cache = filled()
    cache.batch_repeat_interleave(2)
    assert cache[0]["conv_state"][0].flatten().tolist() == [0, 0, 1, 1, 2, 2]
    cache.batch_select_indices(torch.tensor([0, 5]))
    assert cache[1]["conv_state"][0].flatten().tolist() == [0, 2]
    assert cache.batch_size == 2
    assert Cache().batch_size == -1


def test_transformations_happen_in_all_layers_or_in_none():
    cache = filled()
    cache.update(recurrent_state=object(), layer_idx=1)
    before = cache[0]["recurrent_state"]
    with pytest.raises(NotImplementedError, match="object"):
        cache.reorder_cache(torch.tensor([1, 0, 2]))
    assert cache[0]["recurrent_state"] is before
    window = Cache()
    window.update(attn_state=steps(3), layer_idx=0)
    window.update(recurrent_state=torch.ones(1), layer_idx=1, offset=3)
    with pytest.raises(NotImplementedError, match="recurrent_state"):
        window.crop(-1)
    assert window.get_seq_length() == 3
    assert window[0]["attn_state"][0].shape[1] == 3


def test_attention_states_can_be_cropped():
    cache = Cache()
    cache.update(attn_state=steps(8))
    cache.crop(0)
    cache.crop(9)
    assert cache.get_seq_length() == 8
    cache.crop(6)
    assert cache.get_seq_length() == cache[0]["attn_state"][0].shape[1] == 6
    cache.crop(-2)
    assert cache.get_seq_length() == cache[0]["attn_state"][1].shape[1] == 4
    with pytest.raises(ValueError, match="4 tokens"):
        cache.crop(-5)


def test_what_cannot_be_rolled_back_says_so():
    cache = Cache()
    cache.update(attn_state=steps(8), cache_kwargs={"window_size": 4})
    with pytest.raises(NotImplementedError, match="window"):
        cache.crop(6)
    with pytest.raises(NotImplementedError, match="recurrent_state"):
        filled().crop(-1)
    filled().crop(0)
    filled().crop(5)


def test_offload_and_prefetch_keep_the_values():
    cache = filled()
    before = cache[0]["recurrent_state"].clone()
    cache.offload(0)
    cache.prefetch(0)
    assert torch.equal(cache[0]["recurrent_state"], before)
    windowed = Cache()
    windowed.update(attn_state=steps(2), cache_kwargs={"window_size": 2})
    kept = windowed[0]["attn_state"][0]
    windowed.offload(0)
    assert windowed[0]["attn_state"][0] is kept
    with pytest.raises(NotImplementedError, match="offloading"):
        FLACache(offloading=True)


# G04: the round trip keeps states and lengths.
def test_legacy_round_trip():
    cache = filled()
    entries = cache.to_legacy_cache()
    assert isinstance(entries, tuple)
    back = Cache.from_legacy_cache(entries, seen_tokens=cache.get_seq_length())
    assert type(back) is Cache
    assert back.get_seq_length() == 5
    assert all(back[i]["recurrent_state"] is cache[i]["recurrent_state"] for i in range(2))
    assert Cache.from_legacy_cache(cache) is cache
    assert len(Cache.from_legacy_cache(None)) == 0
    assert Cache.from_legacy_cache(({"recurrent_state": torch.ones(1)},))[0].keys() == KEYS
    with pytest.raises(TypeError, match="past_key_values"):
        Cache.from_legacy_cache(3)


def test_old_cache_has_one_count():
    old = object.__new__(LegacyFLACache)
    old.states, old._seen_tokens = [], 0
    seen = []
    for step in (4, 1):
        for layer in range(3):
            old.update(recurrent_state=torch.ones(1), layer_idx=layer, offset=step)
            seen.append(old._seen_tokens)
    assert seen == [4, 4, 4, 4, 4, 5]
    assert len(old) == 3
    assert old.get_seq_length() == 5
    old.reorder_cache(torch.tensor([0]))
    new = Cache.from_legacy_cache(old)
    assert type(new) is Cache
    assert new.get_seq_length(2) == 5
    assert LegacyFLACache.from_legacy_cache(new.to_legacy_cache(), 5).get_seq_length() == 5
    old.reset()
    assert old.states == []
    assert old.get_seq_length() == 0


def test_transformers_sees_a_cache():
    cache: Any = filled()
    assert isinstance(cache, transformers.Cache)
    assert isinstance(LegacyFLACache(), transformers.Cache)
    assert cache.get_max_length() == cache.get_max_cache_shape() == -1
    assert not cache.is_compileable
    assert cache.has_previous_state(0)
    assert not cache.has_previous_state(5)
    assert torch.equal(cache.get_recurrent_state(1), cache[1]["recurrent_state"])
    assert torch.equal(cache.get_conv_state(1, 0), cache[1]["conv_state"][0])
    assert cache.get_conv_state(7) is None
    assert not issubclass(FLALayer, torch.nn.Module)
    assert "seen_tokens=5" in repr(cache)
