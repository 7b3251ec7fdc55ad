# SPDX-License-Identifier: MIT
"""Cheap launches: what Triton works out about a call is worked out once per signature.

A Triton launch binds, specialises and looks up some forty arguments, which takes longer than a short kernel runs. The
second launch of a signature goes straight to the compiled kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SMALL = 1 << 31


class Launcher:
    """Launches one jit function.

    The positional arguments are those before the first constexpr; ``meta`` names all constexprs in the order of the
    signature. Kernels launched this way must not specialise on integers (``do_not_specialize``), since those are not
    part of the signature here.
    """

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self._compiled: dict[Any, Any] = {}

    def __call__(self, grid: int, args: tuple[Any, ...], meta: dict[str, Any], options: dict[str, Any]) -> None:
        if grid <= 0:
            return
        key: list[Any] = [torch.cuda.current_device() if torch.cuda.is_available() else -1]
        plain = True
        for a in args:
            if type(a) is int:
                plain = plain and a < _SMALL
            elif isinstance(a, Tensor):
                key.append(a.dtype)
                plain = plain and not a.data_ptr() & 15
        values = tuple(meta.values())
        signature = (*key, values, *options.values())
        # Misaligned pointers and wide integers compile to other kernels: Triton sorts those out.
        kernel = self._compiled.get(signature) if plain else None
        if kernel is not None:
            kernel[grid, 1, 1](*args, *values)
            return
        names = tuple(p.name for p in getattr(self.fn, "params", ()) if p.is_constexpr)
        if names and names != tuple(meta):
            raise TypeError(f"{self.fn.__name__} takes the constexprs {names}, got {tuple(meta)}")
        kernel = self.fn[(grid,)](*args, **meta, **options)
        # The interpreter returns nothing.
        if plain and kernel is not None and hasattr(kernel, "__getitem__"):
            self._compiled[signature] = kernel


def descriptor(x: Tensor, rows: int, cols: int, block_rows: int, block_cols: int) -> Any:
    """A tensor descriptor of ``x`` as a row-major `[rows, cols]` matrix.

    Made without the checks of its constructor, which cost more than the object: the callers' policies use descriptors
    for contiguous tensors with rows of a multiple of 16 bytes only.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    d = object.__new__(TensorDescriptor)
    d.base, d.shape, d.strides, d.block_shape = x, [rows, cols], [cols, 1], [block_rows, block_cols]
    return d
