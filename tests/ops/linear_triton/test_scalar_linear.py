# SPDX-License-Identifier: MIT
"""The scalar-decay kernels of linear attention in the interpreter, against the token recurrence in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from delta_reference import ratio
from linear_reference import GATES, make_inputs, recurrence, with_gradients

from fla.ops._common.policy import CHIPS
from fla.ops._linear.autograd import scalar_linear
from fla.ops._linear.policy import scalar_plan

CHIP = CHIPS["interpreter"]


@pytest.fixture(autouse=True)
def interpreted():
    import triton.runtime.interpreter as interpreter

    from fla.ops._linear.kernels.scalar_scan import scalar_scan

    if not isinstance(scalar_scan, interpreter.InterpretedFunction):
        pytest.skip("kernels were imported before TRITON_INTERPRET was set")


pytestmark = pytest.mark.usefixtures("poisoned")


def run(x, *, v_first=False, cu=None, change=None, segments=1, reverse=False, marks=None, do_times=1.0):
    """Errors of outputs and of every gradient."""
    q, v = x["q"], x["v"]
    plan = dataclasses.replace(scalar_plan(CHIP, q.dtype, q.shape[-1], v.shape[-1], 100), **(change or {}))
    y = {n: t.clone().requires_grad_(n != "g_gamma") for n, t in x.items()}
    o, ht = scalar_linear(
        **y, output_final_state=True, state_v_first=v_first, cu_seqlens=None if cu is None else torch.tensor(cu),
        chip=CHIP, plan=plan, segments=segments, reverse=reverse, marks=marks,
    )  # fmt: skip
    gen = torch.Generator().manual_seed(1)
    do = (torch.randn(v.shape, generator=gen) * do_times).to(v.dtype)
    dht = torch.randn(ht.shape, generator=gen) * min(do_times, 1.0)
    leaves = {n: t for n, t in y.items() if t.requires_grad}
    grads = torch.autograd.grad((o.float() * do.float()).sum() + (ht * dht).sum(), list(leaves.values()))
    got = {"o": o, "ht": ht, **dict(zip(leaves, grads, strict=True))}
    ref = with_gradients(x, do, dht, v_first=v_first, cu=cu, reverse=reverse)
    assert all(got[n].dtype == x[n].dtype for n in leaves)
    return {n: ratio(got[n], ref[n]) for n in ref}


def check(errors, limit=1e-5):
    wrong = {n: e for n, e in errors.items() if not e < limit}
    assert not wrong, wrong


@pytest.mark.parametrize("gate", GATES)
def test_gates(gate):
    check(run(make_inputs(T=70, H=3, K=32, gate=gate)))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("descriptors", [False, True])
def test_tails_in_half_precision(gate, descriptors):
    x = make_inputs(B=2, T=70, K=32, V=64, dtype=torch.float16, gate=gate)
    check(run(x, change={"descriptors": descriptors}), 3e-3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("v_first", [False, True])
def test_states_in_both_layouts(gate, v_first):
    check(run(make_inputs(T=40, H=2, K=16, V=32, gate=gate, initial=True, v_first=v_first), v_first=v_first))


@pytest.mark.parametrize("descriptors", [False, True])
def test_varlen_with_empty_sequences(descriptors):
    cu = [0, 0, 3, 3, 67, 131, 140, 140]
    x = make_inputs(T=140, K=32, dtype=torch.float16, initial=True, sequences=len(cu) - 1)
    check(run(x, cu=cu, change={"descriptors": descriptors}), 3e-3)


@pytest.mark.parametrize(("K", "V"), [(33, 20), (60, 65), (20, 100)])
def test_odd_sizes_and_blocks_of_both_dims(K, V):
    check(run(make_inputs(T=37, H=2, K=K, V=V, initial=True)))


def test_dv_from_a_scan_of_its_own():
    x = make_inputs(B=2, T=100, K=32, V=64, dtype=torch.float16, initial=True, sequences=2)
    for segments in (1, 2):
        check(run(x, change={"dv_scan": True, "descriptors": segments == 1, "block_v": 32}, segments=segments), 3e-3)


def test_dv_and_states_in_one_launch():
    cu = [0, 5, 5, 70, 200]
    x = make_inputs(T=200, H=2, K=32, V=64, dtype=torch.float16, initial=True, sequences=4, v_first=True)
    for segments in (1, 2):
        change = {"dv_scan": True, "both": True, "descriptors": segments == 1, "both_v": 32}
        check(run(x, cu=cu, v_first=True, change=change, segments=segments), 3e-3)


@pytest.mark.parametrize("gate", ["head", None])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize(("segments", "marks"), [(1, 1), (1, 3), (2, 1)])
def test_gradients_by_three_scans(gate, v_first, segments, marks):
    cu = [0, 5, 5, 70, 170]
    x = make_inputs(T=170, H=2, K=32, V=64, gate=gate, initial=True, sequences=4, v_first=v_first)
    check(run(x, cu=cu, v_first=v_first, change={"thrice": True}, segments=segments, marks=marks))


@pytest.mark.parametrize("descriptors", [False, True])
def test_three_scans_in_half_precision_with_narrow_blocks(descriptors):
    x = make_inputs(B=2, T=150, H=2, K=64, V=32, dtype=torch.float16, gate="head", initial=True, sequences=2)
    change = {"thrice": True, "descriptors": descriptors, "block_v": 32}
    check(run(x, change=change, marks=2), 3e-3)


def test_three_scans_are_for_decays_without_gradient_and_a_scale():
    from fla.ops._linear.scalar import HEAD_DECAY, NO_DECAY, TOKEN_DECAY, ScalarCall

    def thrice(decay, dtype=torch.bfloat16, scale=0.1):
        k = torch.zeros(1, 64, 2, 64, dtype=dtype)
        plan = dataclasses.replace(scalar_plan(CHIP, dtype, 64, 64, 100), thrice=True)
        return ScalarCall.make(k, k, scale, decay, False, None, plan=plan).plan.thrice

    assert thrice(HEAD_DECAY)
    assert thrice(NO_DECAY)
    assert thrice(HEAD_DECAY, torch.float16)
    # A state without decays is kept unscaled there, which float16 has no room for.
    assert not thrice(NO_DECAY, torch.float16)
    assert not thrice(NO_DECAY, scale=0.0)
    assert not thrice(TOKEN_DECAY)


def test_a_scale_of_zero_leaves_the_gradients_of_states():
    x = make_inputs(T=70, H=2, K=16, V=16, gate=None, initial=True)
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    _, ht = scalar_linear(**y, scale=0.0, output_final_state=True, chip=CHIP)
    dv, dh = torch.autograd.grad(ht.sum(), [y["v"], y["initial_state"]])
    assert torch.allclose(dv, y["k"].sum(-1, keepdim=True).expand_as(dv), atol=1e-4)
    assert torch.equal(dh, torch.ones_like(dh))


def test_blocks_of_k_in_half_precision():
    check(run(make_inputs(T=37, K=32, V=48, dtype=torch.float16), change={"grad_k": 16, "grad_v": 32}), 3e-3)


@pytest.mark.parametrize("gate", GATES)
def test_stretches_of_time(gate):
    check(run(make_inputs(T=100, K=16, V=16, gate=gate, initial=True), segments=3))


@pytest.mark.parametrize("descriptors", [False, True])
def test_stretches_of_packed_sequences(descriptors):
    cu = [0, 3, 3, 150]
    x = make_inputs(T=150, K=32, dtype=torch.float16, initial=True, sequences=len(cu) - 1)
    check(run(x, cu=cu, segments=2, change={"descriptors": descriptors}), 3e-3)


def test_strong_gates_stay_finite():
    check(run(make_inputs(T=70, K=16, shift=-20.0, initial=True)))


@pytest.mark.parametrize("low", [-1000.0, -float("inf")])
def test_steps_that_forget_everything(low):
    x = make_inputs(T=70, H=2, K=16, initial=True)
    x["g"][:, 5::17] = low
    check(run(x))


def test_gates_in_half_precision_get_gradients_of_their_dtype():
    x = make_inputs(T=40, K=16, dtype=torch.float16)
    x["g"] = x["g"].to(torch.float16)
    check(run(x), 3e-3)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
def test_token_by_token(gate, reverse, v_first):
    cu = [0, 3, 3, 9]
    x = make_inputs(T=9, H=2, K=20, V=33, gate=gate, initial=True, sequences=3, v_first=v_first)
    if gate == "token":
        x["g"][:, 4] = -float("inf")
    o, ht = scalar_linear(
        **x, output_final_state=True, reverse=reverse, state_v_first=v_first, cu_seqlens=torch.tensor(cu), tokens=True
    )
    ref = recurrence({n: t.double() for n, t in x.items()}, v_first=v_first, cu=cu, reverse=reverse)
    check({"o": ratio(o, ref[0]), "ht": ratio(ht, ref[1])}, 1e-6)


def test_no_tokens():
    x = make_inputs(T=1, K=16, initial=True)
    y = {n: t if n == "initial_state" else t[:, :0] for n, t in x.items()}
    o, ht = scalar_linear(**y, output_final_state=True)
    assert o.shape == (1, 0, 1, 16)
    assert torch.equal(ht, x["initial_state"])


@pytest.mark.parametrize("cu", [None, [0, 0, 3, 40]])
def test_reverse_over_many_tokens_with_gradients(cu):
    x = make_inputs(T=40, K=16, V=20, initial=True, sequences=None if cu is None else 3)
    check(run(x, cu=cu, reverse=True))


@pytest.mark.parametrize("gate", GATES)
def test_wide_keys_go_through_states_first(gate):
    x = make_inputs(T=37, H=2, K=40, V=24, gate=gate, initial=True)
    check(run(x, change={"one_scan": False, "block_k": 16, "grad_k": 16, "states_v": 16, "grad_v": 16}))


def test_wide_keys_over_stretches_of_time():
    x = make_inputs(T=100, K=40, V=24, initial=True)
    check(run(x, change={"one_scan": False, "block_k": 16, "grad_k": 32, "states_v": 16}, segments=3))


def _ops():
    import fla.ops
    from fla.ops._linear import entry

    names = [n for n in dir(entry) if n.startswith(("chunk_", "fused_", "parallel_"))]
    assert len(names) >= 13
    return {n: (getattr(fla.ops, n), getattr(entry, n)) for n in names}


def test_entries_have_the_parameters_of_the_ops_they_serve():
    import inspect

    for name, (public, ours) in _ops().items():
        shared = [p for p in inspect.signature(public).parameters if p in inspect.signature(ours).parameters]
        assert shared == list(inspect.signature(ours).parameters), name


def test_public_ops_run_on_the_kernels_and_agree_with_pytorch():
    from fla.backends import last_decision, use_backend

    x = make_inputs(T=20, H=2, K=16, initial=True)
    q, k, v, h0 = (x[n] for n in ("q", "k", "v", "initial_state"))
    for name, (public, _) in _ops().items():
        kw = {} if "parallel" in name else {"initial_state": h0, "output_final_state": True}
        kw |= {"layer_idx": 1, "num_layers": 4} if "lightning" in name else {}
        kw |= {"normalize": False} if "linear" in name else {"g": x["g"]} if "simple" in name else {}
        with use_backend("torch"):
            ref = public(q, k, v, **kw)
        with use_backend("triton", strict=True):
            o, ht = public(q, k, v, **kw)
        assert last_decision().backend == "triton", name
        check({"o": ratio(o, ref[0])} | ({} if ref[1] is None else {"ht": ratio(ht, ref[1])}))


NORMALIZED = {
    "K32 V20": {"T": 70, "H": 2, "K": 32, "V": 20, "dtype": torch.float32},
    "fp16 varlen": {"T": 70, "H": 2, "K": 16, "dtype": torch.float16, "cu": [0, 3, 3, 70]},
    "reverse varlen": {"T": 70, "H": 2, "K": 16, "dtype": torch.float32, "reverse": True, "cu": [0, 3, 3, 70]},
}


@pytest.mark.parametrize("name", list(NORMALIZED))
def test_normalised_attention(name, monkeypatch):
    import check_linear

    monkeypatch.setattr(check_linear, "NORMALIZED", NORMALIZED)
    errors, _ = check_linear.check_normalized(name, "cpu")
    check(errors, 3e-3 if "fp16" in name else 1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_normalised_attention_token_by_token(reverse):
    from linear_reference import normalized

    from fla.ops._linear.normalizer import normalized_linear

    cu = [0, 3, 3, 9]
    x = make_inputs(T=9, H=2, K=20, V=33, gate=None, initial=True, sequences=3)
    x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    x["z"] = torch.rand(3, 1, 2, 20)
    got = normalized_linear(
        x["q"], x["k"], x["v"], state=x["initial_state"], z=x["z"], final=True, reverse=reverse, tokens=True,
        cu_seqlens=torch.tensor(cu),
    )  # fmt: skip
    ref = normalized({n: t.double() for n, t in x.items()}, cu=cu, reverse=reverse)
    check({n: ratio(a, b) for n, a, b in zip(("o", "ht", "zt"), got, ref, strict=True)})


def test_normalised_attention_where_the_numerator_overflows_float16():
    from fla.ops._linear.normalizer import normalized_linear

    q = torch.full((1, 70, 1, 16), 4.0, dtype=torch.float16)
    v = torch.full((1, 70, 1, 16), 100.0, dtype=torch.float16)
    o, _, _ = normalized_linear(q, q, v, scale=1.0)
    assert torch.allclose(o, v, rtol=2e-3)


# States and scores that float16 cannot hold, with results that it can.
RANGE = {
    "states": ({"shift": 8.0}, {"initial_state": 1e6, "q": 1e-2, "do": 1e-3}),
    "states without decays": ({"gate": None}, {"initial_state": 1e6, "q": 1e-2, "do": 1e-3}),
    "scores": ({"gate": "head", "initial": False}, {"q": 300.0, "k": 300.0, "v": 1e-3, "do": 1e-4}),
    "score gradients": ({"initial": False}, {"v": 30.0, "k": 1e-3, "q": 1e-3, "do": 3e3}),
    "small states": ({"shift": 8.0}, {"initial_state": 1e-6, "v": 1e-3, "k": 1e-2, "q": 30.0, "do": 10.0}),
}
PASSES = {
    "three scans": {"thrice": True},
    "dv in a scan": {"dv_scan": True, "both": True, "both_v": 32},
    "by chunks": {},
    "states first": {"one_scan": False, "block_k": 16, "grad_k": 16, "states_v": 16, "grad_v": 32},
}


@pytest.mark.parametrize("case", list(RANGE))
@pytest.mark.parametrize("passes", list(PASSES))
def test_the_range_of_float16(case, passes):
    settings, times = RANGE[case]
    x = make_inputs(**{"T": 150, "K": 32, "V": 32, "dtype": torch.float16, "initial": True, **settings})
    x = {n: t * times.get(n, 1.0) for n, t in x.items()}
    check(run(x, change=PASSES[passes], do_times=times["do"]), 3e-3)


@pytest.mark.parametrize("passes", list(PASSES))
def test_gradients_of_strong_gates_in_half_precision(passes):
    """They are about 1e-9, which float16 has no numbers for."""
    x = make_inputs(T=150, H=2, K=32, V=32, shift=-20.0, dtype=torch.float16)
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    plan = dataclasses.replace(scalar_plan(CHIP, torch.float16, 32, 32, 100), **PASSES[passes])
    (got,) = torch.autograd.grad(scalar_linear(**y, chip=CHIP, plan=plan)[0].sum(), y["g"])
    z = {n: t.double().requires_grad_() for n, t in x.items()}
    (want,) = torch.autograd.grad(recurrence(z)[0].sum(), z["g"])
    assert (got - want).norm() < 2e-3 * want.norm()


def test_outputs_beyond_float16_saturate():
    q = torch.full((1, 70, 1, 16), 30.0, dtype=torch.float16)
    o, _ = scalar_linear(q, q, -q, scale=1.0)
    assert (o == -65504).any()
    assert torch.isfinite(o).all()
    q[0, 5, 0, 0] = float("nan")
    assert scalar_linear(q, q, q)[0][0, 5].isnan().any()
