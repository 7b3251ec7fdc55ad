# SPDX-License-Identifier: MIT
"""Machine code from which ptxas has dropped a matrix product is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fla.ops._common.audit import MiscompiledKernelError, audit, drops_a_product

# What ptxas 12.8 made of `vector_prep` once: `HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0`.
EMPTY = (0x000000003FFF79F0).to_bytes(8, "little") + (0x000FE6000C0000FF).to_bytes(8, "little")
# `HGMMA.64x64x16.F32 R24, gdesc[UR12].tnspB, RZ, !UPT`
WHOLE = (0x00E000000C1879F0).to_bytes(8, "little") + (0x003FE600081878FF).to_bytes(8, "little")


def _kernel(cubin: bytes, arch: int = 90, name: str = "k") -> SimpleNamespace:
    target = SimpleNamespace(arch=arch)
    return SimpleNamespace(
        asm={"cubin": cubin}, metadata=SimpleNamespace(target=target), hash=f"{name}{arch}{cubin.hex()}", name=name
    )


def test_an_emptied_group_is_found_at_instruction_boundaries_only():
    assert drops_a_product(bytes(64) + EMPTY + WHOLE)
    assert not drops_a_product(bytes(64) + WHOLE)
    assert not drops_a_product(bytes(63) + EMPTY)
    assert drops_a_product(bytes(63) + EMPTY + bytes(1) + EMPTY)


def test_the_error_names_the_kernel_and_comes_every_time():
    for _ in range(2):
        with pytest.raises(MiscompiledKernelError, match=r"'vector_prep'.*fla doctor"):
            audit(_kernel(EMPTY, name="vector_prep"))


def test_other_code_other_chips_and_the_interpreter_pass():
    audit(_kernel(WHOLE))
    audit(_kernel(EMPTY, arch=100))
    audit(None)
