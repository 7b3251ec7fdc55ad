# SPDX-License-Identifier: MIT
"""Where core's own Triton kernels are faster, the plugin declines (code `slower`) unless the user asks for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Point:
    """One measured call: ``tokens`` is B * T, times are medians in milliseconds."""

    tokens: int
    heads: int
    flash_ms: float
    core_ms: float

    @property
    def size(self) -> float:
        return math.log2(self.tokens * self.heads)


#: Where and with what the table was measured. Nothing is said about other cards.
CAPABILITY = (9, 0)
CARD = "NVIDIA H200, torch 2.11, triton 3.6.0"
CORE = "1.0.0.dev0"
#: Without initial state, gate and sigmoid in the kernel, inference. Empty: core has not been measured yet.
TABLE: tuple[Point, ...] = ()


def slower(
    tokens: int,
    heads: int,
    *,
    triton: bool,
    capability: tuple[int, int] | None,
    core: str,
    table: Sequence[Point] = TABLE,
) -> str | None:
    """Why core should run a call of `tokens` (B * T) and `heads`, or None.

    The nearest measured size decides. ``triton`` says whether core would run its Triton path; its PyTorch path is never
    faster. ``capability`` is that of the card and ``core`` core's version.
    """
    from packaging.version import Version

    if not (triton and table and tokens and heads) or capability != CAPABILITY or Version(core) < Version(CORE):
        return None
    size = math.log2(tokens * heads)
    point = min(table, key=lambda p: abs(p.size - size))
    if point.core_ms >= point.flash_ms:
        return None
    return (
        f"core's kernels are faster: {point.core_ms:.3g} ms against {point.flash_ms:.3g} ms for {point.tokens} tokens "
        f"of {point.heads} heads (measured on {CARD}, core {CORE})"
    )


def verdict(q: Any) -> str | None:
    """:func:`slower` for a call with queries `q` ``[B, T, H, K]`` in this process."""
    if not TABLE:
        return None
    B, T, H = q.shape[:3]
    return _verdict(B * T, H, q.device)


@functools.lru_cache(maxsize=1024)
def _verdict(tokens: int, heads: int, device: Any) -> str | None:
    import torch

    import fla
    from fla.backends import devices
    from fla.ops.kda import chunk_kda

    # A meta tensor (explain) stands for one on this machine's accelerator.
    capability = None
    if device.type in ("cuda", "meta") and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(None if device.type == "meta" else device)
    path = getattr(chunk_kda, "op").triton_path  # noqa: B009  # the attribute is not in the function's type
    triton = path is not None and devices.has_triton_driver("cuda")
    return slower(tokens, heads, triton=triton, capability=capability, core=fla.__version__)
