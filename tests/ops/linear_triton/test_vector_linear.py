# SPDX-License-Identifier: MIT
"""The channel-decay kernels of linear attention in the interpreter, against the token recurrence in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from linear_vector_reference import make_inputs, ratio, recurrence, with_gradients

from fla.backends import last_decision, use_backend
from fla.ops._common.policy import CHIPS
from fla.ops._linear.vector_autograd import vector_linear
from fla.ops._linear.vector_policy import vector_plan

INF = float("inf")
F16 = torch.float16


@pytest.fixture(autouse=True)
def interpreted():
    import triton.runtime.interpreter as interpreter

    from fla.ops._linear.kernels.vector_scan import vector_scan

    if not isinstance(vector_scan, interpreter.InterpretedFunction):
        pytest.skip("kernels were imported before TRITON_INTERPRET was set")


pytestmark = pytest.mark.usefixtures("poisoned")


def run(x, *, v_first=False, cu=None, reverse=False, change=None, do_times=1.0, **make):
    """Errors of outputs and of every gradient."""
    if change:
        k, v = (x["v"], x["k"]) if "gv" in x else (x["k"], x["v"])
        dtype = str(k.dtype).removeprefix("torch.")
        plan = vector_plan(CHIPS["interpreter"], dtype, k.shape[-1], v.shape[-1], heads=100)
        make["plan"] = dataclasses.replace(plan, **change)
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, ht = vector_linear(
        **y, output_final_state=True, state_v_first=v_first, reverse=reverse,
        cu_seqlens=None if cu is None else torch.tensor(cu), **make,
    )  # fmt: skip
    gen = torch.Generator().manual_seed(1)
    do = (torch.randn(o.shape, generator=gen) * do_times).to(o.dtype)
    dht = torch.randn(ht.shape, generator=gen) * min(do_times, 1.0)
    grads = torch.autograd.grad((o, ht), list(y.values()), (do, dht))
    got = {"o": o, "ht": ht, **dict(zip(y, grads, strict=True))}
    ref = with_gradients(x, do, dht, v_first=v_first, cu=cu, reverse=reverse)
    assert all(got[n].dtype == x[n].dtype for n in x)
    return {n: ratio(got[n], ref[n]) for n in ref}


def check(errors, limit=1e-5):
    wrong = {n: e for n, e in errors.items() if not e < limit}
    assert not wrong, wrong


KINDS = [{"gate": "gk"}, {"gate": "gv"}, {"gate": "gk", "bonus": True}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fast", [0, 1])
def test_both_forms_of_the_scores(kind, fast):
    check(run(make_inputs(T=70, H=2, K=16, V=32, initial=True, **kind), change={"fast": fast}))


@pytest.mark.parametrize("gate", ["gk", "gv"])
def test_outputs_and_states_beyond_float16_saturate(gate):
    q = torch.full((1, 130, 1, 16), 30.0, dtype=F16)
    o, ht = vector_linear(q, q, -q, scale=1.0, output_final_state=True, **{gate: torch.zeros_like(q)})
    assert (o == -65504).any()
    assert torch.isfinite(o).all()
    assert ht.min() < -65504  # states are float32
    q[0, 5, 0, 0] = float("nan")
    assert vector_linear(q, q, q, **{gate: torch.zeros_like(q)})[0][0, 5].isnan().any()


# States and scores that float16 cannot hold, with results that it can.
RANGE = {
    "states": {"initial_state": 1e6, "q": 1e-2, "bonus": 1e-2, "do": 1e-3},
    "scores": {"q": 300.0, "k": 300.0, "v": 1e-3, "initial_state": 1e-3, "bonus": 1e-2, "do": 1e-4},
    "score gradients": {"v": 30.0, "k": 1e-3, "q": 1e-3, "do": 1e3},
    "small states": {"initial_state": 1e-6, "v": 1e-3, "k": 1e-2, "q": 30.0, "do": 10.0},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", list(RANGE))
@pytest.mark.parametrize("change", [{}, {"vb": 16, "bv": 16, "bv_save": 16}])
def test_the_range_of_float16(kind, case, change):
    times = RANGE[case]
    x = make_inputs(T=100, K=16, V=32, dtype=F16, initial=True, strength=0.1, **kind)
    x = {n: t * times.get(n, 1.0) for n, t in x.items()}
    check(run(x, change=change, do_times=times["do"]), 4e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tma", [False, True])
def test_tails_in_half_precision(kind, tma):
    check(run(make_inputs(B=2, T=70, K=32, V=16, dtype=F16, **kind), change={"tma": tma}), 2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [3.0, 20.0])
def test_strong_gates_and_steps_that_forget_everything(kind, strength):
    check(run(make_inputs(T=70, K=16, strength=strength, low=-INF, initial=True, **kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_gates_of_minus_20_and_of_0(kind):
    check(run(make_inputs(T=70, K=16, low=-20.0, strength=0.0, initial=True, **kind)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("T", "low"), [(2, -20.0), (3, -14.0), (8, -5.0), (34, -20.0)])
def test_a_few_tokens_with_strong_gates(kind, T, low):
    """The chunk loses few bits, but the gates' gradient is as small as the gates are strong."""
    x = make_inputs(T=T, K=16, initial=True, **kind)
    name = "gv" if "gv" in x else "gk"
    x[name] = torch.full_like(x[name], low)
    check(run(x))


@pytest.mark.parametrize("kind", KINDS)
def test_gates_that_grow(kind):
    x = make_inputs(T=70, K=16, V=16, initial=True, **kind)
    name = "gv" if "gv" in x else "gk"
    x[name] = 0.5 + 0.2 * x[name]
    check(run(x))


def test_rows_that_are_nearly_forgotten_in_a_long_input():
    # bug case N01
    check(run(make_inputs(T=300, K=16, V=16, low=-20.0, dtype=F16)), 2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_decays_of_minus_60_a_step(kind):
    # bug case N03
    check(run(make_inputs(B=2, T=128, H=2, K=32, shift=-35.0, strength=1.5, **kind)))


def test_no_initial_state_is_one_of_zeros():
    # bug case N24
    x = make_inputs(T=40, K=16)
    y = {**x, "initial_state": torch.zeros(1, 1, 16, 16)}
    a, b = (
        [t.requires_grad_() for t in z.values() if t.shape[1] != 1] and torch.autograd.grad(
            vector_linear(**z)[0].sum(), [z[n] for n in ("q", "k", "v", "gk")]
        )
        for z in ({n: t.clone() for n, t in x.items()}, {n: t.clone() for n, t in y.items()})
    )  # fmt: skip
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert a[3][:, 0].abs().max() < 1e-5 * a[3].abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v_first", [False, True])
def test_varlen_with_empty_sequences_in_both_layouts(kind, v_first):
    cu = [0, 0, 3, 3, 67, 70, 70]
    x = make_inputs(T=70, K=16, V=32, initial=True, sequences=6, v_first=v_first, **kind)
    check(run(x, cu=cu, v_first=v_first))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 40]])
def test_reverse(kind, cu):
    x = make_inputs(T=40, K=16, V=16, initial=True, sequences=None if cu is None else 3, **kind)
    check(run(x, cu=cu, reverse=True))


@pytest.mark.parametrize(("K", "V"), [(33, 20), (60, 65), (20, 80)])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_sizes(K, V, kind):
    check(run(make_inputs(T=37, H=2, K=K, V=V, initial=True, **kind)))


def test_blocks_of_channels_and_values():
    change = {"kb": 16, "gkb": 16, "vb": 16, "bv": 16, "bv_save": 16}
    check(run(make_inputs(T=37, K=64, V=48, initial=True), change=change))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cu", [None, [0, 3, 3, 150]])
def test_stretches_of_time(kind, cu):
    x = make_inputs(T=150, K=16, V=32, initial=True, sequences=None if cu is None else 3, **kind)
    check(run(x, cu=cu, segments=3))


def test_gates_in_half_precision_get_gradients_of_their_dtype():
    check(run(make_inputs(T=40, K=16, dtype=F16, gate_dtype=F16)), 2e-3)


@pytest.mark.parametrize("gate", ["gk", "gv", "both", "none"])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_gla_token_by_token(gate, v_first, reverse):
    from fla.ops.gla import fused_recurrent_gla

    cu = [0, 3, 3, 9]
    low = -INF if gate != "none" else None
    x = make_inputs(T=9, H=2, K=20, V=33, gate=gate, initial=True, sequences=3, v_first=v_first, low=low)
    with use_backend("triton", strict=True):
        o, ht = fused_recurrent_gla(
            **x, output_final_state=True, reverse=reverse, state_v_first=v_first, cu_seqlens=torch.tensor(cu)
        )
    ref = recurrence({n: t.double() for n, t in x.items()}, v_first=v_first, cu=cu, reverse=reverse)
    check({"o": ratio(o, ref[0]), "ht": ratio(ht, ref[1])}, 1e-6)


def public(fn, x, triton, **kw):
    """Results and gradients of a public op on Triton, or in float64 in PyTorch."""
    y = {n: (t if triton else t.double()).clone().requires_grad_() for n, t in x.items()}
    with use_backend("triton" if triton else "torch", strict=True):
        states = {n: y.pop(n) for n in ("hk", "hv") if n in y}
        more = {"initial_state": tuple(states.values())} if states else {}
        o, final = fn(**y, **more, output_final_state=True, **kw)
        assert last_decision().backend == ("triton" if triton else "torch")
        outs = [o, *final] if isinstance(final, list) else [o, final]
        gen = torch.Generator().manual_seed(3)
        grads = [torch.randn(t.shape, generator=gen).to(t.dtype) for t in outs]
        leaves = [*y.values(), *states.values()]
        return [*outs, *torch.autograd.grad(outs, leaves, grads)]


def same(fn, x, limit, **kw):
    a, b = (public(fn, x, triton, **kw) for triton in (True, False))
    assert all(s.shape == t.shape for s, t in zip(a, b, strict=True))
    check({i: ratio(s, t) for i, (s, t) in enumerate(zip(a, b, strict=True))}, limit)


@pytest.mark.parametrize("cu", [None, [0, 7, 7, 45]])
def test_public_gla(cu):
    from fla.ops.gla import chunk_gla, fused_recurrent_gla

    x = make_inputs(T=45, H=2, K=16, V=32, initial=True, sequences=None if cu is None else 3)
    cut = None if cu is None else torch.tensor(cu)
    same(fused_recurrent_gla, x, 1e-5, cu_seqlens=cut, reverse=True)
    x["g"] = x.pop("gk")
    same(chunk_gla, x, 1e-5, cu_seqlens=cut)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("T", [9, 45])
def test_public_rwkv6(reverse, T):
    from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

    x = make_inputs(T=T, H=2, K=16, V=32, initial=True, bonus=True)
    x = {{"q": "r", "gk": "w", "bonus": "u"}.get(n, n): t for n, t in x.items()}
    if reverse:
        same(fused_recurrent_rwkv6, x, 1e-5, reverse=True)
        with torch.no_grad(), use_backend("triton"):
            o, ht = fused_recurrent_rwkv6(**x, output_final_state=True, reverse=True)
        with torch.no_grad(), use_backend("torch"):
            want, state = fused_recurrent_rwkv6(**x, output_final_state=True, reverse=True)
        check({"o": ratio(o, want), "ht": ratio(ht, state)})
    else:
        same(chunk_rwkv6, x, 1e-5)


def slots(T, H=1, HQ=2, K=16, V=32, M=24, sequences=1):
    gen = torch.Generator().manual_seed(0)
    rn = lambda *s: torch.randn(*s, generator=gen)
    x = {"q": rn(1, T, HQ, K), "k": rn(1, T, H, K), "v": rn(1, T, H, V), "s": rn(1, T, H, M).softmax(-1)}
    x["g"] = torch.nn.functional.logsigmoid(rn(1, T, H, M))
    return {**x, "hk": rn(sequences, H, K, M), "hv": rn(sequences, H, M, V)}


@pytest.mark.parametrize("cu", [None, [0, 7, 7, 24]])
@pytest.mark.parametrize("gate", [False, True])
def test_public_gsa(cu, gate):
    from fla.ops.gsa import chunk_gsa, fused_recurrent_gsa

    x = slots(24, sequences=1 if cu is None else 3)
    if not gate:
        del x["g"]
    cut = None if cu is None else torch.tensor(cu)
    same(chunk_gsa, x, 2e-5, cu_seqlens=cut)
    same(fused_recurrent_gsa, x, 2e-5, cu_seqlens=cut, reverse=True)


@pytest.mark.parametrize("cu", [None, [0, 2, 2, 9]])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("most", [1 << 14, 0])
def test_gsa_token_by_token(cu, reverse, most, monkeypatch):
    from fla.ops.gsa import fused_recurrent_gsa, triton_path

    monkeypatch.setattr(triton_path, "MOST", most)
    x = slots(9, H=2, HQ=4, sequences=1 if cu is None else 3)
    x["initial_state"] = (x.pop("hk"), x.pop("hv"))
    kw = {"cu_seqlens": None if cu is None else torch.tensor(cu), "reverse": reverse, "output_final_state": True}
    with torch.no_grad():
        with use_backend("triton", strict=True):
            o, states = fused_recurrent_gsa(**x, **kw)
        with use_backend("torch", strict=True):
            want, ref = fused_recurrent_gsa(**x, **kw)
    check({"o": ratio(o, want), "hk": ratio(states[0], ref[0]), "hv": ratio(states[1], ref[1])})


def test_both_gates_with_gradients_are_left_to_pytorch_with_a_reason():
    from fla.ops._linear.vector_covers import covers_recurrent_gla

    x = make_inputs(T=40, K=16, gate="both")
    good, reason = covers_recurrent_gla(x["q"], x["k"], x["v"], x["gk"], x["gv"], None, False)
    assert not good
    assert "together" in reason
