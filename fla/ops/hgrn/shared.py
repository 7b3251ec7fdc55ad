# SPDX-License-Identifier: MIT
"""What the two forms of HGRN share: checks, call facts, empty outputs, and the PyTorch path."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import CallFacts
from fla.ops._common import checks
from fla.ops._common.gates import compute_dtype, to_output
from fla.ops._scan.torch_scan import linear_scan

FACTS = CallFacts(tensors=("x",), key=None, value=None)


def check_hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> None:
    """Validation of both forms."""
    for name, tensor in (("x", x), ("g", g)):
        checks.check_tensor(name, tensor)
    sizes = checks.check_shapes(x=(x, "B T D"), g=(g, "B T D"))
    checks.check_floating(x=x, g=g, initial_state=initial_state)
    checks.check_same_device(x=x, g=g, initial_state=initial_state)
    device = None if cu_seqlens is None else x.device
    sizes["N"] = checks.check_varlen(cu_seqlens, None, sizes["B"], sizes["T"], initial_state, device=device)
    checks.check_shapes(sizes, initial_state=(initial_state, "N D"))


def hgrn_outputs(
    x: Tensor, output_final_state: bool = False, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Empty ``(o, final_state)`` of a call."""
    o = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not output_final_state:
        return o, None
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return o, x.new_empty((N, x.shape[-1]), dtype=compute_dtype(x.dtype))


def hgrn(
    x: Tensor, g: Tensor, initial_state: Tensor | None, output_final_state: bool, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The PyTorch path of both forms."""
    h, final = linear_scan(x, g, initial_state, cu_seqlens)
    return to_output(h, x.dtype), final if output_final_state else None
