# SPDX-License-Identifier: MIT
"""The token-by-token kernel in the interpreter against the PyTorch path of the public ops."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import torch.nn.functional as F

from fla.backends import use_backend
from fla.ops._delta import entry, vector_decode
from fla.ops.comba import fused_recurrent_comba
from fla.ops.delta_rule import fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from fla.ops.gdn2 import fused_recurrent_gdn2
from fla.ops.gdn2.fused_recurrent import fused_recurrent_gdn2_fwd
from fla.ops.kda import fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd


def tensors(B=2, T=3, H=2, HV=4, K=20, V=12, N=None, v_first=False, seed=0):
    gen = torch.Generator().manual_seed(seed)
    rn = lambda *s: torch.randn(*s, generator=gen)
    x = {"q": rn(B, T, H, K), "k": F.normalize(rn(B, T, H, K), dim=-1), "v": rn(B, T, HV, V)}
    return x | {
        "g": F.logsigmoid(rn(B, T, HV)), "gk": F.logsigmoid(rn(B, T, HV, K)), "gv": F.logsigmoid(rn(B, T, HV, V)),
        "beta": rn(B, T, HV), "beta_v": rn(B, T, HV, V).sigmoid(), "A_log": rn(HV) * 0.3, "bias": rn(HV),
        "bias_k": rn(HV * K),
        "h0": rn(N or B, HV, *((V, K) if v_first else (K, V))),
    }  # fmt: skip


def agree(ours, public, *args, **kw):
    with torch.no_grad(), use_backend("torch"):
        ref = public(*args, **kw)
    with torch.no_grad():
        got = ours(*args, **kw)
    for a, b in zip(got, ref, strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
            assert a.dtype == b.dtype


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gates", [("g",), ("gk",), ("g", "gk", "gv"), ()])
def test_gated_delta_rule_multiplies_the_decays_that_are_given(gates, v_first):
    x = tensors(v_first=v_first)
    agree(
        entry.fused_recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule, x["q"], x["k"], x["v"],
        **{n: x[n] for n in gates}, beta=x["beta"].sigmoid(), initial_state=x["h0"], output_final_state=True,
        use_qk_l2norm_in_kernel=True, state_v_first=v_first,
    )  # fmt: skip


def test_gated_delta_rule_gate_and_sigmoid_in_kernel():
    x = tensors()
    agree(
        entry.fused_recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule, x["q"], x["k"], x["v"], g=x["g"],
        gk=x["gk"],
        beta=x["beta"], use_gate_in_kernel=True, A_log=x["A_log"], dt_bias=x["bias"], use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True, output_final_state=True, scale=0.3,
    )  # fmt: skip


def test_missing_beta_is_ones_for_every_value_head():
    x = tensors()
    agree(
        entry.fused_recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule, x["q"], x["k"], x["v"], g=x["g"],
        output_final_state=True,
    )  # fmt: skip


def test_delta_rule_with_a_beta_per_value_channel():
    x = tensors(HV=2)
    agree(
        entry.fused_recurrent_delta_rule, fused_recurrent_delta_rule, x["q"], x["k"], x["v"], x["beta_v"],
        initial_state=x["h0"], output_final_state=True,
    )  # fmt: skip


@pytest.mark.parametrize("lower_bound", [None, -4.0])
@pytest.mark.parametrize("rate", [True, False])
def test_kda_gate_in_kernel(lower_bound, rate):
    if lower_bound is None and not rate:
        pytest.skip("the unbounded gate needs A_log")
    x = tensors()
    agree(
        vector_decode.fused_recurrent_kda, fused_recurrent_kda, x["q"], x["k"], x["v"], x["gk"], x["beta"],
        x["A_log"] if rate else None, x["bias_k"], use_gate_in_kernel=True, lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, output_final_state=True,
    )  # fmt: skip


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("beta", ["beta", "beta_v", None])
def test_comba_reads_before_the_decay(beta, norm):
    x = tensors()
    key = F.normalize(x["k"] + 0.3, dim=-1)
    for p in (key, None):
        agree(
            entry.fused_recurrent_comba, fused_recurrent_comba, x["q"], x["k"], p, x["v"], x["g"],
            None if beta is None else x[beta].sigmoid(), initial_state=x["h0"], output_final_state=True,
            use_qk_l2norm_in_kernel=norm,
        )  # fmt: skip


@pytest.mark.parametrize("v_first", [False, True])
def test_gdn2_erases_per_key_channel_and_writes_per_value_channel(v_first):
    x = tensors(v_first=v_first)
    b = torch.sigmoid(x["gk"] + 1)
    agree(
        vector_decode.fused_recurrent_gdn2, fused_recurrent_gdn2, x["q"], x["k"], x["v"], x["gk"], b, x["beta_v"],
        x["A_log"], x["bias_k"], initial_state=x["h0"], use_gate_in_kernel=True, lower_bound=-5.0,
        use_qk_l2norm_in_kernel=True, output_final_state=True, state_v_first=v_first,
    )  # fmt: skip


def test_gdn2_pool_in_place():
    x = tensors(B=3, T=2, N=8)
    b = torch.sigmoid(x["gk"] + 1)
    results = []
    for fn in (fused_recurrent_gdn2_fwd, vector_decode.fused_recurrent_gdn2_fwd):
        pool = x["h0"].clone()
        with torch.no_grad(), use_backend("torch"):
            o, _ = fn(
                x["q"], x["k"], x["v"], x["gk"], b, x["beta_v"], initial_state=pool, inplace_final_state=True,
                ssm_state_indices=torch.tensor([[1, 2], [3, -1], [-1, 0]]),
            )  # fmt: skip
        results.append((o, pool))
    for a, c in zip(*results, strict=True):
        torch.testing.assert_close(a, c, rtol=2e-5, atol=2e-5)


def test_gradients_of_the_recurrent_forms_come_from_the_chunk_kernels():
    x = tensors(B=1, T=5, K=16, V=16)
    wide = torch.sigmoid(x["gk"] + 1)
    beta = x["beta"].sigmoid()
    calls = [
        (vector_decode.fused_recurrent_kda, fused_recurrent_kda, (x["q"], x["k"], x["v"], x["gk"], beta)),
        (
            vector_decode.fused_recurrent_gdn2,
            fused_recurrent_gdn2,
            (*(x[n] for n in ("q", "k", "v", "gk")), wide, wide),
        ),
        (entry.fused_recurrent_comba, fused_recurrent_comba, (x["q"], x["k"], x["k"] * 0.9, x["v"], x["g"], beta)),
    ]
    for ours, public, args in calls:
        grads = []
        for fn in (ours, public):
            y = [t.clone().requires_grad_() for t in args]
            with use_backend("torch"):
                o, ht = fn(*y, output_final_state=True)
            grads.append(torch.autograd.grad(o.sum() + ht.square().sum(), y))
        for a, c in zip(*grads, strict=True):
            torch.testing.assert_close(a, c, rtol=1e-4, atol=1e-4)


def test_varlen_keeps_the_state_of_an_empty_sequence():
    x = tensors(B=1, T=7, N=4)
    cu = torch.tensor([0, 2, 2, 6, 7])
    agree(
        vector_decode.fused_recurrent_kda, fused_recurrent_kda, x["q"], x["k"], x["v"], x["gk"], x["beta_v"],
        initial_state=x["h0"],
        output_final_state=True, cu_seqlens=cu,
    )  # fmt: skip


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("slots", ["one", "many", "accepted"])
def test_serving_pool(slots, in_place):
    x = tensors(B=3, T=1 if slots == "one" else 2, N=8)
    index = {"one": torch.tensor([5, -1, 2]), "many": torch.tensor([[1, 2], [3, -1], [8, 0]])}.get(
        slots, torch.tensor([[1, 2], [3, 4], [5, 0]])
    )
    accepted = torch.tensor([2, 1, 3]) if slots == "accepted" else None
    results = []
    for fn in (fused_recurrent_kda_fwd, vector_decode.fused_recurrent_kda_fwd):
        pool = x["h0"].clone()
        out = torch.full_like(x["v"], 7.0)
        with torch.no_grad(), use_backend("torch"):
            o, s = fn(
                x["q"], x["k"], x["v"], x["gk"], x["beta"], initial_state=pool, ssm_state_indices=index,
                num_accepted_tokens=accepted, inplace_final_state=in_place, output_final_state=True, out=out,
                use_beta_sigmoid_in_kernel=True,
            )  # fmt: skip
        results.append((o, s, pool))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_serving_in_place_without_pool():
    x = tensors()
    results = []
    for fn in (fused_recurrent_kda_fwd, vector_decode.fused_recurrent_kda_fwd):
        state = x["h0"].half()
        with torch.no_grad(), use_backend("torch"):
            o, s = fn(x["q"], x["k"], x["v"], x["gk"], x["beta_v"], initial_state=state)
        assert s is state
        results.append((o, s))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_half_outputs_of_large_states_saturate():
    """Case D02."""
    x = tensors(B=1, T=1)
    q, k, v = (x[n].half() for n in ("q", "k", "v"))
    with torch.no_grad():
        o, _ = vector_decode.fused_recurrent_kda(q, k, v, x["gk"], x["beta"].sigmoid(), initial_state=x["h0"] * 1e6)
    assert o.isfinite().all()
    assert o.abs().max() == 65504


def test_gradients_of_a_beta_per_value_channel_are_left_to_pytorch():
    from fla.ops._delta.covers import covers_recurrent_comba, covers_recurrent_gdn2, covers_recurrent_kda

    x = tensors()
    q, k, v, g, gk = (x[n].requires_grad_() for n in ("q", "k", "v", "g", "gk"))
    for beta, taken in ((x["beta"], True), (x["beta_v"], False), (None, True)):
        assert covers_recurrent_comba(q, k, None, v, g, beta, None)[0] is taken
    assert not covers_recurrent_kda(q, k, v, gk, x["beta_v"], None, None, None)[0]
    assert covers_recurrent_kda(q, k, v, gk, x["beta"], None, None, None)[0]
    assert covers_recurrent_gdn2(q, k, v, gk, gk, x["beta_v"], None, None, None)[0]
    with torch.no_grad():
        assert covers_recurrent_kda(q, k, v, gk, x["beta_v"], None, None, None)[0]


def strided(x):
    """The same numbers with others between them."""
    return torch.stack([x, torch.full_like(x, 2)], 1)[:, 0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_and_counts_need_not_be_contiguous(dtype):
    x = tensors(B=1, T=9, N=3)
    cu = strided(torch.tensor([0, 3, 3, 9], dtype=dtype))
    args = (x["q"], x["k"], x["v"], x["gk"], x["beta"].sigmoid())
    kw = {"initial_state": x["h0"], "output_final_state": True, "cu_seqlens": cu}
    agree(vector_decode.fused_recurrent_kda, fused_recurrent_kda, *args, **kw)
    args = (x["q"], x["k"], x["v"], x["g"])
    agree(entry.fused_recurrent_gated_delta_rule, fused_recurrent_gated_delta_rule, *args, **kw)

    x = tensors(B=3, T=1, N=6)
    args = (x["q"], x["k"], x["v"], x["gk"], x["beta"].sigmoid())
    kw = {
        "initial_state": x["h0"], "output_final_state": True, "inplace_final_state": False,
        "ssm_state_indices": torch.tensor([[3, 1], [4, 2], [0, 5]], dtype=dtype),
        "num_accepted_tokens": strided(torch.tensor([1, 1, 2], dtype=dtype)),
    }  # fmt: skip
    agree(vector_decode.fused_recurrent_kda_fwd, fused_recurrent_kda_fwd, *args, **kw)
