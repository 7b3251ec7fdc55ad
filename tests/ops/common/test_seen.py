# SPDX-License-Identifier: MIT
"""Checks that are not repeated, and kernels compiled ahead, once for each kind of call."""

from __future__ import annotations

import pytest
import torch

from fla.ops._common.first_call import first_call
from fla.ops._common.seen import unless_seen

NAMES = ("q", "scale", "cu_seqlens")


def counted(fails: bool = False):
    calls: list[tuple] = []

    def validate(*args, **kwargs) -> None:
        calls.append(args)
        if fails:
            raise ValueError("wrong")

    return calls, unless_seen(validate, NAMES)


def test_equal_shapes_types_and_flags_are_checked_once() -> None:
    calls, validate = counted()
    q = torch.zeros(1, 2)
    validate(q, 1.0, None)
    validate(torch.ones(1, 2), 1.0, None)
    assert len(calls) == 1
    for other in ((torch.zeros(2, 2), 1.0, None), (q.double(), 1.0, None), (q, 1, None), (q, True, None)):
        validate(*other)
    assert len(calls) == 5
    validate(q.clone().requires_grad_(), 1.0, None)
    assert len(calls) == 6


def test_arguments_with_values_are_checked_every_time() -> None:
    calls, validate = counted()
    cu = torch.tensor([0, 2])
    for _ in range(2):
        validate(torch.zeros(1, 2), 1.0, cu)
        validate(torch.zeros(1, 2), 1.0)
        validate([1.0], 1.0, None)
    assert len(calls) == 6


def test_what_failed_fails_again() -> None:
    calls, validate = counted(fails=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            validate(torch.zeros(1, 2), 1.0, None)
    assert len(calls) == 2


def test_nothing_is_compiled_ahead_without_a_gpu() -> None:
    def step(*given) -> None:
        raise AssertionError

    first_call(set(), "key", lambda: (), (torch.zeros(2), None), step)
    first_call(set(), "key", lambda: (), (None,), step)
