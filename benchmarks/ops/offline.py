# SPDX-License-Identifier: MIT
"""Compile what a call launches for a chip that is not there: registers, spills and shared memory, no GPU needed.

``with offline("sm90") as seen: fn(*cpu_tensors)`` compiles every Triton launch inside instead of running it.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fla.ops._common.audit import drops_a_product
from fla.ops._common.launch import Launcher


@dataclass
class Compiled:
    name: str
    seconds: float
    registers: int
    spills: int
    shared: int
    instructions: int
    kernel: Any

    def __str__(self) -> str:
        dropped = "  DROPS A PRODUCT" if drops_a_product(self.kernel.asm["cubin"]) else ""
        return (
            f"{self.name:16s} {self.seconds:5.1f} s  {self.registers:3d} regs  {self.spills:4d} spill bytes  "
            f"{self.shared:6d} shared  {self.instructions:5d} instr{dropped}"
        )


class _Driver:
    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def _tool(name: str) -> str:
    return os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)


def _usage(kernel: Any, arch: int) -> tuple[int, int, int]:
    """Registers, spilled bytes and instructions, as ptxas and the disassembler see them."""
    with tempfile.TemporaryDirectory() as d:
        ptx, cubin = os.path.join(d, "k.ptx"), os.path.join(d, "k.cubin")
        with open(ptx, "w") as f:
            f.write(kernel.asm["ptx"])
        suffix = "a" if arch >= 90 else ""
        tool = _tool("ptxas-blackwell") if arch >= 100 and os.path.exists(_tool("ptxas-blackwell")) else _tool("ptxas")
        p = subprocess.run(
            [tool, "-v", f"--gpu-name=sm_{arch}{suffix}", ptx, "-o", cubin], capture_output=True, text=True
        )
        regs = re.search(r"Used (\d+) registers", p.stderr)
        spills = re.search(r"(\d+) bytes spill stores", p.stderr)
        sass = subprocess.run([_tool("cuobjdump"), "-sass", cubin], capture_output=True, text=True).stdout
        return (
            int(regs[1]) if regs else -1,
            int(spills[1]) if spills else -1,
            len(re.findall(r"/\*[0-9a-f]{4,5}\*/", sass)),
        )


@contextlib.contextmanager
def offline(arch: str) -> Iterator[list[Compiled]]:
    number = int(arch.removeprefix("sm"))
    seen: list[Compiled] = []
    active, getitem = triton.runtime.driver._active, JITFunction.__getitem__
    triton.runtime.driver.set_active(_Driver(GPUTarget("cuda", number, 32)))

    def launch(self: JITFunction, grid: Any) -> Any:
        def compile_only(*args: Any, **kw: Any) -> Any:
            t = time.time()
            kernel = self.run(*args, grid=(1, 1, 1), warmup=True, **kw)
            seconds = time.time() - t
            seen.append(
                Compiled(
                    self.__name__,
                    seconds,
                    *_usage(kernel, number)[:2],
                    kernel.metadata.shared,
                    _usage(kernel, number)[2],
                    kernel,
                )
            )
            return kernel

        return compile_only

    JITFunction.__getitem__ = launch
    Launcher.remember = False
    try:
        yield seen
    finally:
        JITFunction.__getitem__ = getitem
        Launcher.remember = True
        triton.runtime.driver._active = active
