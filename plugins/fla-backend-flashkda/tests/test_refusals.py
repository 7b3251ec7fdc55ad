# SPDX-License-Identifier: MIT
"""What the plugin says to every kind of call, asked on meta tensors: nothing is computed and no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from fla.backends import explain, use_backend
from fla.ops.kda import chunk_kda


def verdict(arguments):
    with torch.no_grad():
        return explain(chunk_kda, **arguments).verdict("flash_kda")


ACCEPTED = {
    "plain": {},
    "without dt_bias": {"dt_bias": None},
    "without A_log": {"A_log": None},
    "dt_bias by heads": {"dt_bias": torch.empty(2, 128, device="meta")},
    "without safe_gate": {"safe_gate": False},
    "a weaker bound": {"lower_bound": -0.5},
    "packed, int32": {"cu_seqlens": torch.empty(3, dtype=torch.int32, device="meta")},
    "packed, int64": {"cu_seqlens": torch.empty(3, dtype=torch.int64, device="meta")},
    "states, key first": {"initial_state": torch.empty(1, 2, 128, 128, device="meta"), "output_final_state": True},
    "states, value first": {
        "initial_state": torch.empty(1, 2, 128, 128, device="meta"),
        "output_final_state": True,
        "state_v_first": True,
    },
    "hints that change no result": {"disable_recompute": True, "chunk_size": 32, "max_num_seqs": 4},
}

REFUSED = {
    "K": ({"K": 64, "V": 64}, "head dimensions (K, V) are (64, 64), supported: (128, 128)"),
    "V": ({"V": 64}, "head dimensions (K, V) are (128, 64), supported: (128, 128)"),
    "GVA": ({"H": 2, "HV": 4}, "more value heads than key heads (GVA) is not supported"),
    "float16": ({"dtype": torch.float16}, "q is float16, supported: bfloat16"),
    "gate outside": (
        {"use_gate_in_kernel": False},
        "use_gate_in_kernel must be True: the kernel takes the raw gate",
    ),
    "norm outside": (
        {"use_qk_l2norm_in_kernel": False},
        "use_qk_l2norm_in_kernel must be True: the kernel normalises q and k",
    ),
    "sigmoid outside": (
        {"use_beta_sigmoid_in_kernel": False},
        "use_beta_sigmoid_in_kernel must be True: the kernel takes beta before the sigmoid",
    ),
    "unbounded gate": ({"lower_bound": None}, "lower_bound must be in [-5, 0), got None"),
    "bound too low": ({"lower_bound": -8.0}, "lower_bound must be in [-5, 0), got -8.0"),
    "bound zero": ({"lower_bound": 0.0}, "lower_bound must be in [-5, 0), got 0.0"),
    "negative eigenvalues": (
        {"allow_neg_eigval": True},
        "allow_neg_eigval=True: the kernel does not double the sigmoid of beta",
    ),
    "intermediate states": (
        {"return_intermediate_states": True},
        "return_intermediate_states=True: the kernel keeps the states before chunks to itself",
    ),
    "graph mode": ({"use_graph": True}, "use_graph=True: the kernel wants cu_seqlens that cover all tokens"),
    "context parallelism": (
        {"cp_context": object()},
        "cp_context is given: the kernel knows no context parallelism",
    ),
    "wide gate": (
        {"g": torch.empty(1, 64, 2, 128, device="meta")},
        "g is float32, the kernel takes bfloat16: rounding it would change the result",
    ),
    "wide beta": (
        {"beta": torch.empty(1, 64, 2, dtype=torch.float16, device="meta")},
        "beta is float16, the kernel takes bfloat16: rounding it would change the result",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_it_accepts(hopper, name, call):
    found = verdict(call(**ACCEPTED[name]))
    assert found.accepted, found
    assert found.reason == "its probe has not run"


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why_not(hopper, name, call):
    changes, reason = REFUSED[name]
    found = verdict(call(**changes))
    assert (found.code, found.reason) == ("unsupported", reason)


def test_a_gradient_is_refused_wherever_it_is_needed(hopper, call):
    for name in ("q", "g", "A_log", "dt_bias"):
        arguments = call()
        arguments[name].requires_grad_()
        found = explain(chunk_kda, **arguments).verdict("flash_kda")
        assert (found.code, found.reason) == ("unsupported", "a gradient is needed and only the forward is supported")
        with torch.no_grad():
            assert explain(chunk_kda, **arguments).verdict("flash_kda").accepted


def test_frozen_weights_need_no_no_grad(hopper, call):
    assert torch.is_grad_enabled()
    assert explain(chunk_kda, **call()).chosen == "flash_kda"


def test_an_older_card_is_refused(hopper, monkeypatch, call):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    found = verdict(call())
    assert (found.code, found.reason) == ("unsupported", "compute capability is 8.0, needed: 9.0")


def test_the_cpu_is_refused(backend, stub, call):
    arguments = {n: x.new_zeros(x.shape, device="cpu") if hasattr(x, "shape") else x for n, x in call().items()}
    found = verdict(arguments)
    assert (found.code, found.reason) == ("unsupported", "device is cpu, supported: cuda")


def test_without_the_wheel_it_says_where_there_is_one(backend, monkeypatch, call):
    import sys

    from fla.backends import switches

    monkeypatch.delitem(sys.modules, "flash_kda", raising=False)
    monkeypatch.setattr("fla.backends.devices.has_module", lambda name: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    switches.forget()
    found = verdict(call())
    assert found.code == "unavailable"
    assert found.reason.startswith("module flash_kda is not installed")
    assert "tokenspeed-flashkda" in found.reason


def test_every_refusal_under_a_strict_pin_is_said(hopper, call):
    with torch.no_grad(), use_backend("flash_kda", strict=True):
        assert explain(chunk_kda, **call()).chosen == "flash_kda"
        refused = explain(chunk_kda, **call(use_graph=True))
    assert refused.chosen is None
    assert refused.verdict("flash_kda").reason.startswith("use_graph=True")


@pytest.mark.parametrize("value", ["0", "false", "off", "no"])
def test_its_variable_turns_it_off(hopper, monkeypatch, value, call):
    monkeypatch.setenv("FLA_FLASH_KDA", value)
    found = verdict(call())
    assert found.code == "disabled"
    assert "FLA_FLASH_KDA is off" in found.reason
