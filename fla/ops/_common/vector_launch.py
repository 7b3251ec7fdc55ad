# SPDX-License-Identifier: MIT
"""How the engines with a decay per channel launch their kernels: named constexprs, descriptors, type names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fla.ops._common.launch import Fixed, Launcher, descriptor

TL_TYPES: dict[Any, Any] = {
    "bf16": tl.bfloat16,
    "fp16": tl.float16,
    "fp32": tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
# operand type of the 0/1 sums of gates, by their precision
ONES_TYPES = {
    "raw": torch.bfloat16,
    "fp16": torch.float16,
    "tf32x3": torch.float32,
    "tf32": torch.float32,
    "ieee": torch.float32,
}
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class NamedLauncher(Launcher):
    """A launcher that takes constexprs in any order, and more than there are."""

    def fix(self, meta: dict[str, Any], options: dict[str, Any]) -> Fixed:
        # The interpreter's functions do not say which parameters are constexprs.
        names = self.names or [name for name in inspect.signature(self.fn.fn).parameters if name in meta]
        return super().fix({name: meta[name] for name in names}, options)


def constant(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``build(..., device)``, a small tensor of constants, worked out once for each of its arguments."""
    kept = functools.lru_cache(maxsize=32)(build)

    @functools.wraps(build)
    def get(*args: Any) -> Tensor:
        device: torch.device = args[-1]
        if device.type == "meta":
            # Not worked out there: that would import torch's compiler.
            x = kept(*args[:-1], torch.device("cpu"))
            return torch.empty(x.shape, dtype=x.dtype, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Memory of a capture belongs to its graph.
            return build(*args)
        return kept(*args)

    return get


def rows_of(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """A tensor `[..., H, D]` as matrix of rows, by descriptor or as it is."""
    width = x.shape[-1] * x.shape[-2]
    return descriptor(x, x.numel() // width, width, *block) if tma else x


def matrix_of(x: Tensor, block: tuple[int, int], tma: bool) -> Any:
    """A buffer `[rows, width]` by descriptor or as it is."""
    return descriptor(x, x.shape[0], x.shape[1], *block) if tma else x


def aligned(*tensors: Tensor) -> bool:
    """Whether descriptors can address every head's tile: bases and heads on 16 bytes."""
    return all(x.data_ptr() % 16 == 0 and (x.shape[-1] * x.element_size()) % 16 == 0 and x.numel() > 0 for x in tensors)
