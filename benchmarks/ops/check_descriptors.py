# SPDX-License-Identifier: MIT
"""Look for wrong descriptors in the machine code of the vector-decay kernels. No GPU needed.

``check_descriptors.py [CASE ...] [--kernels NAME ...]``: compiles for sm90, with Triton's own ptxas, what cases of
check_kda.py launch, forward and backward, and compares each kernel's machine code with its PTX (`descriptor_values`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

import torch  # noqa: E402
import triton  # noqa: E402
from check_kda import BF, CASES, call  # noqa: E402
from descriptor_values import differing_descriptors  # noqa: E402
from sass_descriptors import wrong_descriptors  # noqa: E402
from stub_driver import stub_driver  # noqa: E402
from vector_reference import make_inputs  # noqa: E402

from fla.ops._common.bound import plain  # noqa: E402
from fla.ops._common.launch import Fixed  # noqa: E402


def machine_code(cubin: bytes) -> str:
    """What ``cuobjdump -sass``, which Triton brings along, makes of it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        return subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True).stdout


def faults(kernel: Any) -> list[str]:
    sass = machine_code(kernel.asm["cubin"])
    try:
        return differing_descriptors(kernel.asm["ptx"], sass)
    except ValueError:  # a loop was unrolled
        return wrong_descriptors(sass)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    parser.add_argument("--kernels", nargs="+")
    options = parser.parse_args()
    found: dict[str, list[str]] = {}

    def compile_only(self: Any, grid: int, args: tuple[Any, ...], given: Any) -> None:
        if options.kernels is None or self.fn.__name__ in options.kernels:
            kernel = self.fn.warmup(*plain(args, self._gluon), grid=(1,), **self.meta, **self.options)
            if kernel.hash not in found:
                found[kernel.hash] = wrong = faults(kernel)
                print("BAD" if wrong else "ok ", name, kernel.metadata.name, *wrong[:3], sep="  ", flush=True)

    with stub_driver():
        Fixed.__call__ = compile_only  # type: ignore[method-assign]
        for name in options.cases:
            inputs, settings = CASES[name]
            x = make_inputs(**{"K": 128, "dtype": BF, **inputs})
            known = {n: s for n, s in settings.items() if n not in ("far", "long", "huge", "scale_do")}
            with torch.no_grad():
                call(x, **known)
            out = [o for o in call({n: t.requires_grad_() for n, t in x.items()}, **known) if o is not None]
            torch.autograd.grad(out, list(x.values()), out)
    return any(found.values())


if __name__ == "__main__":
    sys.exit(main())
