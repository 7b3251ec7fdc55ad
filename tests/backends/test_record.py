# SPDX-License-Identifier: MIT
"""Seeing what runs: decisions, traces, log lines, explanations, the report."""

from __future__ import annotations

import copy
import json
import logging
import threading

import pytest
import torch

from fla.backends import (
    BaseBackend,
    Capability,
    Rejection,
    explain,
    last_decision,
    list_backends,
    reference_only,
    register,
    report,
    trace,
    use_backend,
)

from .conftest import make_toy


def backend(name, **attributes):
    def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        return name

    return type(name, (BaseBackend,), {"backend_type": name, "toy": toy, **attributes})()


def test_last_decision_names_what_ran_and_every_rejection(toy, qkv):
    fn, operation = toy
    register(operation, backend("off", priority=0, default_enable=False))
    register(operation, backend("cuda_only", priority=1, capability=Capability(device_types=("cuda",))))
    register(operation, backend("says_no", priority=2, toy_verifier=lambda self, *a: (False, "not today")))
    register(operation, backend("yes", priority=3))
    assert fn(*qkv) == "yes"
    decision = last_decision()
    assert str(decision) == f"{operation}.toy -> yes"
    assert not decision.core
    assert [(v.backend, v.code) for v in decision.rejections] == [
        ("off", "disabled"),
        ("cuda_only", "unsupported"),
        ("says_no", "unsupported"),
    ]
    assert last_decision() is decision


def test_last_decision_is_the_threads_own(toy, qkv):
    fn, _ = toy
    fn(*qkv)
    found = []
    thread = threading.Thread(target=lambda: found.append(last_decision()))
    thread.start()
    thread.join()
    assert found == [None]


def test_trace_records_nested_calls_with_depth_and_outer_traces_too(toy, qkv):
    inner, inner_operation = make_toy()
    fn, operation = toy
    register(operation, backend("outer", toy=lambda self, q, k, v: inner(q, k, v)))
    with trace() as whole:
        fn(*qkv)
        with trace() as part:
            inner(*qkv)
    fn(*qkv)
    assert [(c.operation, c.backend, c.depth) for c in whole] == [
        (operation, "outer", 0),
        (inner_operation, "torch", 1),
        (inner_operation, "torch", 0),
    ]
    assert len(part) == 1
    assert whole.ran("outer") == 1
    assert whole.ran("torch", "toy") == 2
    assert whole.counts()[inner_operation, "toy", "torch"] == 2
    assert last_decision().operation == operation
    json.dumps(whole.to_dict())


def test_trace_keeps_calls_that_raise(qkv):
    fn, _ = make_toy()
    with trace() as calls, use_backend("nobody", strict=True), pytest.raises(RuntimeError):
        fn(*qkv)
    assert calls.calls[0].backend is None
    assert "BackendUnavailable" in calls.calls[0].error
    with trace() as calls:
        fn(*qkv)
    assert calls.calls[0].depth == 0


def test_trace_is_the_threads_own(toy, qkv):
    fn, _ = toy
    with trace() as calls:
        thread = threading.Thread(target=lambda: fn(*qkv))
        thread.start()
        thread.join()
    assert len(calls) == 0


def test_log_lines_come_once_per_distinct_reason(toy, qkv, caplog):
    fn, operation = toy
    reasons = iter(["too long", "too long", "too wide", "too long", None, None])

    def verifier(self, *args):
        reason = next(reasons)
        return reason is None, reason

    register(operation, backend("mine", toy_verifier=verifier))
    with caplog.at_level(logging.INFO, logger="fla.backends"):
        for _ in range(6):
            fn(*qkv)
    assert [record.getMessage() for record in caplog.records] == [
        f"[FLA Backend] {operation}.toy -> mine rejected: too long",
        f"[FLA Backend] {operation}.toy -> mine rejected: too wide",
        f"[FLA Backend] {operation}.toy -> mine",
    ]


def test_reasons_with_numbers_in_them_do_not_fill_the_memory(toy, qkv):
    fn, operation = toy
    numbers = iter(range(100_000))
    register(operation, backend("chatty", toy_verifier=lambda self, *a: (False, f"T is {next(numbers)}")))
    for _ in range(1000):
        fn(*qkv)
    assert len(fn.op.plan.active[0].answers) <= 256


def test_explain_gives_every_candidates_verdict_and_runs_nothing(toy, qkv):
    fn, operation = toy
    ran = lambda self, *a, **k: pytest.fail("executed")
    register(operation, backend("absent", package_name="no_such_module_at_all", toy=lambda self, q, k, v: ran(self)))
    register(
        operation, backend("cuda", capability=Capability(device_types=("cuda",)), toy=lambda self, q, k, v: ran(self))
    )
    register(operation, backend("no", toy_verifier=lambda self, *a: (False, Rejection("slower", "measured on H200"))))
    register(operation, backend("zz_yes", probe=ran, toy=lambda self, q, k, v: ran(self)))
    found = explain(fn, *qkv)
    assert found.chosen == "zz_yes"
    assert {v.backend: v.code for v in found.verdicts} == {
        "absent": "unavailable",
        "cuda": "unsupported",
        "no": "slower",
        "zz_yes": "accepted",
        "triton": "unsupported",
        "torch": "accepted",
    }
    assert found.verdict("zz_yes").reason == "its probe has not run"
    assert found.compiled_training == "torch"
    text = str(found)
    assert f"{operation}.toy -> zz_yes" in text
    assert "no: slower (measured on H200)" in text
    json.dumps(found.to_dict())
    assert last_decision() is None
    with reference_only():
        assert explain(fn, *qkv).chosen == "torch"


def test_explain_works_on_meta_tensors(toy):
    fn, operation = toy
    register(operation, backend("mine", capability=Capability(dtypes=("bfloat16",), head_dims=((128, 128),))))
    q = torch.empty(1, 1 << 20, 64, 128, device="meta", dtype=torch.bfloat16)
    assert explain(fn, q, q, v=q).chosen == "mine"
    assert explain(fn, q.float(), q, q).verdict("mine").reason == "q is float32, supported: bfloat16"
    assert explain(fn, q, q, q).facts.device.type in ("cpu", "cuda", "xpu", "npu")


def test_explain_works_on_fake_tensors_of_a_device_that_is_not_here(toy):
    from torch._subclasses.fake_tensor import FakeTensorMode

    fn, operation = toy
    register(operation, backend("mine", capability=Capability(device_types=("cuda",), compute_capability=(9, 0))))
    register(operation, backend("other", capability=Capability(device_types=("cuda",), dtypes=("float16",))))
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(1, 4, 2, 8, device="cuda", dtype=torch.float16)
    found = explain(fn, q, q, q)
    assert found.facts.device.type == "cuda"
    assert found.verdict("other").accepted
    assert found.verdict("mine").accepted or "compute capability" in found.verdict("mine").reason


def test_explain_says_which_backend_trains_under_compile(toy, qkv):
    fn, operation = toy
    register(
        operation,
        backend("trains", priority=9, toy_fwd=lambda self, q, k, v: None, toy_bwd=lambda self, *a: None),
    )
    register(operation, backend("first"))
    found = explain(fn, *qkv)
    assert (found.chosen, found.compiled_training) == ("first", "trains")


def test_explain_wants_a_dispatched_function_and_arguments_that_fit(toy, qkv):
    with pytest.raises(TypeError, match="not a dispatched function"):
        explain(len, [])
    with pytest.raises(TypeError, match="bogus"):
        explain(toy[0], *qkv, bogus=1)


def test_report_is_json_and_counts_calls(toy, qkv):
    fn, operation = toy
    register(
        operation, backend("mine", env_var="FLA_MINE", toy_verifier=lambda self, q, k, v, scale: (scale == 1, "x"))
    )
    fn(*qkv)
    fn(*qkv)
    fn(*qkv, 2.0)
    found = json.loads(json.dumps(report()))
    assert {"operation": operation, "function": "toy", "calls": {"torch": 1, "mine": 2}} in found["calls"]
    row = next(row for row in found["backends"] if row["operation"] == operation)
    assert row["backend"] == "mine"
    assert row["functions"] == ["toy"]
    assert row["usable"]
    assert {row["name"] for row in found["settings"]} >= {"FLA_PLUGINS", "FLA_MINE"}
    assert list_backends(operation)[0]["env_var"] == "FLA_MINE"
    assert copy.deepcopy(found) == found


def test_core_calls_are_counted_without_backends(toy, qkv):
    fn, operation = toy
    for _ in range(3):
        fn(*qkv)
    assert {"operation": operation, "function": "toy", "calls": {"torch": 3}} in report()["calls"]
