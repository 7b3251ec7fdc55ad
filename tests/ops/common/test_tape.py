# SPDX-License-Identifier: MIT
"""A body that is written out does what it did when it was watched, with the buffers of each call."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from fla.ops._common import tape, written
from fla.ops._common.bound import Matrix, bind
from fla.ops._common.tape import KnownCalls, look, taped


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
        self.listening = lambda: self.heard
        self.gos: dict = {}

    def _launch(self, grid, args) -> None:
        indices = {i for i, a in enumerate(args) if type(a) is Matrix}
        key = (len(args), tuple(indices))
        if key not in self.gos:
            kernel = SimpleNamespace(run=Launcher(self.sink, indices), function=7, packed_metadata=(4,))
            self.gos[key] = bind(kernel, args, ("meta",))
        go = self.gos[key]
        if tape.recording is not None:
            tape.note_launch(grid, args, (None, go, self.listening, lambda d: 99) if self.known else None)
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


def test_one_tensor_given_twice_is_not_taken_for_one_later() -> None:
    engine, tapes = Engine(), {}
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    for _ in range(3):
        assert taped(tapes, "forward", engine.body, (x, x), 0.5)[3] is x
    for _ in range(4):
        assert taped(tapes, "forward", engine.body, (x, y), 0.5)[3] is x


def test_a_profiler_gets_the_body() -> None:
    engine, tapes = Engine(), {}
    x = torch.randn(2, 3)
    for _ in range(3):
        taped(tapes, "forward", engine.body, (x, None), 0.5)
    engine.heard = True
    runs = engine.runs
    taped(tapes, "forward", engine.body, (x, None), 0.5)
    assert engine.runs == runs + 1


def test_hooks_are_looked_at_and_asked_only_where_there_is_reason_to() -> None:
    class Chain:
        def __init__(self) -> None:
            self.calls: list = []

    engine, tapes, asked = Engine(), {}, []
    runtime = SimpleNamespace(launch_enter_hook=Chain(), launch_exit_hook=Chain())
    engine.listening = lambda: asked.append(1) or engine.heard
    engine.listening.parts = (runtime, runtime.launch_enter_hook, runtime.launch_exit_hook)

    def call() -> int:
        taped(tapes, "forward", engine.body, (torch.randn(2, 3), None), 0.5)
        return engine.runs

    assert [call() for _ in range(3)] == [1, 2, 2]
    assert not asked
    engine.heard = True
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.calls.append(print)
        before = engine.runs
        assert call() == before + 1
        chain.calls.clear()
        assert call() == before + 1
    runtime.launch_exit_hook = print
    before = engine.runs
    assert call() == before + 1
    engine.heard = False
    assert call() == before + 1


def test_a_profiler_of_triton_is_heard() -> None:
    from fla.ops._common.bound import hooks

    listening = hooks()
    assert not listening()
    if not hasattr(listening, "parts"):
        pytest.skip("this Triton keeps its hooks elsewhere")
    runtime, enter, leave = listening.parts
    assert (enter, leave) == (runtime.launch_enter_hook, runtime.launch_exit_hook)
    assert (enter.calls, leave.calls) == ([], [])
    enter.add(print)
    try:
        assert listening()
        assert enter.calls
    finally:
        enter.remove(print)


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


class Scratch(Engine):
    """A body with buffers that only kernels see, a view of one among them, and one that is returned."""

    def body(self, x, scale):
        self.runs += 1
        a = torch.empty(3, 16, dtype=torch.bfloat16)
        b = x.new_empty(2, 300)
        out = torch.empty_like(x)
        self._launch(5, (x, Matrix((a, 3, 16, 1, 16)), b, out, scale))
        self._launch(6, (b[1].view(30, 10), Matrix((b[1], 30, 10, 1, 10)), a, x[1], out.view(-1), scale))
        return (out.view(3, 2), None)


def _allocations(monkeypatch) -> list:
    """Sizes of what is allocated from here on."""
    made: list = []
    allocate = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: made.append(a[0]) or allocate(*a, **k))
    monkeypatch.setattr(written, "_quick_empty", lambda device: None)
    return made


def test_buffers_that_only_kernels_see_share_an_allocation(monkeypatch) -> None:
    made = _allocations(monkeypatch)
    engine, tapes = Scratch(), {}
    for i in range(4):
        x = torch.randn(2, 3)
        engine.sink.clear()
        made.clear()
        out, _ = taped(tapes, "forward", engine.body, (x,), 0.5)
        first, second = engine.sink
        place = next(e.what[0] for e in first if isinstance(e, PyCUtensorMap))
        rest = first[first.index(x.data_ptr()) + 1 :]
        b = next(e for e in rest if isinstance(e, int) and e > 1000 and e != out.data_ptr())
        assert second[-5] == place
        assert second[-4] == x.data_ptr() + 12
        assert second[-3] == out.data_ptr()
        assert [e for e in second if isinstance(e, int) and e == b + 1200], "a row of the scratch buffer"
        assert next(e.what for e in second if isinstance(e, PyCUtensorMap)) == (b + 1200, (30, 10))
        if i >= 2:
            # Both scratch buffers, in whole blocks of 512 bytes, and the result.
            assert sorted(made) == [(2, 3), (3072,)]
    assert engine.runs == 2


def test_large_buffers_are_allocated_one_by_one(monkeypatch) -> None:
    made = _allocations(monkeypatch)
    monkeypatch.setattr(written, "_ROOM", 100)
    engine, tapes = Scratch(), {}
    for _ in range(3):
        made.clear()
        taped(tapes, "forward", engine.body, (torch.randn(2, 3),), 0.5)
    assert sorted(made) == [(2, 3), (2, 300), (3, 16)]


def test_no_call_is_kept_alive() -> None:
    engine, tapes = Scratch(), {}
    gc.disable()  # a training step's memory cannot wait for a collection
    try:
        for _ in range(4):
            x = torch.randn(2, 3)
            out, _ = taped(tapes, "forward", engine.body, (x,), 0.5)
            gone = weakref.ref(x), weakref.ref(out)
            del x, out
            engine.sink.clear()
            assert all(r() is None for r in gone)
    finally:
        gc.enable()


def test_tensors_of_other_classes_run_the_body() -> None:
    class Mine(torch.Tensor):
        pass

    engine, tapes = Engine(), {}
    for _ in range(5):
        taped(tapes, "forward", engine.body, (torch.randn(2, 3), torch.ones(4).as_subclass(Mine)), 0.5)
    assert engine.runs == 5


def test_the_watch_is_not_wrapped_by_torch() -> None:
    assert tape._Watch.__torch_dispatch__ is tape._watch, "torch's wrapper imports Dynamo at the second call of an op"


def test_a_look_tells_apart_what_kernels_tell_apart() -> None:
    x, g = torch.randn(2, 4), torch.randn(2)
    base = look((x, g, None))
    assert base == look((torch.zeros(2, 4), torch.ones(2), None))
    others = [
        (x.view(4, 2), g, None),
        (x.half(), g, None),
        (x, g.double(), None),
        (x, None, g),
        (x, g, g),
        (x.clone().requires_grad_(), g, None),
    ]
    assert len({look(o) for o in others} | {base}) == len(others) + 1
    with torch.no_grad():
        assert look((x.clone().requires_grad_(), g, None)) == base


def test_only_plain_aligned_contiguous_tensors_are_looked_at() -> None:
    x = torch.randn(4, 8)
    assert look((x.t(),)) is None
    assert look((x[:, :4],)) is None
    assert look((torch.randn(9)[1:],)) is None
    assert look((torch.ones(4).as_subclass(type("Mine", (torch.Tensor,), {})),)) is None


def test_calls_that_cannot_be_known_are_not_kept(monkeypatch) -> None:
    monkeypatch.setattr(tape, "_CALLS_AT_MOST", 2)
    calls = KnownCalls()
    changing = torch.tensor(True)
    for key in ((None, (1,)), (("seen",), (1, changing))):
        assert calls.add(key, "call").call == "call"
        assert calls.get(key) is None
    for i in range(3):
        calls.add((("seen",), (i,)), i)
    assert [calls.get((("seen",), (i,))) is None for i in range(3)] == [True, True, False]


class Plain(Engine):
    """A body that launches on its input alone."""

    def body(self, x, call):
        self.runs += 1
        self._launch(5, (x, Matrix((x, 3, 16, 1, 16)), None))
        return (x * 2,)


def test_a_launch_with_addresses_seen_before_hands_over_what_was_made_then() -> None:
    engine, known = Plain(), tape.Known("call")
    xs = [torch.randn(3, 16) for _ in range(3)]
    for x in (xs[0], xs[0], *xs, *xs):
        (double,) = known.run("body", engine.body, (x,))
        assert torch.equal(double, x * 2)
        (handed,) = engine.sink[-1:]
        at = [e.what[0] if isinstance(e, PyCUtensorMap) else e for e in handed]
        assert at.count(x.data_ptr()) == 2
    assert engine.runs == 2
    assert [a is b for a, b in zip(engine.sink[2:5], engine.sink[5:], strict=True)] == [True] * 3


def test_lists_of_arguments_are_kept_up_to_a_number(monkeypatch) -> None:
    monkeypatch.setattr(written, "_LAUNCHES_AT_MOST", 2)
    engine, known = Plain(), tape.Known("call")
    xs = [torch.randn(3, 16) for _ in range(4)]
    for _ in range(3):
        for x in xs:
            known.run("body", engine.body, (x,))
            assert x.data_ptr() in engine.sink[-1]
    assert engine.runs == 2
    assert len({id(e) for e in engine.sink[2:]}) == 10


def test_kernels_that_come_before_their_node_leave_gradients_alone() -> None:
    engine, known = Plain(), tape.Known("call")
    x = torch.randn(3, 16, requires_grad=True)
    assert known.first("body", (x,)) is None
    with torch.no_grad():
        for _ in range(2):
            assert known.first("body", (x,)) is None
            known.run("body", engine.body, (x,))
    (double,) = known.first("body", (x,))
    assert not double.requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad():
        known.first("body", (x,))
        assert not torch.is_grad_enabled()
    runs = len(engine.sink)
    torch.func.vjp(lambda y: y if known.first("body", (x,)) is None else None, torch.ones(1))
    assert len(engine.sink) == runs, "transforms go the long way, which refuses them"


def test_who_watches_allocations_sees_those_of_a_written_out_body() -> None:
    class Sizes(TorchDispatchMode):
        seen: ClassVar[list] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.seen.append((func._schema.name, tuple(out.shape)))
            return out

    engine, tapes = Scratch(), {}
    x = torch.randn(2, 3)
    for _ in range(3):
        taped(tapes, "forward", engine.body, (x,), 0.5)
    with Sizes() as mode:
        taped(tapes, "forward", engine.body, (x,), 0.5)
    assert ("aten::empty_strided", (3072,)) in mode.seen
    torch.use_deterministic_algorithms(True)
    try:
        out, _ = taped(tapes, "forward", engine.body, (x,), 0.5)
    finally:
        torch.use_deterministic_algorithms(False)
    assert engine.runs == 2
    assert out.isnan().all(), "torch fills new memory so that reading it shows"
