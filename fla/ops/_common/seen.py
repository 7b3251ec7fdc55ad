# SPDX-License-Identifier: MIT
"""Checks of arguments that are not repeated for calls that look the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fla.ops._common.checks import static_facts

# Arguments whose values are looked at, not only their shapes.
DATA = ("cu_seqlens", "cu_seqlens_cpu")
_GOOD_AT_MOST = 1024


def unless_seen(
    validate: Callable[..., None], names: tuple[str, ...], looked_at: tuple[str, ...] = DATA
) -> Callable[..., None]:
    """``validate``, skipped where shapes, dtypes, devices and flags have passed it before.

    ``names`` are the parameters in order, with those of ``looked_at`` taken by position. Calls that give one, and
    calls with anything but tensors, numbers and None, are checked every time.
    """
    good: set[Any] = set()
    data = tuple(names.index(name) for name in looked_at if name in names)

    def run(*args: Any, **kwargs: Any) -> None:
        key = None
        for i in data:
            if i >= len(args) or args[i] is not None:
                break
        else:
            key = static_facts((*args, *kwargs.values()))
            if key in good:
                return
        validate(*args, **kwargs)
        # A tensor of one number may be a flag, whose value decides.
        if key is not None and not any(isinstance(x, Tensor) and x.numel() == 1 for x in (*args, *kwargs.values())):
            if len(good) >= _GOOD_AT_MOST:
                good.clear()
            good.add(key)

    # For `fla.backends.doors`: other calls need no second check.
    run.values_of = tuple(names[i] for i in data)  # type: ignore[attr-defined]
    return run
