# SPDX-License-Identifier: MIT
"""The additive gate: write weights and forget gates of slots from unnormalised log scores."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.ops._common import checks
from fla.ops._common.gates import compute_dtype, to_output, without_autocast
from fla.ops._scan.torch_log_scan import log_scan

__all__ = ["additive_gate", "fused_additive_gate"]


@without_autocast
def additive_gate(
    x: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``fused_additive_gate`` on validated arguments, with all results in float32 (float64 for float64 ``x``)."""
    state = None if initial_state is None else initial_state.flatten(1)
    z, before, final = (t.unflatten(-1, x.shape[2:]) for t in log_scan(x.flatten(2), state, cu_seqlens))
    # Where nothing was seen nothing is forgotten, and nothing has no weight.
    k = (x.to(z.dtype) - z.masked_fill(z == -torch.inf, 0.0)).exp()
    g = (before - z).masked_fill(before == -torch.inf, 0.0)
    return k, g, final.unsqueeze(1)


def _check(x: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None) -> None:
    checks.check_tensor("x", x)
    sizes = checks.check_shapes(x=(x, "B T H D"))
    checks.check_floating(x=x, initial_state=initial_state)
    checks.check_same_device(x=x, initial_state=initial_state)
    device = None if cu_seqlens is None else x.device
    N = checks.check_varlen(cu_seqlens, None, sizes["B"], sizes["T"], initial_state, device=device)
    checks.check_shapes({**sizes, "N": N, "1": 1}, initial_state=(initial_state, "N 1 H D"))


def _outputs(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    k, g = (
        torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for dtype in (output_dtype, gate_dtype)
    )
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return k, g, x.new_empty((N, 1, *x.shape[2:]), dtype=compute_dtype(x.dtype))


@dispatch("gsa", validate=_check, facts=CallFacts(tensors=("x",), key=None, value=None), outputs=_outputs)
def fused_additive_gate(
    x: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    gate_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """With ``z_t = log(exp(z_{t-1}) + exp(x_t))``: weights ``exp(x_t - z_t)`` and log decays ``z_{t-1} - z_t``.

    A memory that decays by the gate and adds with the weight holds the softmax over time of what it was given. Before
    the first token ``z`` is minus infinity; the decay is 0 wherever that is so. Differentiable in ``x`` and the state,
    through all three results.

    Args:
        x: log scores ``[B, T, H, D]``; float16, bfloat16, float32 or float64.
        initial_state: ``z`` before the first token ``[N, 1, H, D]``, any float; minus infinity if None.
        cu_seqlens: boundaries of packed sequences ``[N + 1]``, int32 or int64, from 0 to T; B must be 1.
        output_dtype: dtype of the weights; that of ``x`` if None.
        gate_dtype: dtype of the log decays; that of ``x`` if None.

    Returns:
        Weights and log decays (natural) ``[B, T, H, D]``, and ``z`` after the last token ``[N, 1, H, D]`` (float32;
        float64 for float64).

    Raises:
        ArgumentError: (ValueError and AssertionError) shapes, devices, states or `cu_seqlens` that do not fit.
        DtypeError: (also TypeError) wrong dtypes.

    Source: Zhang et al., "Gated Slot Attention for Efficient Linear-Time Sequence Modeling" (2024), section 3.
    """
    k, g, z = additive_gate(x, initial_state, cu_seqlens)
    return to_output(k, output_dtype or x.dtype), to_output(g, gate_dtype or x.dtype), z
