# SPDX-License-Identifier: MIT
"""Gated delta rule, token by token."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import compute_dtype, decay_gate, to_output
from fla.ops._delta.covers import covers_recurrent_gdn
from fla.ops._delta.outputs import recurrent_outputs
from fla.ops._delta.rows import GATED_DELTA_RULE, Decay, with_decay
from fla.ops._delta.torch_inputs import activate
from fla.ops._delta.torch_recurrent import recurrent_delta
from fla.ops._delta.validate import check_beta, check_call, check_gate


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> None:
    sizes = check_call(
        q,
        k,
        v,
        {
            "g": (g, "B T HV"),
            "gk": (gk, "B T HV K"),
            "gv": (gv, "B T HV V"),
            "beta": (beta, "B T HV | B T HV V"),
        },
        scale=scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        parameters={"A_log": A_log, "dt_bias": dt_bias},
    )
    check_gate(use_gate_in_kernel, A_log, dt_bias, sizes["HV"], sizes["HV"], bounded=False)
    if use_gate_in_kernel and g is None:
        raise ArgumentError("use_gate_in_kernel=True needs `g`, the raw gate.")
    check_beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ArgumentError("use_beta_sigmoid_in_kernel=True needs `beta`.")


@dispatch(
    "gated_delta_rule",
    validate=_check,
    facts=CallFacts(),
    outputs=recurrent_outputs,
    renamed={"transpose_state_layout": "state_v_first"},
    removed={"head_first": "head_first was removed: pass tensors as [B, T, H, D]."},
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
