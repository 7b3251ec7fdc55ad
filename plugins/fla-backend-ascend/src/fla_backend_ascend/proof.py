# SPDX-License-Identifier: MIT
"""The one-time proof of an operation on this NPU: small calls, forward and backward, beside core's PyTorch path on the
CPU. Nobody has run these kernels on every chip and every triton-ascend; what comes out wrong here stays out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: RMS ratio: far above the rounding of bfloat16, far below any real defect.
TOLERANCE = 5e-2
HEADS, DIM = 2, 32
#: Tokens of two packed sequences: whole chunks and ragged ones, or a few tokens one by one.
CHUNKED, STEPS = (70, 31), (5, 3)

Results = dict[str, Tensor]


def _inputs(op: Any, lengths: tuple[int, int]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=generator)
    T = sum(lengths)
    names = op.signature.parameters
    x = {
        "q": F.normalize(rand(1, T, HEADS, DIM), dim=-1),
        "k": F.normalize(rand(1, T, HEADS, DIM), dim=-1),
        "v": rand(1, T, HEADS, DIM),
        "initial_state": rand(len(lengths), HEADS, DIM, DIM),
    }
    wide = op.operation in ("gla", "kda")
    gate = "gk" if "gk" in names and "g" not in names else "g"
    x[gate] = F.logsigmoid(rand(1, T, HEADS, *([DIM] if wide else [])))
    if "beta" in names:
        x["beta"] = rand(1, T, HEADS).sigmoid()
    return x


def _results(
    run: Callable[..., Any], x: Results, cu: Tensor, device: torch.device, dtype: torch.dtype, grad: bool
) -> Results:
    """Outputs, final states and gradients, on the CPU."""
    given = {
        n: t.to(device, t.dtype if n == "initial_state" else dtype, copy=True).requires_grad_(grad)
        for n, t in x.items()
    }
    with torch.enable_grad():
        o, final = run(**given, output_final_state=True, cu_seqlens=cu.to(device))
        found = {"outputs": o, "final states": final}
        if grad:
            (o.float().square().sum() + final.float().square().sum()).backward()
            found |= {f"gradients of {n}": t.grad for n, t in given.items()}
    return {n: t.detach().float().cpu() for n, t in found.items()}


def proof(
    op: Any, run: Callable[..., Any], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> tuple[bool, str | None]:
    """Whether `run`, called like `op`, is right on `device` for tensors of `dtype`, and what is wrong."""
    name = op.fn.__name__
    grad = name.startswith("chunk")
    lengths = CHUNKED if grad else STEPS
    cu = torch.tensor([0, lengths[0], sum(lengths)])
    x = {n: t.to(dtype).float() if n != "initial_state" else t for n, t in _inputs(op, lengths).items()}
    try:
        found = _results(run, x, cu, device, dtype, grad)
    except Exception as error:
        return False, f"a small call of {name} failed ({type(error).__name__}: {str(error).strip()[:2000]})"
    for what, want in _results(op.fn, x, cu, torch.device("cpu"), torch.float32, grad).items():
        ratio = ((found[what] - want).norm() / want.norm()).item()
        if not ratio < TOLERANCE:  # catches NaN too
            return False, f"a small call of {name} gives wrong {what} (RMS ratio {ratio:.3g})"
    return True, None
