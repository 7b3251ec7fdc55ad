# SPDX-License-Identifier: MIT
"""How an engine runs a call that it knows, and tells dispatch so that the next one comes straight to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fla.backends import doors
from fla.ops._common.launch import on_device
from fla.ops._common.policy import chip_of


def served(run: Callable[..., Any], inputs: tuple[Any, ...], *static: Any) -> Any:
    """``run(inputs, *static)`` on the device of the inputs, which holds for all that look the same."""
    first = inputs[0]
    with on_device(first):
        result = run(inputs, *static)
    if doors.asked():
        # What chip other devices stand for may change (`describe_chip`).
        device = first.device
        chip = None if first.is_cuda else chip_of(device)

        def again(inputs: tuple[Any, ...]) -> Any:
            if chip is not None and chip_of(device) != chip:
                return None
            with on_device(inputs[0]):
                return run(inputs, *static)

        doors.offer(again, inputs, result)
    return result
