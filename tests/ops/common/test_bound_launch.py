# SPDX-License-Identifier: MIT
"""Kernels bound to Triton's C launcher, over launchers of the shapes that Triton has had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from fla.ops._common.bound import Matrix, bind

OUT: list[tuple] = []


class PyCUtensorMap:
    """Encoded descriptors are told by this name."""

    def __init__(self, base, shape) -> None:
        self.what = (base, tuple(shape))


def _builtin(sink: list):
    # The launchers end in a function of a C module; this one is a builtin too.
    return sink.append


def _expand(args, indices):
    final = []
    for i, a in enumerate(args):
        final += [PyCUtensorMap(a.base.data_ptr(), a.shape), *a.shape, *a.strides] if i in indices else [a]
    return final


def _wrap(launcher, indices, base):
    def inner(*args):
        return launcher([*args[:base], *_expand(args[base:], indices)])

    return inner


def _wrap_nested(launcher, indices):
    def inner(*args):
        return launcher([*args[:-1], _expand(args[-1], indices)])

    return inner


class Launcher:
    """Positional arguments straight into C (3.4 to 3.6)."""

    def __init__(self, sink, indices, scratch=0) -> None:
        self.launch = _wrap(_builtin(sink), indices, 10)
        self.global_scratch_size = scratch

    def __call__(self, gx, gy, gz, stream, function, *args) -> None:
        self.launch(gx, gy, gz, stream, function, True, *args)


class NestedLauncher:
    """The kernel's arguments as one sequence (3.7)."""

    def __init__(self, sink, indices) -> None:
        self.launch = _wrap_nested(_builtin(sink), indices)

    def __call__(self, gx, gy, gz, stream, function, packed, metadata, enter, leave, *args) -> None:
        self.launch(gx, gy, gz, stream, function, packed, metadata, enter, leave, b"signature", args)


def _kernel(run):
    return SimpleNamespace(run=run, function=7, packed_metadata=(4, 1, 0))


def _flat(call):
    out = []
    for e in call:
        out += e if isinstance(e, (list, tuple)) and not isinstance(e, PyCUtensorMap) and e != (4, 1, 0) else [e]
    return out


@pytest.mark.parametrize("make", [Launcher, NestedLauncher])
def test_bound_launch_hands_over_what_the_launcher_would(make) -> None:
    sink: list = []
    x, y = torch.zeros(4, 8), torch.zeros(3, 16)
    args = (x, Matrix((y, 3, 16, 1, 16)), None, 5, 2.5)
    go = bind(_kernel(make(sink, {1})), args, ("meta", True))
    assert go is not None
    assert not sink, "binding launches nothing"
    for _ in range(2):
        go(11, 99, args)
    first, second = (_flat(c) for c in sink)
    maps = [e for e in first if isinstance(e, PyCUtensorMap)]
    assert [m.what for m in maps] == [(y.data_ptr(), (3, 16))]
    at = first.index(maps[0])
    assert first[at : at + 5] == [maps[0], 3, 16, 16, 1]
    # The second launch has the address in place of the tensor, and the descriptor of the first.
    assert second == [x.data_ptr() if e is x else e for e in first]
    assert first[0] == 11
    assert first[3] == 99
    assert first[-4:] == [5, 2.5, "meta", True]


def test_other_buffers_and_lengths_get_their_own_descriptor() -> None:
    sink: list = []
    x, y = torch.zeros(4, 8), torch.zeros(16, 8)
    go = bind(_kernel(Launcher(sink, {0})), (Matrix((x, 4, 8, 1, 8)),), ())
    assert go is not None
    for m in (x, y, x, y):
        go(1, 0, (Matrix((m, m.shape[0], 8, 1, 8)),))
    go(1, 0, (Matrix((y, 12, 8, 1, 8)),))
    maps = [next(e for e in _flat(c) if isinstance(e, PyCUtensorMap)) for c in sink]
    assert [m.what for m in maps] == [
        *[(x.data_ptr(), (4, 8)), (y.data_ptr(), (16, 8))] * 2,
        (y.data_ptr(), (12, 8)),
    ]
    assert maps[0] is maps[2]
    assert maps[1] is maps[3]


@pytest.mark.parametrize(
    "run",
    [
        lambda *a: None,
        SimpleNamespace(launch=SimpleNamespace()),
        Launcher([], set(), scratch=64),
        SimpleNamespace(launch=lambda *a: None),
    ],
    ids=["function", "object", "scratch memory", "python all the way"],
)
def test_launchers_of_other_kinds_are_left_alone(run) -> None:
    assert bind(_kernel(run), (torch.zeros(1),), ()) is None
