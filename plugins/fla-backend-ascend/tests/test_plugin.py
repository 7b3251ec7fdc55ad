# SPDX-License-Identifier: MIT
"""What the backend takes and refuses, its switches, and that importing it changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from fla_backend_ascend import plugin

from fla import settings
from fla.backends import BackendRegistry, devices, last_decision, register
from fla.ops.simple_gla import chunk_simple_gla

SRC = Path(__file__).parents[1] / "src"


def test_importing_the_plugin_imports_neither_torch_nor_torch_npu():
    code = "import sys, fla_backend_ascend.plugin; assert not {'torch', 'torch_npu', 'triton'} & set(sys.modules)"
    env = {"PYTHONPATH": f"{SRC}:{Path(__file__).parents[3]}", "PATH": "/usr/bin"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(devices, "has_module", lambda name: False)
    assert plugin.Ascend.unavailable_reason().startswith("module torch_npu is not installed")
    monkeypatch.setattr(devices, "has_module", lambda name: name == "torch_npu")
    assert plugin.Ascend.unavailable_reason().startswith("module triton is not installed")
    monkeypatch.setattr(devices, "has_module", lambda name: True)
    assert plugin.Ascend.unavailable_reason() == "there is no NPU"
    monkeypatch.setattr(devices, "accelerators", lambda: ("npu",))
    assert plugin.Ascend.is_available()


@pytest.mark.parametrize("operation", plugin.COVERED)
def test_it_has_the_functions_of_the_ops_with_their_parameters(operation):
    import inspect

    backend = plugin.Ascend(operation)
    for function in plugin.COVERED[operation]:
        op = plugin._op(operation, function)
        assert inspect.signature(getattr(backend, function)) == op.signature
        assert callable(plugin.core_path(op))
    assert not hasattr(backend, "chunk_something")


def arguments(T=64, H=2, K=64, V=64, **changes):
    x = {"q": torch.empty(1, T, H, K, device="meta"), "v": torch.empty(1, T, H, V, device="meta")}
    return {**x, **changes}


def test_it_takes_calls_and_says_why_not():
    assert plugin.accepts(arguments()) == (True, None)
    assert plugin.accepts(arguments(T=0))[1] == "there is nothing to launch for axes of no length"
    assert "up to 256, got 512" in plugin.accepts(arguments(K=512))[1]
    assert "65535 programs" in plugin.accepts(arguments(T=1 << 22))[1]
    assert "ssm_state_indices is given" in plugin.accepts(arguments(ssm_state_indices=torch.zeros(1)))[1]


def test_what_the_kernels_of_core_do_not_cover_is_refused():
    """With gradients a decay per channel of values has no kernel, so PyTorch has to run it."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    verify = plugin.Ascend("gated_delta_rule").fused_recurrent_gated_delta_rule_verifier
    x = torch.empty(1, 8, 2, 16)
    call = {"q": x, "k": x, "v": x, "gv": x}
    assert fused_recurrent_gated_delta_rule.op.signature.bind(**call)
    assert verify(**call) == (True, None)
    answer = verify(**{**call, "gv": torch.empty(1, 8, 2, 16, requires_grad=True)})
    assert answer == (False, "the Triton backward takes a scalar decay and one beta per head")


def test_wide_keys_in_float32_do_not_fit():
    verify = plugin.Ascend("kda").chunk_kda_verifier
    x = torch.empty(1, 8, 2, 256)
    assert verify(x, x, x, x, x[..., 0]) == (False, "K may be up to 128 in float32 (unified buffer), got 256")
    # What float16 does not hold is done in float32.
    halves = (t.half() for t in (x, x, x, x, x[..., 0]))
    assert verify(*halves) == (False, "K may be up to 128 in float16 (unified buffer), got 256")
    assert verify(*(t.bfloat16() for t in (x, x, x, x, x[..., 0]))) == (True, None)


def test_large_batches_of_single_tokens_stay_within_one_launch():
    """Decoding launches a program for few columns of V: 4 at the least."""
    from fla_backend_ascend import heads

    for N, V in ((1024, 128), (2048, 64)):
        size = heads.at_once(N, N, 128, V, 1)
        assert size * N * V // 4 <= 65535
        assert size > 0


@pytest.fixture
def here(monkeypatch):
    """The backend for CPU tensors, with nothing run."""

    class OnTheCPU(plugin.Ascend):
        capability = dataclasses.replace(plugin.Ascend.capability, device_types=("cpu",))

        @classmethod
        def unavailable_reason(cls):
            return None

        def probe(self):
            return True

    made = OnTheCPU("simple_gla")
    made.chunk_simple_gla = _marked()
    register("simple_gla", made)
    yield
    BackendRegistry("simple_gla").unregister(made)
    settings.reset()


def _marked():
    def run(*values, **named):
        return torch.full_like(values[2], 7.0), None

    run.__signature__ = chunk_simple_gla.op.signature
    return run


def test_it_comes_first_and_can_be_switched_off(here, monkeypatch):
    x = torch.randn(1, 8, 1, 16)
    with torch.no_grad():
        o, _ = chunk_simple_gla(x, x, x, torch.zeros(1, 8, 1))
        assert last_decision().backend == "triton_ascend"
        assert (o == 7).all()
        monkeypatch.setenv("FLA_ASCEND", "0")
        chunk_simple_gla(x, x, x, torch.zeros(1, 8, 1))
        assert last_decision().backend == "torch"


@pytest.mark.parametrize("pinned", [False, True])
def test_without_the_backend_an_npu_is_left_to_pytorch(monkeypatch, pinned):
    """Core's own launches are not cut to 65,535 programs, so core's Triton path stays away, driver or not."""
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: True)
    facts = types.SimpleNamespace(device=types.SimpleNamespace(type="npu"))
    for operation, functions in plugin.COVERED.items():
        for function in functions:
            path = plugin._op(operation, function).triton_path
            assert path.refuses(facts)
            refusal = path.refusal(facts, pinned=pinned)
            assert refusal.code == "unavailable"
            assert "on npu Triton needs fla-backend-ascend, which cuts launches" in str(refusal)


def test_calls_run_on_the_device_of_their_tensors_without_autocast(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def note(*what, **options):
        entered.append((*what, *options.values()))
        yield

    q = types.SimpleNamespace(device=types.SimpleNamespace(type="npu", index=1))
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(device=note), raising=False)
    monkeypatch.setattr(torch, "autocast", note)
    with plugin.surroundings(q):
        assert entered == [(q.device,), ("npu", False)]
    with plugin.surroundings(torch.empty(0)):
        assert len(entered) == 2


def test_on_an_npu_launches_go_through_triton_itself(monkeypatch):
    from fla.ops._common import policy
    from fla.ops._common.launch import Launcher

    monkeypatch.setattr(Launcher, "remember", True)
    monkeypatch.setattr(policy, "_described", {})
    plugin._describe()
    assert Launcher.remember
    monkeypatch.setattr(devices, "accelerators", lambda: ("npu",))
    plugin._describe()
    assert not Launcher.remember
    assert set(policy._described) == {"npu"}


def test_the_probe_wants_a_driver_and_no_capture(monkeypatch):
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: False)
    assert plugin.Ascend("kda").probe() == (False, "triton has no driver for NPUs; pip install triton-ascend")
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: True)
    npu = types.SimpleNamespace(is_current_stream_capturing=lambda: True)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert "under capture of a graph" in plugin.Ascend("kda").probe()[1]


@pytest.mark.parametrize("operation", plugin.COVERED)
def test_the_probe_asks_every_function_and_stops_at_what_is_wrong(monkeypatch, operation):
    from fla_backend_ascend import proof

    asked = []
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: True)
    monkeypatch.setattr(torch, "npu", types.SimpleNamespace(current_device=lambda: 0), raising=False)
    monkeypatch.setattr(torch, "device", lambda *what: what)
    monkeypatch.setattr(proof, "proof", lambda op, run, device: asked.append((op.fn.__name__, device)) or (True, None))
    assert plugin.Ascend(operation).probe() == (True, None)
    assert asked == [(name, ("npu", 0)) for name in plugin.COVERED[operation]]
    monkeypatch.setattr(proof, "proof", lambda *call: (False, "wrong"))
    assert plugin.Ascend(operation).probe() == (False, "wrong")
