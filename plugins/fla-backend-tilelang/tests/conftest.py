# SPDX-License-Identifier: MIT
"""The plugin from this folder, installed or not, and a machine that says it has a Hopper card. Nothing is built."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

from fla import settings
from fla.backends import BackendRegistry, devices, register, switches

# Before triton is imported by anything: core's chunk tables are a kernel.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("fla_backend_tilelang") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from fla_backend_tilelang import plugin


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("FLA_TILELANG", "FLA_PLUGINS", "FLA_DISABLE_BACKEND_DISPATCH", "FLA_BACKEND_STRICT"):
        monkeypatch.delenv(name, raising=False)
    yield
    settings.reset()


@pytest.fixture
def backends():
    """Both backends, registered alone for their operations."""
    import fla.ops.gated_delta_rule
    import fla.ops.kda  # noqa: F401  # the operations whose signatures they are compared with
    from fla.backends import report

    # Loads what is installed, so that it can be taken out and does not come later.
    report()
    made = []
    for operation, cls in (("gated_delta_rule", plugin.GatedDeltaRule), ("kda", plugin.KDA)):
        registry = BackendRegistry(operation)
        for installed in registry.backends:
            if installed.backend_type == "tilelang":
                registry.unregister(installed)
        made.append((registry, cls()))
        register(operation, made[-1][1])
    yield
    for registry, backend in made:
        registry.unregister(backend)
    switches.forget()


@pytest.fixture
def hopper(monkeypatch, backends):
    """An sm90 card with tilelang and nvcc. Meta tensors stand for tensors on it; nothing can run there."""
    switches.forget()
    monkeypatch.setattr(plugin.TileLang, "is_available", classmethod(lambda cls: True))
    monkeypatch.setattr(plugin.TileLang, "probe", lambda self: None)
    monkeypatch.setattr(devices, "accelerators", lambda: ("cuda",))
    monkeypatch.setattr(devices, "_has_device", lambda library, name: name == "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(devices, "has_triton_driver", lambda kind: False)
    monkeypatch.setattr(torch.version, "hip", None)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.fixture
def gdn():
    """A call of `chunk_gated_delta_rule` that is taken, with changes: `gdn(T=1, cp_context=object())`."""

    def call(B=1, T=64, H=2, HV=None, K=128, V=128, dtype=torch.bfloat16, **changes):
        HV = HV or H
        return {
            "q": meta(B, T, H, K, dtype=dtype),
            "k": meta(B, T, H, K, dtype=dtype),
            "v": meta(B, T, HV, V, dtype=dtype),
            "g": meta(B, T, HV, dtype=torch.float32),
            "beta": meta(B, T, HV, dtype=dtype),
            **changes,
        }

    return call


@pytest.fixture
def kda(gdn):
    """The same for `chunk_kda`."""

    def call(HV=None, H=2, K=128, T=64, dtype=torch.bfloat16, **changes):
        x = gdn(T=T, H=H, HV=HV, K=K, dtype=dtype)
        return {**x, "g": meta(1, T, HV or H, K, dtype=dtype), "safe_gate": True, **changes}

    return call
