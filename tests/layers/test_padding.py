# SPDX-License-Identifier: MIT
"""Padding helpers: what is gathered, where it goes back, and what is remembered."""

from __future__ import annotations

import pytest
import torch

from fla.layers.attn import Attention
from fla.layers.gla import GatedLinearAttention
from fla.layers.utils import (
    get_unpad_data,
    get_unpad_indices_and_cu,
    index_first_axis,
    index_put_first_axis,
    pad_input,
    repad_hidden_states,
    unpad_hidden_states,
    unpad_input,
)

MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [1, 0, 0, 1]])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_padding_on_any_side_is_removed_and_put_back(dtype: torch.dtype):
    x = torch.randn(3, 4, 5)
    indices, cu, longest = get_unpad_data(MASK.to(dtype))
    assert indices.tolist() == [2, 3, 4, 5, 6, 7, 8, 11]
    assert cu.tolist() == [0, 2, 6, 8]
    assert cu.dtype == torch.int32
    assert longest == 4
    rows = index_first_axis(x.flatten(0, 1), indices)
    assert torch.equal(pad_input(rows, indices, 3, 4), x * MASK[..., None])


def test_gather_and_scatter_are_differentiable():
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    i = torch.tensor([4, 0])
    assert torch.autograd.gradcheck(lambda t: index_put_first_axis(index_first_axis(t, i), i, 7), x)


def test_only_the_last_columns_count():
    indices, cu = get_unpad_indices_and_cu(torch.tensor([[0, 1, 1], [1, 1, 0]]), 2)
    assert indices.tolist() == [0, 1, 2]
    assert cu.tolist() == [0, 2, 3]


def test_a_mask_edited_in_place_is_looked_at_again():
    mask = MASK.clone()
    get_unpad_data(mask)
    mask[1] = 0
    assert get_unpad_data(mask)[1].tolist() == [0, 2, 2, 4]


def test_one_mask_is_looked_at_once_for_all_layers():
    mask = MASK.clone()
    first = get_unpad_indices_and_cu(mask)
    for _ in range(5):
        again = get_unpad_indices_and_cu(mask)
        assert all(a is b for a, b in zip(first, again, strict=True))


def test_packed_rows_win_over_the_mask():
    x, cu = torch.randn(1, 4, 3), torch.tensor([0, 4])
    assert unpad_hidden_states(x, cu, torch.ones(1, 4), 4) == (x, None, cu)
    assert unpad_hidden_states(x, None, None, 4) == (x, None, None)
    assert repad_hidden_states(x, None, 1, 4) is x


def test_new_tokens_that_are_all_valid_stay_where_they_are():
    for x, mask in ((torch.randn(3, 1, 5), MASK), (torch.randn(2, 4, 5), torch.ones(2, 9))):
        assert unpad_hidden_states(x, None, mask, x.shape[1]) == (x, None, None)
    x, indices, cu = unpad_hidden_states(torch.randn(3, 1, 5), None, MASK[:, :1], 1)
    assert x.shape == (1, 2, 5)
    assert cu is not None
    assert cu.tolist() == [0, 0, 1, 2]
    assert repad_hidden_states(x, indices, 3, 1)[0].eq(0).all()


@pytest.mark.parametrize("keepdim", [True, False])
def test_queries_and_states_of_attention(keepdim: bool):
    q, k = torch.randn(3, 4, 2), torch.randn(3, 4, 2, 6)
    packed, (keys,), indices, (cu_q, cu_k), (max_q, max_k) = unpad_input(q, (k,), MASK, 4, keepdim)
    assert packed.shape == ((1, 8, 2) if keepdim else (8, 2))
    assert keys.shape[-3:] == (8, 2, 6)
    assert torch.equal(cu_q, cu_k)
    assert (max_q, max_k) == (4, 4)
    (one,), _, indices, (cu_q, _), (max_q, max_k) = unpad_input((q[:, -1:],), (k,), MASK, 1, keepdim)
    assert one.reshape(3, 2).equal(q[:, -1])
    assert indices.tolist() == [0, 1, 2]
    assert cu_q.tolist() == [0, 1, 2, 3]
    assert (max_q, max_k) == (1, 4)
    with pytest.raises(NotImplementedError, match="q_len"):
        unpad_input(q, (k,), MASK, 2)


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 4, 4), torch.ones(3, 4, 4), torch.ones(4)])
def test_masks_of_scores_are_refused(mask: torch.Tensor):
    with pytest.raises(AssertionError, match="attention_mask"):
        get_unpad_data(mask)


def test_a_mask_shorter_than_the_input_is_refused():
    with pytest.raises(ValueError, match="attention_mask"):
        get_unpad_indices_and_cu(MASK, 5)


@pytest.mark.parametrize("length", [1, 4])
def test_a_mask_of_other_rows_is_refused(length: int):
    for layer in (Attention(32, 2), GatedLinearAttention(hidden_size=32, num_heads=2)):
        with pytest.raises(ValueError, match="row for each of the 2"):
            layer(torch.randn(2, length, 32), attention_mask=MASK[:, :length])
