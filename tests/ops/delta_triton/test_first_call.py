# SPDX-License-Identifier: MIT
"""What is compiled ahead of the first call is what the call launches, kernel for kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fla.backends import use_backend
from fla.ops._common import tape
from fla.ops._common.ahead import ahead
from fla.ops._common.launch import Fixed
from fla.ops._delta import autograd, vector_autograd
from fla.ops.comba import chunk_comba
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gdn2 import chunk_gdn2
from fla.ops.kda import chunk_kda

CALLS = {
    "delta": (chunk_delta_rule, "q k v beta", {}),
    "gdn": (chunk_gated_delta_rule, "q k v g beta", {}),
    "comba": (chunk_comba, "q k v p g beta", {}),
    "kda": (chunk_kda, "q k v gk beta", {"safe_gate": True}),
    "kda exact": (chunk_kda, "q k v gk beta", {}),
    "kda kept": (chunk_kda, "q k v gk beta", {"disable_recompute": True}),
    "gdn2": (chunk_gdn2, "q k v gk b w", {}),
}
CASES = [(name, kind) for name in CALLS for kind in ("dense", "ragged", "packed", "states")]
CASES += [(name, "grouped") for name in ("gdn", "kda", "kda exact", "gdn2")]


def inputs(names: str, T: int, HV: int = 2, D: int = 32) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    rn = lambda *s: torch.randn(*s, generator=gen)
    x = {n: rn(1, T, 2, D) for n in "qkp"} | {n: rn(1, T, HV, D) for n in ("v", "gk", "b", "w")}
    x |= {n: rn(1, T, HV) for n in ("g", "beta")}
    return [x[n] for n in names.split()]


@pytest.fixture
def launched(monkeypatch):
    """Configurations that are launched, ahead and then; nothing runs."""
    found: dict[bool, set] = {True: set(), False: set()}

    def launch(self, grid, args, given):
        if grid > 0:
            kinds = tuple(x if x is None else x.dtype for x in given)
            found[args[0].is_meta].add((self.fn.__name__, tuple(self.meta.items()), tuple(self.options.items()), kinds))

    def first_call(known, key, more, inputs, step):
        more()
        with ahead(inputs[0].device), torch.no_grad():
            step(*(None if x is None else torch.empty_like(x, device="meta") for x in inputs))

    monkeypatch.setattr(Fixed, "__call__", launch)
    monkeypatch.setattr(autograd, "first_call", first_call)
    monkeypatch.setattr(vector_autograd, "first_call", first_call)
    for module in (autograd, __import__("fla.ops._delta.vector_entry", fromlist=["_calls"])):
        monkeypatch.setattr(module, "_calls", tape.KnownCalls())
    return found


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_everything_that_is_launched_was_compiled_ahead(name, kind, train, launched):
    op, names, flags = CALLS[name]
    x = inputs(names, 70 if kind in ("ragged", "packed") else 128, 4 if kind == "grouped" else 2)
    if kind == "packed":
        flags = {**flags, "cu_seqlens": torch.tensor([0, 30, 70])}
    if kind == "states":
        flags = {**flags, "initial_state": torch.zeros(1, 2, 32, 32), "output_final_state": True}
    with use_backend("triton", strict=True), torch.set_grad_enabled(train):
        o = op(*(t.requires_grad_(train) for t in x), use_qk_l2norm_in_kernel=True, **flags)[0]
        if train:
            torch.autograd.grad(o, x, torch.ones_like(o), allow_unused=True)
    assert launched[False]
    # A launch of tails, or one without them, may have been compiled for nothing.
    assert launched[False] <= launched[True]
    assert len(launched[True] - launched[False]) <= 1
