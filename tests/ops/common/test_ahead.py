# SPDX-License-Identifier: MIT
"""Kernels of a call on meta tensors are compiled in threads, and the launch waits for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fla.ops._common.ahead import ahead, standing_for
from fla.ops._common.launch import Launcher
from fla.ops._common.policy import CHIPS, chip_of


class Jit:
    """A jit function that counts compilations; a launch finds what was compiled before."""

    __name__ = "kernel"
    params = ()

    def __init__(self, fails: bool = False) -> None:
        self.compiled: list[tuple] = []
        self.launched = 0
        self.fails = fails

    def warmup(self, *args, grid, **kw):
        if self.fails:
            raise RuntimeError("no")
        self.compiled.append((threading.current_thread().name, tuple(a.dtype for a in args), kw))
        return SimpleNamespace()

    def __getitem__(self, grid):
        def launch(*args, **kw) -> None:
            self.launched += 1

        return launch


def test_meta_tensors_compile_and_launch_nothing() -> None:
    fn = Jit()
    run = Launcher(fn).fix({"K": 4}, {"num_warps": 1})
    x = torch.empty(4, device="meta")
    with ahead(torch.device("cpu")):
        assert standing_for() == torch.device("cpu")
        assert chip_of(x.device) == CHIPS["interpreter"]
        run(3, (x,), (x,))
        run(5, (x,), (x,))
    assert standing_for() is None
    y = torch.empty(4)
    run(3, (y,), (y,))
    assert fn.launched == 1
    assert len(fn.compiled) == 1
    name, dtypes, kw = fn.compiled[0]
    assert name.startswith("fla-compile")
    assert dtypes == (torch.float32,)
    assert kw == {"K": 4, "num_warps": 1}


def test_what_goes_wrong_ahead_is_left_to_the_launch() -> None:
    fn = Jit(fails=True)
    run = Launcher(fn).fix({}, {})
    with ahead(torch.device("cpu")):
        x = torch.empty(4, device="meta")
        run(1, (x,), (x,))
    y = torch.empty(4)
    run(1, (y,), (y,))
    assert fn.launched == 1
