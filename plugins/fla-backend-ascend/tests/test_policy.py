# SPDX-License-Identifier: MIT
"""Tile sizes for the published buffers, and what is known about chips: pure functions."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from fla_backend_ascend import chips, policy
from fla_backend_ascend.chips import KIB
from fla_backend_ascend.plugin import MAX_WIDE_K
from fla_backend_ascend.policy import TooWide, described, fit

from fla.ops._delta.policy import scalar_plan as delta_scalar
from fla.ops._delta.vector_policy import plan as delta_vector
from fla.ops._linear.policy import scalar_plan as linear_scalar
from fla.ops._linear.vector_policy import vector_plan as linear_vector

BUFFERS = sorted({*chips.UNIFIED_BUFFER.values(), chips.FALLBACK})
DTYPES = ("float16", "bfloat16", "float32")


def plans(buffer, dtype, K, V):
    chip = described(buffer, 20)
    kind = getattr(torch, dtype)
    yield delta_scalar(chip, kind, K, V, 32, True)
    for exact in (False, True) if K <= MAX_WIDE_K or dtype != "float32" else ():
        call = {"sequences": 1, "heads": 32, "length": 8192, "exact": exact, "normed": True}
        yield delta_vector(chip, dtype, K, V, **call)
    yield linear_scalar(chip, kind, K, V, 32)
    yield linear_vector(chip, dtype, K, V, heads=32)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_plan_fits_the_buffer(buffer, dtype):
    for K, V in itertools.product((16, 64, 100, 128, 256), repeat=2):
        for plan in plans(buffer, dtype, K, V):
            needs, _ = policy._KINDS[type(plan)]
            assert max(size for _, size, _ in needs(plan)) <= buffer, plan


def test_plans_ask_for_nothing_that_triton_ascend_lacks():
    for plan in plans(192 * KIB, "bfloat16", 128, 128):
        for name in ("descriptors", "tma", "grad_tma"):
            assert not getattr(plan, name, False)
        options = [getattr(plan, name).options(described(192 * KIB, 20)) for name in ("grad",)]
        assert options == [{"num_warps": 1, "num_stages": 1}]


def test_a_smaller_buffer_gives_smaller_blocks():
    large, small = (next(plans(size * KIB, "float16", 128, 128)) for size in (192, 128))
    assert small.block_v < large.block_v or small.grad_v < large.grad_v


def test_what_cannot_fit_is_said():
    with pytest.raises(TooWide, match="bytes of unified buffer, there are 1024"):
        next(plans(1024, "float32", 128, 128))


def test_nvidia_plans_stay_as_they_are():
    from fla.ops._common.policy import CHIPS

    plan = delta_scalar(CHIPS["sm90"], torch.bfloat16, 128, 128, 96, True)
    assert plan.descriptors
    assert plan.forward.stages == 3


def test_the_buffer_by_the_name_of_the_soc():
    assert chips.capacity("Ascend910B3") == 192 * KIB
    assert chips.capacity("Ascend910_9382") == 192 * KIB
    assert chips.capacity("Ascend310P3") == 256 * KIB


def test_the_variable_has_the_last_word():
    assert chips.capacity("Ascend910B3", "1048576") == 128 * KIB
    for wrong in ("0", "-8", "12", "many"):
        with pytest.raises(ValueError, match="ASCEND_UB_CAPACITY_BITS must be a positive multiple of 8"):
            chips.capacity(None, wrong)


def test_an_unknown_soc_gets_the_least_with_a_warning():
    with pytest.warns(RuntimeWarning, match="does not know the unified buffer of Ascend999"):
        assert chips.capacity("Ascend999") == min(chips.UNIFIED_BUFFER.values())


def test_cores_come_from_the_driver():
    npu = types.SimpleNamespace(
        get_device_name=lambda i: "Ascend910B1",
        get_device_properties=lambda i: types.SimpleNamespace(cube_core_num=24, vector_core_num=48),
    )
    assert chips.facts(npu, 0) == (192 * KIB, 24)
    npu.get_device_properties = lambda i: types.SimpleNamespace()
    assert chips.facts(npu, 0) == (192 * KIB, chips.CORES)


def test_fit_keeps_what_fits():
    plan = delta_scalar(described(1 << 30, 20), torch.float16, 64, 64, 32, True)
    assert fit(1 << 30, plan) == plan
