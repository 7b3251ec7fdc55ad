# SPDX-License-Identifier: MIT
"""The launch rule of the vector-decay kernels, which needs no GPU, and the reader of their machine code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from sass_descriptors import wrong_descriptors

from fla.ops._common.policy import CHIPS
from fla.ops._delta.vector_covers import bounded_gate, covers_chunk_delta
from fla.ops._delta.vector_policy import plan

DTYPES = ("bfloat16", "float16", "float32")


def make(chip="sm90", dtype="bfloat16", K=128, V=128, sequences=1, heads=96, length=8192, **more):
    settings = {"exact": False, "normed": True, **more}
    return plan(CHIPS[chip], dtype, K, V, sequences=sequences, heads=heads, length=length, **settings)


@pytest.mark.parametrize("chip", list(CHIPS))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [16, 24, 60, 64, 100, 128, 153, 256])
@pytest.mark.parametrize("exact", [False, True])
def test_blocks_divide_the_padded_head_dimensions(chip, dtype, K, exact):
    p = make(chip, dtype, K, K, exact=exact)
    assert p.kp >= K
    assert not any(p.kp % b for b in (p.kb, p.gkb))
    assert not any(p.vp % b for b in (p.bv, p.bv_bwd, p.vb))
    assert not (p.vp + p.kp) % p.bv_map
    assert not p.vp % p.bv_map


def test_nothing_depends_on_length_or_batch_but_the_split():
    a, b = make(length=4096), make(length=100_000, sequences=3)
    assert a == b


def test_long_sequences_of_few_heads_are_split_and_packed_ones_are_not():
    assert make(heads=16, length=32768).segments == 8
    assert make(heads=16, length=2048, sequences=4).segments == 1
    assert make(heads=4, length=32768, sequences=8, varlen=True).segments == 1


def test_the_first_stage_is_a_loop_of_one_turn_where_that_was_measured():
    assert make().loop
    assert make(dtype="float16", K=64).loop
    assert make().prep.regs == 168
    assert not any(make(**k).loop for k in ({"exact": True}, {"erase": True}, {"K": 256}, {"dtype": "float32"}))
    assert not any(make(K=K, V=24).loop for K in (16, 24, 32))
    assert not any(make(chip).loop for chip in ("sm80", "sm100", "sm120"))


@pytest.mark.parametrize("exact", [False, True])
def test_norms_of_narrow_heads_are_not_diagonals_of_products(exact):
    assert make(K=33, exact=exact).squares
    assert not any(make(chip, K=K, exact=exact).squares for chip in CHIPS for K in (16, 24, 32))
    assert not any(make("interpreter", K=K, exact=exact).squares for K in (32, 128))
    assert not make(dtype="float32").squares
    assert make(dtype="float16", exact=exact).squares is not exact


def test_three_programs_a_multiprocessor_make_gradients_where_they_fit():
    assert make().grad.regs == 168
    assert make(K=64, V=64).grad.regs == 168
    assert make(gated=True, light=True).grad.regs == 168
    wide = ({"exact": True}, {"V": 256}, {"K": 32, "V": 32}, {"dtype": "float32"}, {"chip": "sm80"})
    assert not any(make(**k).grad.regs for k in (*wide, {"gated": True}))


def test_programs_that_look_for_strong_gates_fill_the_chip_in_odd_strides():
    for name, chip in CHIPS.items():
        assert make(name, exact=True).seekers == 2 * chip.sms + 1


def test_the_fixed_anchor_never_meets_fp16():
    assert make(dtype="float16").score == "bf16"
    assert make(dtype="float16", exact=True).score == "fp16"


def test_unbounded_16_bit_gradients_stay_off_the_warpgroup_instructions():
    assert make(exact=True).gkb == 32


@pytest.mark.parametrize(
    ("call", "bounded"),
    [((True, False, -5.0), True), ((True, True, None), False), ((True, False, -5.1), False),
     ((False, True, None), True), ((False, False, -5.0), False)],
)  # fmt: skip
def test_which_gates_count_as_bounded(call, bounded):
    assert bounded_gate(*call) is bounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_training_is_covered_for_any_gate_in_every_dtype_but_float64(dtype):
    q = torch.zeros(1, 2, 1, 16, dtype=dtype, requires_grad=True)
    assert covers_chunk_delta(q, q) == (True, None)
    assert not covers_chunk_delta(q.double(), q.double())[0]


def test_wide_heads_and_empty_calls_are_left_to_pytorch():
    q = torch.zeros(1, 2, 1, 300)
    assert "256" in str(covers_chunk_delta(q, q)[1])
    assert not covers_chunk_delta(q[:, :0], q[:, :0])[0]


SASS = """
        /*0010*/                   USHF.L.U32 UR4, UR9, 0x5, URZ ;
        /*0020*/                   USGXT.U32 UR44, UR10, 0xe ;
        /*0030*/                   UMOV UR46, UR44 ;
        /*0040*/                   UIADD3 UR34, UP0, {base}, 0x2, URZ ;
        /*0050*/                   HGMMA.64x32x16.F32.BF16 R40, R92, gdesc[UR44], RZ, !UPT ;
        /*0060*/                   HGMMA.64x32x16.F32.BF16 R40, R96, gdesc[UR32], R40, gsb0 ;
"""


def test_a_descriptor_from_another_register_is_found():
    assert wrong_descriptors(SASS.format(base="UR44")) == []
    (found,) = wrong_descriptors(SASS.format(base="UR4"))
    assert "UR4 is USHF" in found


def test_hoppers_state_passes_in_16_bits_have_groups_that_share_tiles_where_heads_fill_the_chip():
    assert make().groups == 2
    assert make(heads=16).groups == 1
    assert make(V=256, heads=40).groups == 2
    assert make(erase=True, exact=True).groups == 2
    assert make(dtype="float16").groups == 2


@pytest.mark.parametrize(
    "other",
    [{"chip": c} for c in ("sm80", "sm100", "interpreter")]
    + [{"dtype": "float32"}, {"K": 64}, {"K": 100}, {"V": 64}, {"V": 192}, {"aligned": False}],
)
def test_other_calls_keep_their_state_passes_in_triton(other):
    assert make(**other).groups == 0
