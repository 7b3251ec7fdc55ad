# SPDX-License-Identifier: MIT
"""Float16 delta rules where states, values, gradients or the inverse leave what float16 holds: results that fit are
right, by the float64 token recurrence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import delta_reference
import vector_reference

from fla.backends import use_backend
from fla.ops._delta.autograd import delta_rule
from fla.ops._delta.vector_entry import chunk_gdn2, chunk_kda
from fla.ops.delta_rule import fused_recurrent_delta_rule
from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
from fla.ops.kda import fused_recurrent_kda

CALLS = [
    ("gated", False), ("gated", True), ("kda", False), ("kda", True), ("plain", False), ("comba", True),
    ("gdn2", False),
]  # fmt: skip
FORWARD, BACKWARD = 5e-3, 1e-2
# Each leaves float16 in another way: what the factors of v, the states, do and dht are, the write strength, the length,
# and whether all keys are nearly one.
CASES: dict[str, dict[str, Any]] = {
    "a state of 1e5, one token": {"h0": 1e5, "do": 0.1, "T": 1},
    "a state of 3e4": {"h0": 3e4, "do": 0.1, "T": 20},
    "states of 5e4 of packed sequences": {"h0": 5e4, "do": 0.1, "T": 20, "cu": [0, 3, 3, 20]},
    "values of 1e4 that reflections add up": {"v": 1e4, "beta": 2.0, "do": 0.1, "T": 32},
    "nearly parallel keys and reflections": {"beta": 2.0, "T": 64, "parallel": True},
    "nearly parallel keys that erase too much": {"beta": 1.6, "T": 64, "parallel": True},
    "gradients of 1e5 of the state": {"v": 0.01, "h0": 0.01, "beta": 0.1, "dht": 1e5, "T": 70},
}

pytestmark = pytest.mark.usefixtures("poisoned")


def make(op: str, norm: bool, case: dict[str, Any], K: int = 16) -> dict[str, torch.Tensor]:
    T, n = case["T"], len(case["cu"]) - 1 if "cu" in case else 1
    if op in ("kda", "gdn2"):
        x = vector_reference.make_inputs(
            T=T, K=K, dtype=torch.float16, g_dtype=torch.float32, gate="weak", sequences=n, channels=op == "gdn2"
        )
    else:
        x = delta_reference.make_inputs(
            T=T, K=K, dtype=torch.float16, gate=None if op == "plain" else "given", shift=6.0, sequences=n,
            initial=True, read=op == "comba",
        )  # fmt: skip
    strength = case.get("beta", 0.5)
    if op == "gdn2":
        # It erases and writes with gates of its own; both stay below 1.
        x["b"], x["w"] = (torch.full_like(x[name], min(strength, 1.0)) for name in ("b", "w"))
    else:
        x["beta"] = torch.full_like(x["beta"], strength)
    far = {n: case[n] for n in ("h0", "v", "parallel") if n in case}
    return delta_reference.strain(x, length=3.0 if norm else 1.0, **far)


def run(op: str, norm: bool, case: dict[str, Any], **more: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Errors of outputs, state and every gradient, and what they are errors of."""
    x = make(op, norm, case, **more)
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    cu = None if "cu" not in case else torch.tensor(case["cu"])
    h0, kw = y["initial_state"], {"norm": norm, "cu": case.get("cu")}
    if op == "kda":
        o, ht = chunk_kda(y["q"], y["k"], y["v"], y["g"], y["beta"], None, h0, True, norm, cu_seqlens=cu)[:2]
    elif op == "gdn2":
        o, ht = chunk_gdn2(y["q"], y["k"], y["v"], y["g"], y["b"], y["w"], None, h0, True, norm, cu_seqlens=cu)[:2]
    else:
        o, ht = delta_rule(
            y["q"], y["k"], y["v"], y.get("g"), y["beta"], scale=None, initial_state=h0, output_final_state=True,
            norm=norm, cu_seqlens=cu, read=y.get("p"), before=op == "comba",
        )  # fmt: skip
        kw["before"] = op == "comba"
    gen = torch.Generator().manual_seed(1)
    do = (torch.randn(o.shape, generator=gen) * case.get("do", 1.0)).half()
    dht = torch.randn(ht.shape, generator=gen) * case.get("dht", case.get("do", 1.0))
    grads = torch.autograd.grad((o, ht), list(y.values()), (do, dht))
    got = {"o": o.detach(), "ht": ht.detach(), **dict(zip(y, grads, strict=True))}
    reference = vector_reference if op in ("kda", "gdn2") else delta_reference
    ref = reference.with_gradients(x, do, dht, **kw)
    error = lambda n: float((got[n].double() - ref[n]).norm() / ref[n].norm().clamp_min(1e-300))
    return {n: error(n) for n in ref}, ref


def check(errors: dict[str, float], names: set[str] | None = None) -> None:
    limit = lambda n: FORWARD if n in ("o", "ht") else BACKWARD
    wrong = {n: e for n, e in errors.items() if (names is None or n in names) and not e < limit(n)}
    assert not wrong, wrong


@pytest.mark.parametrize(("op", "norm"), CALLS)
@pytest.mark.parametrize("name", list(CASES))
def test_results_that_fit_float16_are_right(name, op, norm):
    case = CASES[name]
    if op == "gdn2" and "dht" in case:
        # The gradient of what is written, w v, is a float16 tensor of its own, in front of the engine.
        case = {**case, "dht": 1e4}
    errors, ref = run(op, norm, case)
    fits = {n for n, t in ref.items() if n in ("ht", "initial_state", "g") or t.abs().max() < 65504}
    assert {"o", "ht", "v", "q"} <= fits, "the case is meant to fit"
    check(errors, fits)


@pytest.mark.parametrize(("op", "norm"), CALLS)
def test_ordinary_values_stay_in_float16(op, norm):
    """The float32 form would be right to 1e-6."""
    errors, _ = run(op, norm, {"T": 70})
    check(errors)
    assert errors["ht"] > 1e-5
    assert errors["initial_state"] > 1e-5


@pytest.mark.parametrize(("op", "norm"), CALLS)
def test_tiny_values_and_gradients_keep_their_digits_in_float32_results(op, norm):
    errors, _ = run(op, norm, {"v": 1e-5, "h0": 1e-5, "T": 40})
    check(errors, {"ht", "initial_state", "g", "v"})
    errors, _ = run(op, norm, {"do": 1e-6, "T": 40})
    check(errors, {"o", "ht", "initial_state", "g"})


@pytest.mark.parametrize("op", ["gated", "kda"])
def test_one_tiny_head_does_not_send_the_others_to_float32(op, monkeypatch):
    make_one = make

    def two(*args, **kw):
        x = {n: torch.cat([t, t.clone()], 1 if n == "initial_state" else 2) for n, t in make_one(*args, **kw).items()}
        x["v"][:, :, 1] *= 1e-4
        x["initial_state"][:, 1] *= 1e-4
        return x

    monkeypatch.setitem(globals(), "make", two)
    errors, _ = run(op, True, {"T": 40})
    check(errors)
    assert errors["ht"] > 1e-5


@pytest.mark.parametrize("op", ["gated", "kda"])
def test_wide_heads_leave_the_range_too(op):
    check(run(op, False, {"h0": 1e5, "do": 0.1, "T": 20}, K=160)[0], {"o", "ht", "v", "initial_state"})
    check(run(op, True, {"beta": 2.0, "T": 64, "parallel": True}, K=160)[0])


def test_a_gradient_that_leaves_the_range_does_not_stay_for_the_next_one():
    x = make("gated", True, {"T": 40})
    y = {n: t.clone().requires_grad_() for n, t in x.items()}
    o, ht = delta_rule(
        y["q"], y["k"], y["v"], y["g"], y["beta"], scale=None, initial_state=y["initial_state"],
        output_final_state=True, norm=True,
    )  # fmt: skip
    back = lambda dht: torch.autograd.grad((o, ht), list(y.values()), (torch.ones_like(o), dht), retain_graph=True)
    first = back(torch.ones_like(ht))
    assert not torch.isfinite(back(1e6 * torch.ones_like(ht))[2]).all()
    for a, b in zip(first, back(torch.ones_like(ht)), strict=True):
        assert torch.isfinite(b).all()
        assert (a.float() - b.float()).norm() < 5e-3 * a.float().norm() + 1e-6


@pytest.mark.parametrize("v_first", [False, True])
def test_states_before_chunks_come_from_the_form_that_is_right(v_first):
    x = make("kda", True, {"h0": 3e4, "T": 100})
    h0 = x["initial_state"].mT.contiguous() if v_first else x["initial_state"]
    call = lambda h0: chunk_kda(
        x["q"], x["k"], x["v"], x["g"], x["beta"], None, h0, True, True, return_intermediate_states=True,
        state_v_first=v_first,
    )  # fmt: skip
    with torch.no_grad():
        _, ht, h = call(h0)
        assert torch.isfinite(ht).all()
        assert h.dtype == torch.float16
        want = h0.clamp(-65504, 65504)
        assert (h[:, 0].float() - want).norm() < 1e-3 * want.norm()
        _, small, h = call(h0 * 1e-4)
        assert torch.isfinite(small).all()
        assert (h[:, 0].float() - h0 * 1e-4).norm() < 1e-3 * h0.norm() * 1e-4


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "name", ["a state of 1e5, one token", "a state of 3e4", "values of 1e4 that reflections add up"]
)
@pytest.mark.parametrize("op", ["gated", "plain", "kda"])
def test_recurrent_forms_hold_what_float16_does_not(op, name, norm):
    x = make(op, norm, CASES[name])
    args = [x["q"], x["k"], x["v"]] + ([x["g"]] if "g" in x else []) + [x["beta"]]
    fn = {"gated": fused_recurrent_gated_delta_rule, "plain": fused_recurrent_delta_rule, "kda": fused_recurrent_kda}[
        op
    ]
    order = ("q", "k", "v", "g", "beta") if op != "plain" else ("q", "k", "v", "beta")
    with torch.no_grad(), use_backend("triton", strict=True):
        o, ht = fn(
            **dict(zip(order, args, strict=True)), initial_state=x["initial_state"], output_final_state=True,
            use_qk_l2norm_in_kernel=norm,
        )  # fmt: skip
    reference = vector_reference if op == "kda" else delta_reference
    ref = reference.with_gradients(x, torch.zeros_like(o), torch.zeros_like(ht), norm=norm)
    assert (o.double() - ref["o"]).norm() < FORWARD * ref["o"].norm()
    assert (ht.double() - ref["ht"]).norm() < FORWARD * ref["ht"].norm()
