# SPDX-License-Identifier: MIT
"""How the vector-decay kernels are launched: compiled-kernel caches, descriptors, constant operands, type names."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.launch import Launcher
from fla.ops._common.vector_launch import (  # noqa: F401
    ONES_TYPES,
    TL_TYPES,
    TORCH_TYPES,
    NamedLauncher,
    aligned,
    constant,
    matrix_of,
    rows_of,
)
from fla.ops._delta.kernels.common import any_long
from fla.ops._delta.kernels.vector_grad import vector_grad, vector_scores
from fla.ops._delta.kernels.vector_grad_exact import vector_grad_exact
from fla.ops._delta.kernels.vector_prep import vector_prep
from fla.ops._delta.kernels.vector_scan import vector_merge, vector_scan, vector_scan_bwd

run_prep, run_scan, run_scan_bwd = (
    NamedLauncher(vector_prep),
    NamedLauncher(vector_scan),
    NamedLauncher(vector_scan_bwd),
)
run_any = Launcher(any_long)
run_merge, run_scores = NamedLauncher(vector_merge), NamedLauncher(vector_scores)
run_grad, run_grad_exact = NamedLauncher(vector_grad), NamedLauncher(vector_grad_exact)


@constant
def one_matrices(dtype: torch.dtype, device: torch.device) -> Tensor:
    """0/1 matrices `[8, 64, 64]` whose products with gates `[64 tokens, channels]` are sums over tokens.

    0: up to and with the token, 1: after it, both inside its block of 32; 2: all of the other block; 3..7: levels
    of the tree of the exact scores. Blocks of 32, 16, 8, 4 and 2 tokens are split in the middle: a token of the second
    half needs the decay from the middle up to itself, one of the first half the decay after itself up to the middle, so
    that factors never exceed 1, for any gate.
    """
    i = torch.arange(64, device=device)[:, None]
    t = torch.arange(64, device=device)[None, :]
    same = i // 32 == t // 32
    out = [(i >= t) & same, (i < t) & same, ~same]
    for half in (16, 8, 4, 2, 1):
        mid = i // (2 * half) * (2 * half) + half
        out.append(((i >= mid) & (t >= mid) & (t <= i)) | ((i < mid) & (t > i) & (t < mid)))
    return torch.stack(out).to(dtype)
