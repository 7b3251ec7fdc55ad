# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Compile the kernels in Gluon for sm90 with the Triton that is installed. No GPU needed.

``check_gluon.py [--quick] [OP ...]``: each for full and for ragged chunks, by one group of warps and by pairs, forward
and backward; whether ptxas dropped a product, spilled or serialized, and whether descriptors of matrix instructions are
those of the PTX. Quick: full chunks by one group only. A version of Triton joins `fla.ops._common.gluon.VERSIONS` when
this finds nothing and the checks on a card are right.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch
import triton
from descriptor_values import differing_descriptors
from stub_driver import stub_driver

from fla.backends import use_backend
from fla.ops._common import gluon
from fla.ops._common.audit import drops_a_product
from fla.ops._common.bound import plain
from fla.ops._common.launch import Fixed

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Heads that one group of warps serves each, and enough for pairs of groups.
HEADS = {"few": 2, "many": 70}


def call(op: str, T: int, H: int) -> None:
    """Forward and backward of an op, and forward alone, which keeps nothing for a backward."""
    import fla.ops

    op, *how = op.split()
    half = torch.float16 if "fp16" in how else torch.bfloat16
    D = next((int(x[1:]) for x in how if x[0] == "D"), 128)

    def leaf(*shape: int, dtype: Any = half) -> Any:
        return torch.zeros(shape, dtype=dtype, requires_grad=True)

    x = {n: leaf(1, T, H, D) for n in "qkv"}
    more: dict[str, Any] = {}
    if op in ("gated_delta_rule", "delta_rule", "kda"):
        x["beta"] = leaf(1, T, H)
        more["use_qk_l2norm_in_kernel"] = True
    if op == "comba":
        x |= {"p": leaf(1, T, H, D), "beta": leaf(1, T, H)}
        more["use_qk_l2norm_in_kernel"] = True
    if op in ("gated_delta_rule", "comba", "simple_gla"):
        x["g"] = leaf(1, T, H, dtype=torch.float32)
    if op == "kda":
        x["g"] = leaf(1, T, H, D)
        more["safe_gate"] = True
    fn = getattr(fla.ops, f"chunk_{op}")
    with use_backend("triton", strict=True):
        with torch.no_grad():
            fn(**x, **more)
        o = fn(**x, **more)[0]
        torch.autograd.grad(o, list(x.values()), torch.zeros_like(o))


OPS = (
    "gated_delta_rule", "delta_rule", "comba", "kda", "gated_delta_rule fp16", "comba fp16", "kda fp16", "simple_gla",
    "retention", "linear_attn", "gated_delta_rule D64", "comba D64", "gated_delta_rule D256",
    "gated_delta_rule D256 fp16",
)  # fmt: skip


def faults(kernel: Any) -> list[str]:
    found = ["drops a product"] if drops_a_product(kernel.asm["cubin"]) else []
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(kernel.asm["cubin"])
        ptx.write_text(kernel.asm["ptx"])

        def output(tool: str, *args: Any) -> str:
            done = subprocess.run([TOOLS / tool, *args], capture_output=True, text=True, check=True)
            return done.stdout + done.stderr

        stack = re.search(r"STACK:(\d+)", output("cuobjdump", "-res-usage", cubin))
        if stack and int(stack[1]) > 128:
            found.append(f"{stack[1]} bytes of stack")
        try:
            found += differing_descriptors(kernel.asm["ptx"], output("cuobjdump", "-sass", cubin))
        except ValueError as error:
            found.append(str(error))
        if "serialized" in output("ptxas", "-v", "--gpu-name=sm_90a", ptx, "-o", Path(folder, "again")):
            found.append("products wait for each other")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ops", nargs="*", default=OPS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    reason = gluon.why_not()
    if reason is not None:
        print(reason)
        return 2
    found: dict[str, list[str]] = {}
    name = ""

    def compile_only(self: Any, grid: int, args: tuple[Any, ...], given: Any) -> None:
        if not self._gluon:
            return
        kernel = self.fn.warmup(*plain(args, True), grid=(1,), **self.meta, **self.options)
        if kernel.hash not in found:
            found[kernel.hash] = wrong = faults(kernel)
            print("BAD" if wrong else "ok ", name, kernel.metadata.name, *wrong[:3], sep="  ", flush=True)

    with stub_driver():
        Fixed.__call__ = compile_only  # type: ignore[method-assign]
        for op in options.ops:
            for size, heads in HEADS.items() if not options.quick else [("few", 2)]:
                for T in (128,) if options.quick else (128, 100):
                    name = f"{op}, {size}{'' if T % 64 == 0 else ', ragged'}"
                    call(op, T, heads)
    print(f"Triton {triton.__version__}: {len(found)} kernels, {sum(map(bool, found.values()))} with faults")
    return any(found.values()) or gluon.why_not() is not None


if __name__ == "__main__":
    sys.exit(main())
