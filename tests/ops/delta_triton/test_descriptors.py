# SPDX-License-Identifier: MIT
"""Matrix instructions read the tiles that they are meant to: what compares machine code with PTX, and narrow heads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton
from descriptor_values import differing_descriptors

ROOT = Path(__file__).parents[3]
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PTX = """
	mov.b32 	%r1, global_smem;
	add.s32 	%r2, %r1, 4096;
	bfe.u32 	%r3, %r2, 4, 14;
	cvt.u64.u32 	%rd1, %r3;
	or.b64 	%rd2, %rd1, 4611686293305294848;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r8,%r9}, {%r4,%r5}, %rd2, 0, 1, 1, 1;
	add.s64 	%rd3, %rd1, 4611686293305294850;
	wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%r8,%r9}, {%r6,%r7}, %rd3, 1, 1, 1, 1;
"""
SASS = """
        /*0010*/                   S2UR UR4, SR_CgaCtaId ;
        /*0020*/                   UMOV UR8, 0x400 ;
        /*0030*/                   ULEA UR8, UR4, UR8, 0x18 ;
        /*0040*/                   UIADD3 UR9, UR8, 0x1000, URZ ;
        /*0050*/                   USHF.R.U32.HI UR6, URZ, 0x4, UR9 ;
        /*0060*/                   UMOV UR7, 0x40000040 ;
        /*0070*/                   USGXT.U32 UR6, UR6, 0xe ;
        /*0080*/                   HGMMA.64x32x16.F32.BF16 R40, R92, gdesc[UR4], RZ, !UPT ;
        /*0090*/                   UIADD3 UR14, UP0, {base}, {step}, URZ ;
        /*00a0*/                   UIADD3.X UR15, UR7, URZ, URZ, UP0, !UPT ;
        /*00b0*/                   HGMMA.64x32x16.F32.BF16 R40, R96, gdesc[UR12], R40, gsb0 ;
"""


def test_machine_code_that_reads_what_ptx_says_has_no_faults():
    assert differing_descriptors(PTX, SASS.format(base="UR6", step="0x2")) == []


def test_another_address_and_a_register_that_nothing_has_set_are_found():
    (found,) = differing_descriptors(PTX, SASS.format(base="UR6", step="0x4"))
    assert found == "matrix instruction 1: B is 0x4000004000000144 instead of 0x4000004000000142"
    (found,) = differing_descriptors(PTX, SASS.format(base="UR34", step="0x2"))
    assert "nothing has set" in found


def test_what_is_not_constant_is_passed_over():
    unknown = "        /*0085*/                   R2UR UR6, R4 ;\n        /*0090*/"
    assert differing_descriptors(PTX, SASS.format(base="UR6", step="0x4").replace("        /*0090*/", unknown)) == []


def test_code_with_another_number_of_matrix_instructions_is_not_compared():
    with pytest.raises(ValueError, match="1 matrix instructions in PTX, 2 in machine code"):
        differing_descriptors(PTX[: PTX.index("\tadd.s64")], SASS.format(base="UR6", step="0x2"))


@pytest.mark.skipif(not (TOOL.exists() and shutil.which("gcc")), reason="needs gcc and Triton's tools for NVIDIA")
def test_the_first_stage_of_narrow_heads_reads_the_tiles_that_it_is_meant_to(tmp_path):
    script = ROOT / "benchmarks" / "ops" / "check_descriptors.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(script), "K16 V24", "--kernels", "vector_prep"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 2, done.stdout
