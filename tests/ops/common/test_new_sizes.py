# SPDX-License-Identifier: MIT
"""A new length, batch or number of heads in a size class launches what was launched before: nothing is compiled."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fla.backends import use_backend
from fla.ops._common.launch import Fixed

OPS = {
    "simple_gla": "qkvg",
    "retention": "qkv",
    "gla": "qkvG",
    "rwkv6": "rkvwu",
    "gated_delta_rule": "qkvgb",
    "delta_rule": "qkvb",
    "comba": "qkvpgb",
    "kda": "qkvGb",
}
NAMES = {"G": "g", "b": "beta"}


@pytest.fixture
def launched(monkeypatch):
    """Configurations that are launched; nothing runs."""
    found: set = set()

    def launch(self, grid, args, given):
        if grid > 0:
            kinds = tuple(x if x is None else x.dtype for x in given)
            found.add((self.fn.__name__, tuple(self.meta.items()), tuple(self.options.items()), kinds))

    monkeypatch.setattr(Fixed, "__call__", launch)
    return found


def step(op: str, B: int, T: int, H: int) -> None:
    wide, per_head = torch.randn(B, T, H, 32), torch.randn(B, T, H)
    x = {}
    for n in OPS[op]:
        x[NAMES.get(n, n)] = (
            torch.randn(H, 32)
            if n == "u"
            else F.logsigmoid(wide)
            if n in "Gw"
            else F.logsigmoid(per_head)
            if n == "g"
            else per_head.sigmoid()
            if n == "b"
            else wide.clone()
        ).requires_grad_()
    fn = getattr(importlib.import_module(f"fla.ops.{op}"), f"chunk_{op}")
    with use_backend("triton", strict=True):
        o = fn(**x)[0]
        torch.autograd.grad(o, list(x.values()), torch.ones_like(o), allow_unused=True)


@pytest.mark.parametrize("op", OPS)
def test_sizes_of_one_class_share_their_kernels(op, launched):
    step(op, 1, 128, 1)
    first = set(launched)
    assert first
    for B, T, H in ((1, 128, 2), (1, 128, 3), (1, 128, 5), (1, 128, 16), (1, 256, 1), (2, 128, 1), (3, 192, 4)):
        launched.clear()
        step(op, B, T, H)
        assert launched == first, (B, T, H)
