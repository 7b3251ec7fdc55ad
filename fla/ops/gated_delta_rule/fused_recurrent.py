# SPDX-License-Identifier: MIT
"""Gated delta rule, token by token."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype, decay_gate, to_output
from fla.ops._delta.covers import covers_recurrent_gdn
from fla.ops._delta.op import HEAD_FIRST, STATE_LAYOUT, Sizes, Values, delta_op
from fla.ops._delta.outputs import recurrent_outputs
from fla.ops._delta.rows import GATED_DELTA_RULE, Decay, with_decay
from fla.ops._delta.torch_inputs import activate
from fla.ops._delta.torch_recurrent import recurrent_delta


def _check(values: Values, sizes: Sizes) -> None:
    if values["use_gate_in_kernel"] and values["g"] is None:
        raise ArgumentError("use_gate_in_kernel=True needs `g`, the raw gate.")
    if values["use_beta_sigmoid_in_kernel"] and values["beta"] is None:
        raise ArgumentError("use_beta_sigmoid_in_kernel=True needs `beta`.")


@delta_op(
    GATED_DELTA_RULE,
    {"g": "B T HV", "gk": "B T HV K", "gv": "B T HV V", "beta": "B T HV | B T HV V"},
    check=_check,
    outputs=recurrent_outputs,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._delta.entry:fused_recurrent_gated_delta_rule",
    triton_verifier=covers_recurrent_gdn,
)
def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule for few tokens per sequence, as in decoding. Differentiable in every tensor.

    The recurrence and the shared arguments are those of ``chunk_gated_delta_rule``.

    Args:
        g: log decay per head ``[B, T, HV]``, natural logarithm; the raw gate with ``use_gate_in_kernel``.
        gk: log decay per key channel ``[B, T, HV, K]``.
        gv: log decay per value channel ``[B, T, HV, V]``. The decays that are given multiply.
        beta: write strength ``[B, T, HV]`` or, per value channel, ``[B, T, HV, V]``; ones if None.
        use_gate_in_kernel: use ``-exp(A_log) * softplus(g + dt_bias)`` for ``g``.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of v, and the final states ``[N, HV, K, V]`` (float32, float64 for float64
        inputs) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states, flags.
        DtypeError: (also TypeError) wrong or mixed dtypes.
    """
    if use_gate_in_kernel and g is not None:
        g = decay_gate(g, A_log, dt_bias, None, False, compute_dtype(q.dtype))
    decay, kind = g, Decay.NONE if g is None else Decay.SCALAR
    if gk is not None:
        decay, kind = gk if g is None else gk + g.unsqueeze(-1), Decay.VECTOR
    row = with_decay(GATED_DELTA_RULE, kind)
    x = activate(
        row,
        q,
        k,
        v,
        decay,
        beta,
        l2norm=use_qk_l2norm_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    o, final = recurrent_delta(
        row,
        x if gv is None else dataclasses.replace(x, value_decay=gv),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return to_output(o, v.dtype), final if output_final_state else None


fused_recurrent_gdn = fused_recurrent_gated_delta_rule

__all__ = ["fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]
