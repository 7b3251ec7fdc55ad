# SPDX-License-Identifier: MIT
"""Comba, token by token."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.gates import to_output
from fla.ops._delta.covers import covers_recurrent_comba
from fla.ops._delta.op import delta_op
from fla.ops._delta.outputs import k_first_outputs
from fla.ops._delta.rows import COMBA
from fla.ops._delta.torch_recurrent import recurrent_delta
from fla.ops.comba.inputs import check_read_key, comba_operands


@delta_op(
    COMBA,
    {"g": "B T HV", "beta": "B T HV | B T HV V"},
    check=check_read_key,
    outputs=k_first_outputs,
    triton="fla.ops._delta.entry:fused_recurrent_comba",
    triton_verifier=covers_recurrent_comba,
)
def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    p: Tensor | None,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Comba for few tokens per sequence, as in decoding. Mind the order: ``p`` before ``v``.

    The recurrence and the arguments are those of ``chunk_comba``, except that ``beta`` may also be ``[B, T, HV, V]``,
    one strength per value channel. Differentiable in every tensor.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of v, and the final states ``[N, HV, K, V]`` (float32, float64 for float64
        inputs) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states.
        DtypeError: (also TypeError) wrong or mixed dtypes.
    """
    row, x = comba_operands(q, k, v, p, g, beta, use_qk_l2norm_in_kernel)
    o, final = recurrent_delta(
        row,
        x,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    return to_output(o, v.dtype), final if output_final_state else None


__all__ = ["fused_recurrent_comba"]
