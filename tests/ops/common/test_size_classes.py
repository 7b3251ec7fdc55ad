# SPDX-License-Identifier: MIT
"""What `fla warmup` runs covers every configuration that a policy can choose. Pure rules: no GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fla.ops._common.policy import CHIPS, Chip
from fla.ops._common.size_classes import size_classes
from fla.ops._delta import policy as delta_scalar
from fla.ops._delta import vector_policy as delta_vector
from fla.ops._linear import policy as linear_scalar
from fla.ops._linear import vector_policy as linear_vector

Size = tuple[int, int, int, bool]  # heads of all sequences together, tokens of the longest, sequences, packed


def scalar_delta(chip: Chip, dtype: torch.dtype, K: int, size: Size) -> Any:
    heads, T, _, _ = size
    plan = delta_scalar.scalar_plan(chip, dtype, K, K, heads, True)
    return plan, delta_scalar.time_segments(plan, chip, heads, K, -(-T // plan.chunk)) > 1


def vector_delta(chip: Chip, dtype: torch.dtype, K: int, size: Size) -> Any:
    heads, T, sequences, packed = size
    name = str(dtype).removeprefix("torch.")
    plan = delta_vector.plan(
        chip, name, K, K, sequences=sequences, heads=heads // sequences, length=T, exact=False, normed=True,
        varlen=packed,
    )  # fmt: skip
    return dataclasses.replace(plan, segments=min(plan.segments, 2))


def scalar_linear(chip: Chip, dtype: torch.dtype, K: int, size: Size) -> Any:
    heads, T, _, _ = size
    plan = linear_scalar.scalar_plan(chip, dtype, K, K, heads)
    return plan, linear_scalar.time_segments(plan, chip, heads, K, -(-T // plan.chunk)) > 1


def vector_linear(chip: Chip, dtype: torch.dtype, K: int, size: Size) -> Any:
    heads, T, _, _ = size
    plan = linear_vector.vector_plan(chip, str(dtype).removeprefix("torch."), K, K, heads=heads)
    return plan, linear_vector.time_segments(plan, chip, heads, T // 64) > 1


@pytest.mark.parametrize("engine", [scalar_delta, vector_delta, scalar_linear, vector_linear])
@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("K", [64, 100, 128, 256])
def test_every_configuration_belongs_to_a_class(engine: Callable[..., Any], chip: str, dtype: torch.dtype, K: int):
    one = CHIPS[chip]
    warmed = []
    for size in size_classes(one):
        sequences = 1 if size.lengths is None else len(size.lengths)
        warmed.append(engine(one, dtype, K, (size.heads * sequences, size.T, sequences, size.lengths is not None)))
    heads = [*range(1, 140), *range(140, 1000, 37)]
    for T, sequences, packed in itertools.product(
        (1, 64, 100, 2048, 8192, 10_000, 65536, 10**6), (1, 7), (False, True)
    ):
        for h in heads[:: 1 if sequences == 1 else 5]:
            found = engine(one, dtype, K, (h * sequences, T, sequences, packed))
            assert found in warmed, (h, T, sequences, packed, found)


def test_classes_are_small_enough_to_run():
    for size in size_classes(CHIPS["sm90"]):
        assert size.T * size.heads * 128 * 4 < 2**28
        assert size.lengths is None or sum(size.lengths) == size.T
