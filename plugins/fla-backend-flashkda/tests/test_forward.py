# SPDX-License-Identifier: MIT
"""The adapter against a stub of the wheel's contract, compared with core in float64 arithmetic."""

from __future__ import annotations

import pytest
import torch
from fla_backend_flashkda.forward import forward

from fla.backends import reference_only
from fla.ops.kda import chunk_kda

H, D = 2, 128


def inputs(B=2, T=19, N=None, seed=0):
    torch.manual_seed(seed)
    q, k, v, g = (torch.randn(B, T, H, D).bfloat16() for _ in range(4))
    beta = torch.randn(B, T, H).bfloat16()
    return q, k, v, g, beta


def core(q, k, v, g, beta, scale=None, initial_state=None, **options):
    """Core on the same numbers in float64."""
    double = [None if x is None else x.double() for x in (q, k, v, g, beta)]
    options = {n: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for n, x in options.items()}
    with torch.no_grad(), reference_only():
        return chunk_kda(
            *double,
            scale,
            None if initial_state is None else initial_state.double(),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            **options,
        )


def close(got, want, limit=5e-3):
    assert got.shape == want.shape
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < limit


@pytest.mark.parametrize("v_first", [False, True])
def test_states_come_and_go_in_the_layout_of_the_call(stub, v_first):
    x = inputs()
    state = torch.randn(2, H, D, D)
    A_log, dt_bias = torch.randn(H) * 0.3, torch.randn(H * D) * 0.3
    o, final = forward(*x, None, A_log, dt_bias, -5.0, state, True, v_first, None)
    want, last = core(
        *x,
        initial_state=state,
        output_final_state=True,
        state_v_first=v_first,
        lower_bound=-5.0,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    close(o, want)
    close(final, last)
    assert o.dtype == torch.bfloat16
    assert final.dtype == torch.float32
    assert final.is_contiguous()


@pytest.mark.parametrize("shape", [(H * D,), (H, D), None])
@pytest.mark.parametrize("A_shape", [(H,), (1, 1, H, 1), None])
def test_parameters_of_the_gate_in_every_shape_or_absent(stub, shape, A_shape):
    x = inputs(B=1)
    A_log = None if A_shape is None else torch.randn(A_shape)
    dt_bias = None if shape is None else torch.randn(shape).bfloat16()
    o, final = forward(*x, 0.5, A_log, dt_bias, -2.0, None, False, False, None)
    want, _ = core(*x, scale=0.5, lower_bound=-2.0, A_log=A_log, dt_bias=dt_bias)
    close(o, want)
    assert final is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_with_empty_ones(stub, dtype):
    x = inputs(B=1, T=30)
    cu = torch.tensor([0, 0, 11, 11, 29, 30, 30], dtype=dtype)
    state = torch.randn(6, H, D, D)
    A_log = torch.randn(H)
    o, final = forward(*x, None, A_log, None, -5.0, state, True, False, cu)
    want, last = core(
        *x, initial_state=state, output_final_state=True, lower_bound=-5.0, A_log=A_log, cu_seqlens=cu.long()
    )
    close(o, want)
    close(final, last)


def test_strided_inputs_and_states_of_other_dtypes(stub):
    q, k, v, g, beta = inputs(B=2, T=9)
    state = torch.randn(2, H, D, D).to(torch.float16)
    A_log = torch.randn(H).bfloat16()

    def strided(x):
        return torch.stack([x, x], -1)[..., 0]

    o, final = forward(*(strided(x) for x in (q, k, v, g, beta)), None, A_log, None, -5.0, state, True, True, None)
    want, last = core(
        q,
        k,
        v,
        g,
        beta,
        initial_state=state,
        output_final_state=True,
        state_v_first=True,
        lower_bound=-5.0,
        A_log=A_log,
    )
    close(o, want)
    close(final, last)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_no_tokens_leave_the_state_as_it_was(v_first, given):
    """The wheel is not asked: there is none in this test."""
    x = inputs(B=2, T=0)
    state = torch.randn(2, H, D, D) if given else None
    o, final = forward(*x, None, torch.zeros(H), None, -5.0, state, True, v_first, None)
    assert o.shape == (2, 0, H, D)
    assert torch.equal(final, state if given else torch.zeros(2, H, D, D))
    assert final.data_ptr() != (state.data_ptr() if given else 0)


def test_rows_that_wrong_offsets_leave_out_are_zero(stub):
    x = inputs(B=1, T=20)
    o, _ = forward(*x, None, torch.zeros(H), None, -5.0, None, False, False, torch.tensor([0, 12]))
    assert o[:, :12].abs().sum() > 0
    assert o[:, 12:].abs().sum() == 0


def test_inputs_are_left_alone(stub):
    x = inputs(B=1)
    state, A_log, dt_bias = torch.randn(1, H, D, D), torch.randn(H), torch.randn(H, D)
    tensors = (*x, state, A_log, dt_bias)
    before = [t.clone() for t in tensors]
    for v_first in (False, True):
        _, final = forward(*x, None, A_log, dt_bias, -5.0, state, True, v_first, None)
        final.zero_()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
