# SPDX-License-Identifier: MIT
"""Figures that decide between a backend and core: where core's Triton path was measured to be faster, a verifier
declines with code ``slower``, which a user overrules by asking for the backend by name."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fla.backends.facts import Rejection

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Point:
    """One measured call: tokens of a sequence, sequences times heads, and medians in milliseconds.

    Kernels that walk a sequence from its start have one chain for each sequence and head: length and number of the
    chains decide.
    """

    length: int
    chains: int
    backend_ms: float
    core_ms: float


@dataclass(frozen=True)
class Measured:
    """Calls of one function that were timed beside core, in one run on one card.

    Args:
        points: the calls.
        card: a word of the card's name, ``"H200"``. Nothing is said about other cards.
        versions: with what they were measured, for the reason.
        core: core's version then. Nothing is said about earlier ones.
    """

    points: tuple[Point, ...]
    card: str
    versions: str
    core: str

    def slower(self, length: float, chains: int, *, triton: bool, card: str | None, core: str) -> str | None:
        """Why core should run a call of `chains` chains with `length` tokens each, or None.

        The nearest measured call decides, by the ratios of both sizes. ``triton`` says whether core would run its
        Triton path; its PyTorch path is never faster. ``card`` is the name of the card and ``core`` core's version.
        """
        from packaging.version import Version

        if not (triton and self.points and length and chains) or card is None or self.card not in card.split():
            return None
        if Version(core) < Version(self.core):
            return None
        point = min(self.points, key=lambda p: math.log2(p.length / length) ** 2 + math.log2(p.chains / chains) ** 2)
        if point.core_ms >= point.backend_ms:
            return None
        return (
            f"core's kernels are faster: {point.core_ms:.3g} ms against {point.backend_ms:.3g} ms for {point.length} "
            f"tokens, {point.chains} sequences times heads (measured on {self.card}, {self.versions}, core {self.core})"
        )

    def rejection(self, function: Any, v: Tensor, cu_seqlens: Tensor | None = None) -> Rejection | None:
        """The answer for a call of `function` with values ``[B, T, HV, V]``, or None where the backend may run.

        Packed sequences count as equally long; nothing is read from the device.
        """
        B, T, HV = v.shape[:3]
        N = B if cu_seqlens is None else max(1, cu_seqlens.shape[0] - 1)
        text = _answer(self, function.op.triton_path is not None, B * T / N if N else 0, N * HV, v.device)
        return None if text is None else Rejection("slower", text)


@functools.lru_cache(maxsize=1024)
def _answer(table: Measured, path: bool, length: float, chains: int, device: Any) -> str | None:
    import torch

    import fla
    from fla.backends import devices

    # A meta tensor (explain) stands for one on this machine's accelerator.
    card = None
    if device.type in ("cuda", "meta") and torch.cuda.is_available():
        card = torch.cuda.get_device_name(None if device.type == "meta" else device)
    triton = path and devices.has_triton_driver("cuda")
    return table.slower(length, chains, triton=triton, card=card, core=fla.__version__)


__all__ = ["Measured", "Point"]
