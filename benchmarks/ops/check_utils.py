# SPDX-License-Identifier: MIT
# ruff: noqa: E402  (the path comes first)
"""Check the helpers of fla.ops.utils on a GPU against float64 on the CPU: ``check_utils.py [time]``.

``time`` prints milliseconds of the Triton paths and of their PyTorch bodies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from check_delta import median_ms
from delta_reference import ratio

from fla.backends import use_backend
from fla.ops import utils

CU = [0, 0, 5, 700, 700, 1999, 2000]


def _cases(cu: Tensor | None) -> dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]]:
    on = lambda x: None if cu is None else cu.to(x.device)
    out = {
        "softmax": (lambda x: utils.softmax_fwd(x, None), (300, 777)),
        "logsumexp": (lambda x: utils.logsumexp_fwd(x, 0.3), (300, 777)),
    }
    for reverse in (False, True):
        for shape in ((1, 2000, 6), (1, 2000, 3, 40)):
            for size in (16, 64, 1024):
                out[f"local {size} {shape} {reverse}"] = (
                    lambda x, n=size, r=reverse: utils.chunk_local_cumsum(x, n, r, 0.5, on(x), None), shape,
                )  # fmt: skip
            out[f"global {shape} {reverse}"] = (
                lambda x, r=reverse: utils.chunk_global_cumsum(x, r, on(x), 0.5, None), shape,
            )  # fmt: skip
    for size in (64, 100):
        out[f"means {size}"] = (lambda x, n=size: utils.mean_pooling(x, n, on(x)), (1, 2000, 3, 40))
    if cu is not None:
        for side in ("left", "right"):
            unpack = lambda x, s=side: utils.unpack_sequence(x, on(x), s)
            out[f"unpack {side}"] = (unpack, (2000, 3, 40))
            out[f"pack {side}"] = (lambda x, s=side, f=unpack: utils.pack_sequence(f(x, s), on(x), s), (2000, 3, 40))
    return out


def check(device: str = "cuda") -> list[str]:
    """What is wrong, one line each."""
    wrong = []
    for packed in (False, True):
        cu = torch.tensor(CU) if packed else None
        for name, (fn, shape) in _cases(cu).items():
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
                weights: Tensor | None = None
                got, want = [], []
                for out, leaf in ((got, x.to(device)), (want, x.double())):
                    leaf.requires_grad_()
                    with use_backend("triton" if out is got else "torch", strict=True):
                        y = fn(leaf)
                        # Exact in the result's dtype: both sides begin with the same gradient.
                        if weights is None:
                            weights = torch.arange(y.numel()).view(y.shape).cos().to(y.dtype).double()
                        (y.double() * weights.to(y.device)).sum().backward()
                    out += [y.detach().cpu(), leaf.grad.cpu()]
                limit = 5e-5 if dtype == torch.float32 else 5e-3
                for a, b, part in zip(got, want, ("result", "gradient"), strict=True):
                    if not ratio(a, b) < limit * (1 if part == "result" else 2):
                        wrong.append(f"{name} packed {packed} {dtype} {part}: {ratio(a, b):.1e}")
    return wrong


def timing() -> None:
    x = torch.randn(1, 8192, 96, device="cuda")
    wide = torch.randn(1, 8192, 96, 128, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, 1000, 1100, 3000, 5500, 7000, 8192], device="cuda")
    calls = {
        "local 64 [8192, 96]": lambda: utils.chunk_local_cumsum(x, 64),
        "local 64 [8192, 96, 128] bf16": lambda: utils.chunk_local_cumsum(wide, 64),
        "global [8192, 96]": lambda: utils.chunk_global_cumsum(x),
        "global [8192, 96, 128] bf16": lambda: utils.chunk_global_cumsum(wide),
        "softmax [786432, 128] bf16": lambda: utils.softmax_fwd(wide),
        "logsumexp": lambda: utils.logsumexp_fwd(wide),
        "means 64": lambda: utils.mean_pooling(wide, 64),
        "unpack": lambda: utils.unpack_sequence(wide[0], cu),
    }
    for name, fn in calls.items():
        row = []
        for backend in ("triton", "torch"):
            with use_backend(backend, strict=True):
                row.append(f"{backend} {median_ms(fn):.3f}")
        print(name, *row, flush=True)


if __name__ == "__main__":
    lines = check()
    print("\n".join(lines) or "all right")
    if "time" in sys.argv[1:]:
        timing()
    sys.exit(bool(lines))
