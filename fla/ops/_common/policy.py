# SPDX-License-Identifier: MIT
"""What launch policies know about a chip, and the form of their answer. No GPU is needed to use this module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fla.ops._common.ahead import standing_for


@dataclass(frozen=True)
class Chip:
    """The facts a policy may use. ``arch`` is 10 * major + minor of the compute capability (0 off NVIDIA).

    ``fit`` has the last word on a plan: what a plugin that brings a chip of its own changes about tiles.
    """

    vendor: str
    arch: int
    sms: int
    smem: int
    fit: Callable[[Any], Any] | None = None

    @property
    def descriptors(self) -> bool:
        """Whether tensor descriptors are copied by the chip's own engine."""
        return self.vendor == "nvidia" and self.arch >= 90 and has_descriptors()

    @property
    def exact(self) -> str:
        """``input_precision`` for fp32 operands that must keep fp32 accuracy."""
        return "tf32x3" if self.vendor == "nvidia" and self.arch >= 80 else "ieee"

    @property
    def wide(self) -> str:
        """``input_precision`` for products that need fp32's range but only fp16's mantissa."""
        return "tf32" if self.vendor == "nvidia" and self.arch >= 80 else "ieee"


# Multiprocessors and shared memory a block may ask for; for tests and offline compilation.
CHIPS = {
    "sm80": Chip("nvidia", 80, 108, 166912),
    "sm90": Chip("nvidia", 90, 132, 232448),
    "sm100": Chip("nvidia", 100, 148, 232448),
    "sm120": Chip("nvidia", 120, 188, 101376),
    "interpreter": Chip("interpreter", 0, 1, 1 << 20),
}


@dataclass(frozen=True)
class Launch:
    """Compiler options of one kernel. ``regs`` caps the registers a thread may use (NVIDIA only)."""

    warps: int
    stages: int = 1
    regs: int | None = None

    def options(self, chip: Chip) -> dict[str, Any]:
        kw: dict[str, Any] = {"num_warps": self.warps, "num_stages": self.stages}
        if self.regs is not None and chip.vendor == "nvidia":
            kw["maxnreg"] = self.regs
        return kw


@functools.lru_cache(maxsize=1)
def has_descriptors() -> bool:
    """Whether this Triton takes descriptors made on the host."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401
    except ImportError:
        return False
    return True


@functools.lru_cache(maxsize=64)
def _cuda_chip(index: int) -> Chip:
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Chip("amd", 0, p.multi_processor_count, 65536)
    smem = getattr(p, "shared_memory_per_block_optin", 101376)
    return Chip("nvidia", 10 * p.major + p.minor, p.multi_processor_count, smem)


_described: dict[str, Callable[[torch.device], Chip]] = {}


def describe_chip(device_type: str, answer: Callable[[torch.device], Chip] | None) -> None:
    """Let `answer` say what chip is behind devices of a type that core does not know; None takes that back."""
    if answer is None:
        _described.pop(device_type, None)
    else:
        _described[device_type] = answer


def chip_of(device: torch.device) -> Chip:
    """The chip behind ``device``; CPU tensors run in the interpreter."""
    if device.type == "cuda":
        return _cuda_chip(torch.cuda.current_device() if device.index is None else device.index)
    if (answer := _described.get(device.type)) is not None:
        return answer(device)
    if device.type == "cpu":
        return CHIPS["interpreter"]
    if device.type == "meta" and (real := standing_for()) is not None:
        return chip_of(real)
    return Chip(device.type, 0, 64, 65536)


Maker = TypeVar("Maker", bound=Callable[..., Any])


def planned(make: Maker) -> Maker:
    """A function that makes plans for a chip, its first argument, once for each set of arguments."""

    @functools.lru_cache(maxsize=512)
    @functools.wraps(make)
    def plan(chip: Chip, *args: Any, **settings: Any) -> Any:
        found = make(chip, *args, **settings)
        return found if chip.fit is None else chip.fit(found)

    return plan  # type: ignore[return-value]


def pow2(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least ``n`` and ``least``."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def stretches(programs: int, chip: Chip, chunks: int) -> int:
    """Into how many stretches of time a scan of ``chunks`` steps by ``programs`` programs is cut.

    Splitting costs a second pass that summarises each stretch, so it pays only where at least four times the programs
    run at once, each with enough chunks.
    """
    segments = 1
    while segments < 16 and programs * segments * 2 <= chip.sms and chunks >= 16 * segments * 2:
        segments *= 2
    return segments if segments >= 4 else 1


def groups_for(chip: Chip, dtype: torch.dtype, K: int, V: int, few: bool) -> int:
    """Groups of four warps, 64 columns of V each, in a program of kernels in Gluon; 0: there is none for such tiles.

    Two groups share the tiles of keys, unless there are too few heads to fill the chip with pairs.
    """
    if chip.vendor != "nvidia" or chip.arch // 10 != 9 or dtype != torch.bfloat16 or K != 128 or V % 128:
        return 0
    return 1 if few else 2
