# SPDX-License-Identifier: MIT
"""Calls that look like an earlier one go straight to what served it, and others do not."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from fla.backends import devices, doors, last_decision, trace, use_backend
from fla.backends.registry import REGISTRY

from .conftest import make_toy


class Seen:
    """What a toy op with a Triton path asked and ran."""

    def __init__(self) -> None:
        self.checked = self.verified = self.ran = self.direct = 0
        self.good = True


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(devices, "has_triton_driver", lambda device_type: device_type == "cpu")
    monkeypatch.setattr(devices, "triton_possible", lambda: True)
    seen = Seen()

    def run(inputs):
        if not seen.good:
            return None
        seen.direct += 1
        q, k = inputs[0], inputs[1]
        return q + k, inputs[3]

    def core(q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        seen.ran += 1
        inputs = (q, k, None, v)
        result = run(inputs)
        seen.direct -= 1
        doors.offer(run, inputs, result)
        return result

    def validate(q, k, v, scale, cu_seqlens, state_v_first) -> None:
        seen.checked += 1

    validate.values_of = ("cu_seqlens",)

    def verify(q) -> tuple[bool, None]:
        seen.verified += 1
        return True, None

    module = types.ModuleType("toy_doors")
    module.core = core
    monkeypatch.setitem(sys.modules, "toy_doors", module)
    fn, _ = make_toy(
        validate=validate,
        outputs=lambda q, k, v: (q.new_empty(q.shape), v),
        triton="toy_doors:core",
        triton_verifier=verify,
    )
    return fn, seen


def given(*shape: int, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(*shape or (2, 4)).requires_grad_(grad) for _ in range(3)]


def test_a_call_that_looks_the_same_asks_nobody(toy) -> None:
    fn, seen = toy
    fn(*given())
    q, k, v = given()
    o, last = fn(q, k, v)
    assert torch.equal(o, q + k)
    assert last is v
    assert (seen.checked, seen.verified, seen.ran, seen.direct) == (1, 1, 1, 1)
    assert last_decision().backend == "triton"
    assert fn.op.cell("triton") == [2]


def other_calls() -> list[tuple]:
    q, k, v = given()
    return [
        ("shape", given(2, 5), {}),
        ("dtype", [x.double() for x in (q, k, v)], {}),
        ("gradient", given(2, 4, grad=True), {}),
        ("number", (q, k, v), {"scale": 2.0}),
        ("type of a number", (q, k, v), {"scale": 1}),
        ("flag", (q, k, v), {"state_v_first": True}),
        ("strides", (torch.randn(4, 2).t(), k, v), {}),
        ("alignment", (torch.randn(9)[1:].view(2, 4), k, v), {}),
        ("offsets", (q, k, v), {"cu_seqlens": torch.tensor([0, 2])}),
    ]


@pytest.mark.parametrize("case", other_calls(), ids=lambda case: case[0])
def test_whatever_looks_different_is_checked(toy, case) -> None:
    fn, seen = toy
    fn(*given())
    _, args, kwargs = case
    fn(*args, **kwargs)
    assert (seen.checked, seen.ran, seen.direct) == (2, 2, 0)


def test_values_that_are_checked_each_time_open_no_door(toy) -> None:
    fn, seen = toy
    for _ in range(3):
        fn(*given(), cu_seqlens=torch.tensor([0, 2]))
    assert (seen.checked, seen.ran) == (3, 3)


def test_grad_mode_is_part_of_what_a_call_looks_like(toy) -> None:
    fn, seen = toy
    args = given(2, 4, grad=True)
    fn(*args)
    with torch.no_grad():
        fn(*args)
    assert seen.checked == 2
    fn(*args)
    assert seen.direct == 1


def test_one_tensor_given_twice_opens_no_door(toy) -> None:
    fn, seen = toy
    q, k, v = given()
    fn(q, q, v)
    assert torch.equal(fn(q, k, v)[0], q + k)
    assert seen.direct == 0
    # A door of others lets it through.
    assert torch.equal(fn(q, q, v)[0], q + q)
    assert seen.direct == 1


def test_a_tensor_that_does_not_reach_what_runs_opens_no_door(toy) -> None:
    fn, seen = toy
    for _ in range(2):
        fn(*given(), state_v_first=torch.tensor(True))
    assert (seen.ran, seen.direct) == (2, 0)


def test_subclasses_and_other_objects_pass_by(toy) -> None:
    fn, seen = toy
    fn(*given())

    class Odd(torch.Tensor):
        pass

    q, k, v = given()
    fn(q.as_subclass(Odd), k, v)
    assert (seen.ran, seen.direct) == (2, 0)


def test_transforms_and_tangents_go_the_long_way(toy) -> None:
    fn, seen = toy
    fn(*given())
    q, k, v = given()
    torch.func.vjp(lambda x: x + fn(q, k, v)[0], q)
    assert (seen.ran, seen.direct) == (2, 0)
    with torch.autograd.forward_ad.dual_level():
        fn(torch.autograd.forward_ad.make_dual(q, k), k, v)
    assert (seen.ran, seen.direct) == (3, 0)
    fn(q, k, v)
    assert (seen.ran, seen.direct) == (3, 1)


def test_what_says_that_it_no_longer_holds_is_asked_again(toy) -> None:
    fn, seen = toy
    fn(*given())
    seen.good = False
    assert fn(*given()) is None  # the long way, whose run says so too
    assert seen.checked == 2


def test_a_pin_a_trace_a_backend_and_a_variable_each_ask_anew(toy, monkeypatch) -> None:
    fn, seen = toy
    fn(*given())
    with use_backend("torch"):
        assert fn(*given())[0] == "torch"
    with trace() as taken:
        fn(*given())
    assert taken.ran("triton") == 1
    assert (seen.ran, seen.direct) == (2, 0)
    fn(*given())
    fn(*given())
    assert (seen.ran, seen.direct) == (3, 1)  # the first one finds the plan of before
    monkeypatch.setenv("FLA_BACKEND_STRICT", "1")
    fn(*given())
    assert (seen.ran, seen.direct) == (4, 1)
    monkeypatch.delenv("FLA_BACKEND_STRICT")
    REGISTRY.invalidate()
    fn(*given())
    assert (seen.ran, seen.direct) == (5, 1)
    fn(*given())
    assert (seen.ran, seen.direct) == (5, 2)


def test_results_made_out_of_what_ran_open_no_door() -> None:
    inputs = given()
    _, offered = doors.listen(lambda *x: [doors.offer(tuple, x, (x[0],)), (x[0],)][1], tuple(inputs))
    assert offered is None
    assert not doors.asked()


def test_what_a_dispatched_call_inside_ran_opens_no_door(toy) -> None:
    fn, seen = toy
    fn.op._values_of = None  # does not listen itself
    fn(*given())
    before = last_decision()
    inputs = given()
    _, offered = doors.listen(fn, tuple(inputs))
    assert offered is None
    assert seen.ran == 2

    def core(*args) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        doors.listen(core, ())
    assert last_decision() is before
    assert not doors.asked()


def test_no_door_holds_on_to_tensors(toy) -> None:
    import gc
    import weakref

    fn, _ = toy
    args = given()
    refs = [weakref.ref(x) for x in args]
    fn(*args)
    del args
    gc.collect()
    assert not any(ref() is not None for ref in refs)
