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
    """One measured call: tokens of a sequence, sequences times heads, and medians in milliseconds.

    Both kernels walk a sequence from its start, one chain for each sequence and head: length and number of the chains
    decide.
    """

    length: int
    chains: int
    flash_ms: float
    core_ms: float


#: Where and with what the table was measured. Nothing is said about other cards.
CARD = "H200"
WITH = "torch 2.11, triton 3.6"
CORE = "1.0.0.dev0"
#: Inference, everything in the kernel, no states; both in one run of ``benchmarks/overhead.py``, cold L2.
TABLE: tuple[Point, ...] = (
    Point(length=8192, chains=96, flash_ms=1.456, core_ms=1.021),
    Point(length=2048, chains=64, flash_ms=0.330, core_ms=0.203),
    Point(length=32768, chains=16, flash_ms=3.65, core_ms=0.883),
    Point(length=4096, chains=4, flash_ms=0.421, core_ms=0.145),
    Point(length=512, chains=256, flash_ms=0.219, core_ms=0.190),
    Point(length=128, chains=512, flash_ms=0.121, core_ms=0.108),
    Point(length=512, chains=8, flash_ms=0.0685, core_ms=0.0376),
    Point(length=64, chains=2, flash_ms=0.0205, core_ms=0.0236),
)


def slower(
    length: float,
    chains: int,
    *,
    triton: bool,
    card: str | None,
    core: str,
    table: Sequence[Point] = TABLE,
) -> str | None:
    """Why core should run a call of `chains` (sequences times heads) with `length` tokens each, or None.

    The nearest measured call decides, by the ratios of both sizes. ``triton`` says whether core would run its Triton
    path; its PyTorch path is never faster. ``card`` is the name of the card and ``core`` core's version.
    """
    from packaging.version import Version

    if not (triton and table and length and chains) or card is None or CARD not in card.split():
        return None
    if Version(core) < Version(CORE):
        return None
    point = min(table, key=lambda p: math.log2(p.length / length) ** 2 + math.log2(p.chains / chains) ** 2)
    if point.core_ms >= point.flash_ms:
        return None
    return (
        f"core's kernels are faster: {point.core_ms:.3g} ms against {point.flash_ms:.3g} ms for {point.length} tokens, "
        f"{point.chains} sequences times heads (measured on {CARD}, {WITH}, core {CORE})"
    )


def verdict(q: Any, cu_seqlens: Any = None) -> str | None:
    """:func:`slower` for a call with queries `q` ``[B, T, H, K]`` in this process. Packed sequences count as equal."""
    if not TABLE:
        return None
    B, T, H = q.shape[:3]
    N = B if cu_seqlens is None else max(1, cu_seqlens.shape[0] - 1)
    return _verdict(B * T / N if N else 0, N * H, q.device)


@functools.lru_cache(maxsize=1024)
def _verdict(length: float, chains: int, device: Any) -> str | None:
    import torch

    import fla
    from fla.backends import devices
    from fla.ops.kda import chunk_kda

    # A meta tensor (explain) stands for one on this machine's accelerator.
    card = None
    if device.type in ("cuda", "meta") and torch.cuda.is_available():
        card = torch.cuda.get_device_name(None if device.type == "meta" else device)
    path = getattr(chunk_kda, "op").triton_path  # noqa: B009  # the attribute is not in the function's type
    triton = path is not None and devices.has_triton_driver("cuda")
    return slower(length, chains, triton=triton, card=card, core=fla.__version__)
