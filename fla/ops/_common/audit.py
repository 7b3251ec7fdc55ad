# SPDX-License-Identifier: MIT
"""Machine code that is known to be wrong is not launched.

ptxas 12.8 (in triton 3.6) sometimes takes the result of a wgmma for zero and drops the instruction: the kernel compiles
and its results are silently wrong. It was seen on sm90 in a branch whose only product is also the other branch's. What
stays behind is an empty group, ``HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ``: nothing that anybody would write, and found in
microseconds. Kernels are written so that this does not happen; with a compiler that nobody has tried it is an error
instead of a wrong number.
"""

from __future__ import annotations

from typing import Any

# An HGMMA with no destination (RZ) and no descriptor (URZ).
_EMPTY_GROUP = (0x000000003FFF79F0).to_bytes(8, "little")

# Kernels that have been looked at, by Triton's hash.
_seen: set[str] = set()


class MiscompiledKernelError(RuntimeError):
    """The compiler has dropped a matrix product of a kernel."""


def drops_a_product(cubin: bytes) -> bool:
    """Whether sm90 machine code holds a group of matrix products that ptxas has emptied."""
    at = cubin.find(_EMPTY_GROUP)
    while at >= 0 and at % 8:
        at = cubin.find(_EMPTY_GROUP, at + 1)
    return at >= 0


def audit(kernel: Any) -> None:
    """Look at a kernel that Triton has compiled or loaded (the interpreter gives None), the first time it is launched.

    Raises:
        MiscompiledKernelError: a matrix product is missing from its code.
    """
    asm = getattr(kernel, "asm", None)
    if asm is None or kernel.hash in _seen:
        return
    if "cubin" not in asm or kernel.metadata.target.arch != 90:
        return
    if drops_a_product(asm["cubin"]):
        raise MiscompiledKernelError(
            f"ptxas has dropped a matrix product of the kernel {kernel.name!r}, its results would be wrong. Another "
            'Triton version may compile it right; `fla.backends.use_backend("torch")` runs without it. Please report '
            "this call with the output of `fla doctor`."
        )
    _seen.add(kernel.hash)
