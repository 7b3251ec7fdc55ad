# SPDX-License-Identifier: MIT
"""The plugin from this folder, installed or not, and a stub in the place of the wheel."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

from fla import settings
from fla.backends import BackendRegistry, devices, register, switches

if importlib.util.find_spec("fla_backend_flashkda") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from fla_backend_flashkda.plugin import FlashKDA


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("FLA_FLASH_KDA", "FLA_PLUGINS", "FLA_DISABLE_BACKEND_DISPATCH", "FLA_BACKEND_STRICT"):
        monkeypatch.delenv(name, raising=False)
    yield
    settings.reset()


@pytest.fixture
def stub(monkeypatch):
    """`flash_kda` is the stub."""
    spec = importlib.util.spec_from_file_location("stub_flash_kda", Path(__file__).with_name("stub_flash_kda.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "flash_kda", module)
    return module


@pytest.fixture
def wheel(monkeypatch):
    """A call that puts `fwd` in the place of the wheel's."""

    def put(fwd):
        module = types.ModuleType("flash_kda")
        module.fwd = fwd
        monkeypatch.setitem(sys.modules, "flash_kda", module)

    return put


@pytest.fixture
def backend():
    """The backend, registered alone for its operation."""
    import fla.ops.kda  # noqa: F401  # the operation whose signatures it is compared with

    registry = BackendRegistry("kda")
    for installed in registry.backends:
        if installed.backend_type == "flash_kda":
            registry.unregister(installed)
    made = FlashKDA()
    register("kda", made)
    yield made
    registry.unregister(made)
    switches.forget()


@pytest.fixture
def hopper(monkeypatch, backend, stub):
    """A machine that says it has one sm90 card. Meta tensors stand for tensors on it; nothing can run there."""
    switches.forget()
    monkeypatch.setattr(devices, "accelerators", lambda: ("cuda",))
    monkeypatch.setattr(devices, "_has_device", lambda library, name: name == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: False)
    monkeypatch.setattr(torch.version, "hip", None)
    return backend


def accepted_call(B=1, T=64, H=2, HV=None, K=128, V=128, dtype=torch.bfloat16, **changes):
    """A call that FlashKDA takes, with changes."""
    HV = HV or H

    def meta(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    arguments = {
        "q": meta(B, T, H, K),
        "k": meta(B, T, H, K),
        "v": meta(B, T, HV, V),
        "g": meta(B, T, HV, K),
        "beta": meta(B, T, HV),
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": -5.0,
        "A_log": meta(HV, dtype=torch.float32),
        "dt_bias": meta(HV * K, dtype=torch.float32),
    }
    return {**arguments, **changes}


@pytest.fixture
def call():
    """A call that FlashKDA takes, on meta tensors: `call(T=1, lower_bound=-8.0)`."""
    return accepted_call
