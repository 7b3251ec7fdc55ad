# SPDX-License-Identifier: MIT
"""What the backends take and refuse, and why. Nothing is built or run."""

from __future__ import annotations

import pytest
import torch

from fla.backends import explain
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda


def meta(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def asked(op, call):
    with torch.no_grad():
        return explain(op, **call).verdict("tilelang")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"K": 64, "V": 128},
        {"dtype": torch.float16},
        {"HV": 6},
        {"cu_seqlens": torch.empty(3, dtype=torch.int64, device="meta")},
        {"initial_state": torch.empty(1, 2, 128, 128, device="meta"), "state_v_first": True},
        {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
        {"use_gate_in_kernel": True, "A_log": torch.empty(2, device="meta")},
    ],
    ids=str,
)
def test_the_gated_delta_rule_takes(hopper, gdn, changes):
    assert asked(chunk_gated_delta_rule, gdn(**changes)).code == "accepted"


@pytest.mark.parametrize("op", [chunk_gated_delta_rule, chunk_kda], ids=lambda op: op.__name__)
def test_float16_stays_with_the_triton_kernels_of_core_unless_pinned(hopper, gdn, kda, monkeypatch, op):
    monkeypatch.setattr("fla.backends.devices.has_triton_driver", lambda *_: True)
    make = {chunk_gated_delta_rule: gdn, chunk_kda: kda}[op]
    found = asked(op, make(dtype=torch.float16))
    assert (found.code, "more exact" in found.reason) == ("slower", True)
    assert asked(op, make()).code == "accepted"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"K": 256, "V": 256}, "head dimensions"),
        ({"dtype": torch.float32}, "supported: float16, bfloat16"),
        (
            {"dtype": torch.float16, "beta": torch.empty(1, 64, 2, dtype=torch.bfloat16, device="meta")},
            "beta is bfloat16",
        ),
    ],
    ids=str,
)
def test_the_gated_delta_rule_refuses(hopper, gdn, changes, reason):
    assert reason in asked(chunk_gated_delta_rule, gdn(**changes)).reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"T": 64 * 65536}, "65536 chunks of 64 tokens, supported: 65535"),
        ({"B": 65536, "T": 1}, "65536 chunks of 64 tokens, supported: 65535"),
        ({"T": 64, "cu_seqlens": torch.empty(65537 + 64, dtype=torch.int32, device="meta")}, "supported: 65535"),
        ({"T": 1 << 20, "H": 32}, "4294967296 elements, supported: less than 2^31"),
        ({"B": 4096, "T": 1, "H": 64}, "4294967296 elements, supported: less than 2^31"),
    ],
    ids=["long", "many", "packed", "large", "states"],
)
def test_what_a_launch_cannot_hold_is_refused(hopper, gdn, changes, reason):
    assert reason in asked(chunk_gated_delta_rule, gdn(**changes)).reason


def test_a_gradient_goes_to_core(hopper, gdn):
    call = gdn()
    call["v"].requires_grad_()
    assert "gradient" in explain(chunk_gated_delta_rule, **call).verdict("tilelang").reason


@pytest.mark.parametrize(
    "changes",
    [{}, {"HV": 4}, {"use_gate_in_kernel": True, "safe_gate": False, "lower_bound": -4.0}, {"K": 64}],
    ids=str,
)
def test_kda_takes(hopper, kda, changes):
    assert asked(chunk_kda, kda(**changes)).code == "accepted"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"safe_gate": False}, "safe_gate must be True"),
        (
            {
                "use_gate_in_kernel": True,
                "safe_gate": False,
                "lower_bound": -8.0,
                "A_log": torch.empty(2, device="meta"),
            },
            "lower_bound must be in [-5, 0), got -8",
        ),
        ({"return_intermediate_states": True, "disable_recompute": True}, "return_intermediate_states"),
        ({"T": 15}, "needs 16 tokens, got 15"),
    ],
    ids=str,
)
def test_kda_refuses(hopper, kda, changes, reason):
    assert reason in asked(chunk_kda, kda(**changes)).reason


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ((8, 0), "compute capability is 8.0, needed: 9.0"),
        ((10, 0), "compute capability is 10.0, supported: 9.0 alone"),
        ((12, 0), "compute capability is 12.0, supported: 9.0 alone"),
    ],
    ids=str,
)
def test_only_hopper_is_taken_and_core_has_the_rest(hopper, gdn, kda, monkeypatch, found, reason):
    from fla.backends import switches

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found)
    switches.forget()
    for op, call in ((chunk_gated_delta_rule, gdn()), (chunk_kda, kda())):
        answer = asked(op, call)
        assert answer.code != "accepted"
        assert answer.reason == reason
        with torch.no_grad():
            assert explain(op, **call).chosen in ("triton", "torch")


def test_without_nvcc_core_has_all(hopper, gdn, kda, monkeypatch):
    from fla_backend_tilelang import plugin

    from fla.backends import TileLangBackend, devices, switches

    monkeypatch.setattr(plugin.TileLang, "is_available", classmethod(TileLangBackend.is_available.__func__))
    monkeypatch.setattr(devices, "has_module", lambda name: True)
    monkeypatch.setattr(devices, "has_usable_nvcc", lambda: False)
    switches.forget()
    for op, call in ((chunk_gated_delta_rule, gdn()), (chunk_kda, kda())):
        answer = asked(op, call)
        assert answer.code == "unavailable"
        assert "no usable nvcc" in answer.reason
        with torch.no_grad():
            assert explain(op, **call).chosen in ("triton", "torch")


def test_where_core_was_faster_it_steps_back(hopper, gdn, kda, monkeypatch):
    from fla.backends import Measured, Rejection

    monkeypatch.setattr(Measured, "rejection", lambda *call: Rejection("slower", "core is faster"))
    for op, call in ((chunk_gated_delta_rule, gdn()), (chunk_kda, kda())):
        found = asked(op, call)
        assert (found.code, found.reason) == ("slower", "core is faster")
