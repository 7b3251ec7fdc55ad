# SPDX-License-Identifier: MIT
"""What happens when a backend raises."""

from __future__ import annotations

import warnings

import pytest
import torch

from fla.backends import BaseBackend, Capability, devices, explain, last_decision, register, report, trace, use_backend

from .conftest import make_toy


def failing(name="broken", error=None, **attributes):
    calls = []

    def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        calls.append(q.dtype)
        raise error or RuntimeError("kernel image\n is invalid")

    made = type(name, (BaseBackend,), {"backend_type": name, "toy": toy, **attributes})()
    return made, calls


def test_backend_that_fails_is_quarantined_with_one_warning_and_the_next_one_runs(toy, qkv):
    fn, operation = toy
    broken, calls = failing()
    register(operation, broken)
    with pytest.warns(RuntimeWarning, match="RuntimeError: kernel image is invalid") as caught:
        assert fn(*qkv) == ("torch", 1.0)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert last_decision().backend == "torch"
    assert last_decision().rejections[0].code == "error"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert fn(*qkv) == ("torch", 1.0)
    assert len(calls) == 1
    assert "quarantined" in explain(fn, *qkv).verdict("broken").reason
    found = next(row for row in report()["quarantine"] if row["operation"] == operation)
    assert "Traceback" in found["traceback"]


def test_warnings_point_at_the_line_that_called_the_op(toy, qkv):
    fn, operation = toy

    # Another order of parameters is called through an adapter, a trace adds a frame of its own.
    def swapped(self, v, k, q, scale=1.0, cu_seqlens=None, state_v_first=False):
        raise RuntimeError("no")

    register(operation, failing()[0])
    register(operation, type("Swapped", (BaseBackend,), {"backend_type": "swapped", "toy": swapped})())
    with trace(), pytest.warns(RuntimeWarning) as caught:
        fn(*qkv)
    assert {warning.filename for warning in caught} == {__file__}


def test_result_outside_of_autograd_is_a_failure_where_a_gradient_is_due():
    fn, operation = make_toy()
    detached = lambda self, q, k, v: (q.detach() * 2, None)
    register(operation, type("NoGrad", (BaseBackend,), {"backend_type": "no_grad", "toy": detached})())
    x = torch.ones(1, 2, 1, 3)
    assert torch.equal(fn(x, x, x)[0], 2 * x)
    with torch.no_grad():
        fn(x.clone().requires_grad_(), x, x)
    assert last_decision().backend == "no_grad"
    with pytest.warns(RuntimeWarning, match="takes no part in autograd"):
        assert fn(x.clone().requires_grad_(), x, x) == ("torch", 1.0)
    assert torch.equal(fn(x, x, x)[0], 2 * x)  # calls without a gradient keep the backend
    fn, operation = make_toy(differentiable=False)
    register(operation, type("NoGrad", (BaseBackend,), {"backend_type": "no_grad", "toy": detached})())
    fn(x.clone().requires_grad_(), x, x)
    assert last_decision().backend == "no_grad"


def test_second_backend_runs_before_core(toy, qkv):
    fn, operation = toy
    register(operation, failing(priority=1)[0])
    register(operation, type("Ok", (BaseBackend,), {"backend_type": "ok", "toy": lambda self, q, k, v: "ok"})())
    with pytest.warns(RuntimeWarning):
        assert fn(*qkv) == "ok"
    assert [v.backend for v in last_decision().rejections] == ["broken"]


def test_quarantine_holds_for_one_static_signature_only(toy, qkv):
    fn, operation = toy
    broken, calls = failing(capability=Capability(backward=True))
    register(operation, broken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            fn(*qkv)
            fn(*(x.double() for x in qkv))
            fn(*qkv, state_v_first=True)
            fn(torch.randn(2, 9, 2, 8), *qkv[1:])  # batch and length are not static
    assert len(calls) == 3


def test_refresh_ends_a_quarantine(toy, qkv):
    from fla.backends import refresh

    fn, operation = toy
    broken, calls = failing()
    register(operation, broken)
    for expected in (1, 2):
        with pytest.warns(RuntimeWarning):
            fn(*qkv)
        assert len(calls) == expected
        refresh()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        KeyboardInterrupt(),
        SystemExit(3),
    ],
    ids=lambda e: f"{type(e).__name__}-{str(e)[:24]}",
)
def test_memory_device_faults_and_interrupts_propagate(toy, qkv, error):
    fn, operation = toy
    broken, _ = failing(error=error)
    register(operation, broken)
    with pytest.raises(type(error)) as caught:
        fn(*qkv)
    assert caught.value is error
    assert not fn.op.quarantine


def test_failed_build_of_a_kernel_is_no_device_fault(toy, qkv):
    fn, operation = toy
    register(operation, failing(error=RuntimeError("CUDA error: no kernel image is available for execution"))[0])
    with pytest.warns(RuntimeWarning):
        assert fn(*qkv) == ("torch", 1.0)


def test_strict_mode_propagates(toy, qkv, monkeypatch):
    fn, operation = toy
    register(operation, failing(error=ValueError("mine"))[0])
    monkeypatch.setenv("FLA_BACKEND_STRICT", "yes")
    with pytest.raises(ValueError, match="mine"):
        fn(*qkv)


def test_strict_pin_propagates_and_a_soft_one_does_not(toy, qkv):
    fn, operation = toy
    register(operation, failing(error=ValueError("mine"))[0])
    with use_backend("broken", strict=True), pytest.raises(ValueError, match="mine"):
        fn(*qkv)
    with use_backend("broken"), pytest.warns(RuntimeWarning):
        assert fn(*qkv) == ("torch", 1.0)


def test_op_that_writes_in_place_is_never_run_twice(qkv):
    fn, operation = make_toy(inplace=True)
    register(operation, failing(error=ValueError("half written"))[0])
    with pytest.raises(ValueError, match="half written"):
        fn(*qkv)


def test_several_ranks_do_not_diverge(toy, qkv, monkeypatch):
    fn, operation = toy
    register(operation, failing(error=ValueError("mine"))[0])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *a: 2)
    with pytest.raises(ValueError, match="mine"):
        fn(*qkv)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *a: 1)
    with pytest.warns(RuntimeWarning):
        fn(*qkv)


def test_failure_in_a_backward_pass_propagates(toy, qkv):
    fn, operation = toy
    register(operation, failing(error=ValueError("in backward"))[0])

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            assert devices.in_backward()
            fn(*qkv)
            return g

    y = Calls.apply(torch.zeros(1, requires_grad=True))
    with pytest.raises(ValueError, match="in backward"):
        y.sum().backward()
    assert not devices.in_backward()
