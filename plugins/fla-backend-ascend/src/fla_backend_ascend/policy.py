# SPDX-License-Identifier: MIT
"""Tile sizes for a unified buffer: pure functions of core's plans and of the buffer's size. No NPU is needed.

Core's plans for chips without warp-group products are the starting point. Each kernel's tiles are counted, loads twice
because the compiler overlaps the next with the present one, and blocks are halved until all kernels fit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from fla.ops._common.policy import Chip, Launch
from fla.ops._delta.policy import ScalarPlan as DeltaScalar
from fla.ops._delta.vector_policy import VectorPlan as DeltaVector
from fla.ops._linear.policy import ScalarPlan as LinearScalar
from fla.ops._linear.vector_policy import VectorPlan as LinearVector

LEAST = 16
WIDE, HALF = 4, 2


class TooWide(ValueError):
    """No tile fits."""


def described(buffer: int, cores: int) -> Chip:
    """Core's description of an NPU with `buffer` bytes of unified buffer and `cores` AI cores."""
    return Chip("npu", 0, cores, buffer, functools.partial(fit, buffer))


def fit(buffer: int, plan: Any) -> Any:
    """`plan` with blocks that fit `buffer` bytes, and launch options that triton-ascend has.

    Raises:
        TooWide: not even the smallest blocks fit.
    """
    needs, shrinkable = _KINDS[type(plan)]
    while max(size for _, size, _ in needs(plan)) > buffer:
        name, size, blocks = max(needs(plan), key=lambda need: need[1])
        block = next((b for b in sorted(blocks, key=lambda b: -getattr(plan, b)) if getattr(plan, b) > LEAST), None)
        if block is None:
            raise TooWide(f"{name} needs {size} bytes of unified buffer, there are {buffer}")
        plan = dataclasses.replace(plan, **{block: getattr(plan, block) // 2})
    plain = {f.name: Launch(1, 1) for f in dataclasses.fields(plan) if isinstance(getattr(plan, f.name), Launch)}
    return dataclasses.replace(plan, **plain, **shrinkable)


Need = tuple[str, int, tuple[str, ...]]


def _operand(p: DeltaVector | LinearVector) -> int:
    """Bytes of an element of q, k and v. Plans with a decay per head do not tell: there it counts as float32."""
    return WIDE if p.score == "fp32" else HALF


def _delta_scalar(p: DeltaScalar) -> Iterator[Need]:
    C, bv, K = p.chunk, p.block_v, p.block_k
    loads = 2 * WIDE * (C * (2 * K + bv) + 2 * C * C)
    yield "the scan", bv * K * 2 * WIDE + loads + 3 * WIDE * bv * C, ("block_v",)
    yield "the first stage", 2 * WIDE * 2 * C * p.prep_k + 6 * WIDE * C * C, ("prep_k",)
    K, V = p.grad_k, p.grad_v
    loads = 2 * WIDE * (C * (2 * K + 2 * V) + 2 * C * C) + 2 * WIDE * K * V
    yield "the gradient", loads + WIDE * (2 * C * K + 4 * C * C), ("grad_k", "grad_v")


def _delta_vector(p: DeltaVector) -> Iterator[Need]:
    R, size = 64, _operand(p)
    for block in ("bv", "bv_bwd", "bv_map"):
        bv = getattr(p, block)
        state = bv * p.kp * (WIDE + size)
        loads = 2 * size * (32 * (3 * p.kp + bv) + 2 * 32 * 32)
        yield "a scan", state + loads + 3 * WIDE * bv * 32, (block,)
    yield "the first stage", 2 * size * 3 * R * p.kb + WIDE * (2 * R * p.kb + 3 * R * R), ("kb",)
    K, V = p.gkb, p.vb
    yield "the gradient", 2 * size * (R * (3 * K + 2 * V) + K * V) + WIDE * (2 * R * K + 3 * R * R), ("gkb", "vb")


def _linear_scalar(p: LinearScalar) -> Iterator[Need]:
    C, K = p.chunk, p.block_k
    for block in ("block_v", "states_v"):
        bv = getattr(p, block)
        state = bv * K * 2 * WIDE
        yield "a scan", state + 2 * WIDE * C * (2 * K + bv) + WIDE * (bv * C + C * C), (block, "block_k")
    yield "the outputs", 2 * WIDE * C * (2 * K + p.out_v) + WIDE * (C * C + C * p.out_v), ("out_v", "block_k")
    GK, GV = p.grad_k, p.grad_v
    loads = 2 * WIDE * (C * (2 * GK + 2 * GV) + 2 * GK * GV)
    yield "the gradient", loads + WIDE * (2 * C * GK + 2 * C * C), ("grad_k", "grad_v")


def _linear_vector(p: LinearVector) -> Iterator[Need]:
    C, size = p.chunk, _operand(p)
    for block in ("bv", "bv_save"):
        bv = getattr(p, block)
        state = bv * p.kp * (WIDE + size)
        yield "a scan", state + 2 * size * (C * (2 * p.kp + bv) + C * C) + WIDE * bv * C, (block,)
    yield "the first stage", 2 * size * 3 * C * p.kb + WIDE * (2 * C * p.kb + 2 * C * C), ("kb",)
    K, V = p.gkb, p.vb
    yield "the gradient", 2 * size * (C * (3 * K + 2 * V) + K * V) + WIDE * (2 * C * K + 2 * C * C), ("gkb", "vb")


_KINDS: dict[type, tuple[Callable[[Any], Iterator[Need]], dict[str, Any]]] = {
    DeltaScalar: (_delta_scalar, {"descriptors": False}),
    DeltaVector: (_delta_vector, {"tma": False, "grad_tma": False}),
    LinearScalar: (_linear_scalar, {"descriptors": False}),
    LinearVector: (_linear_vector, {"tma": False}),
}
