# SPDX-License-Identifier: MIT
"""Calls of the modules' kernels, their host side written out once for each set of sizes; see `fla.ops._common.tape`.

A module's kernels take about as long as their launches, so what the host does for a call is what its caller waits for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fla.ops._common.tape import Body, taped

# A program with that many different sizes gains little from them.
_AT_MOST = 1024
_tapes: dict[Any, Any] = {}


def written(key: tuple[Any, ...], body: Body, inputs: tuple[Tensor | None, ...], *static: Any) -> Any:
    """``body(*inputs, *static)``, a tuple of tensors and None.

    ``key`` holds everything that decides what the body does: its name, ``static``, and the shapes of the inputs (and
    strides, where they need not be contiguous). Their dtypes, device and alignment need not be in it.
    """
    if len(_tapes) > _AT_MOST:
        _tapes.clear()
    return taped(_tapes, key, body, inputs, *static)
