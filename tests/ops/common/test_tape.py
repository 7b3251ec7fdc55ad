# SPDX-License-Identifier: MIT
"""A body that is written out does what it did when it was watched, with the buffers of each call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fla.ops._common import tape
from fla.ops._common.bound import Matrix, bind
from fla.ops._common.tape import taped


class PyCUtensorMap:
    def __init__(self, base, shape) -> None:
        self.what = (base, tuple(shape))


def make_tensordesc_arg(arg, meta):
    return [PyCUtensorMap(arg.base.data_ptr(), arg.shape), *arg.shape, *arg.strides]


def _wrap(launcher, signature, tensordesc_meta):
    def inner(*args):
        final = list(args[:10])
        for i, a in enumerate(args[10:]):
            final += make_tensordesc_arg(a, tensordesc_meta[0]) if i in signature else [a]
        return launcher(final)

    return inner


class Launcher:
    def __init__(self, sink, indices) -> None:
        self.launch = _wrap(sink.append, indices, [None] * len(indices))

    def __call__(self, gx, gy, gz, stream, function, *args) -> None:
        self.launch(gx, gy, gz, stream, function, True, *args)


class Engine:
    """A body of two launches with a table of its own, and what they hand to the driver."""

    def __init__(self, known: bool = True) -> None:
        self.sink: list = []
        self.table = torch.arange(4)
        self.runs = 0
        self.heard = False
        self.known = known
        self.gos: dict = {}

    def _launch(self, grid, args) -> None:
        indices = {i for i, a in enumerate(args) if type(a) is Matrix}
        key = (len(args), tuple(indices))
        if key not in self.gos:
            kernel = SimpleNamespace(run=Launcher(self.sink, indices), function=7, packed_metadata=(4,))
            self.gos[key] = bind(kernel, args, ("meta",))
        go = self.gos[key]
        if tape.recording is not None:
            tape.note_launch(grid, args, (None, go, lambda: self.heard, lambda d: 99) if self.known else None)
        go(grid, 99, args)

    def body(self, x, y, scale):
        self.runs += 1
        t = torch.empty(3, 16, dtype=torch.float32)
        part = x.new_zeros(2, 3)
        self._launch(5, (x, Matrix((t, 3, 16, 1, 16)), None, self.table, scale))
        self._launch(6, (t, part))
        return part.sum(0), None, t, x


def _without_buffers(calls, named):
    """What was handed over, with names for the addresses that are known."""
    at = {t.data_ptr(): n for n, t in named.items()}

    def name(e):
        if isinstance(e, PyCUtensorMap):
            return ("map", at.get(e.what[0], e.what[0]), e.what[1])
        if isinstance(e, torch.Tensor):
            return at.get(e.data_ptr(), e.data_ptr())
        return at.get(e, e) if isinstance(e, int) and e > 1000 else e

    return [[name(e) for e in call] for call in calls]


def test_a_written_out_body_hands_the_same_to_the_driver() -> None:
    engine, tapes = Engine(), {}
    seen = []
    for _ in range(5):
        x = torch.randn(2, 3)
        engine.sink.clear()
        total, none, t, back = taped(tapes, "forward", engine.body, (x, None), 0.5)
        assert none is None
        assert back is x
        assert t.shape == (3, 16)
        assert torch.equal(total, torch.zeros(3))
        calls = _without_buffers(engine.sink, {"x": x, "t": t, "table": engine.table})
        calls[1].pop(-2)  # the address of the zeros, which nobody keeps
        seen.append(calls)
    assert engine.runs == 2, "the first compiles, the second is watched"
    assert all(calls == seen[0] for calls in seen)
    assert len(seen[0]) == 2


def test_other_types_and_missing_inputs_are_written_out_apart() -> None:
    engine, tapes = Engine(), {}
    for dtype in (torch.float32, torch.bfloat16):
        for y in (None, torch.ones(1)):
            for _ in range(3):
                taped(tapes, "forward", engine.body, (torch.ones(2, 3, dtype=dtype), y), 0.5)
    assert engine.runs == 8


def test_a_profiler_gets_the_body() -> None:
    engine, tapes = Engine(), {}
    x = torch.randn(2, 3)
    for _ in range(3):
        taped(tapes, "forward", engine.body, (x, None), 0.5)
    engine.heard = True
    runs = engine.runs
    taped(tapes, "forward", engine.body, (x, None), 0.5)
    assert engine.runs == runs + 1


def test_a_launch_that_is_not_understood_leaves_the_body_alone() -> None:
    engine, tapes = Engine(known=False), {}
    for _ in range(8):
        taped(tapes, "forward", engine.body, (torch.randn(2, 3), None), 0.5)
    assert engine.runs == 8
    assert tape.recording is None


def test_misaligned_inputs_run_the_body() -> None:
    engine, tapes = Engine(), {}
    for _ in range(4):
        taped(tapes, "forward", engine.body, (torch.randn(7)[1:].view(2, 3), None), 0.5)
    assert engine.runs == 4
