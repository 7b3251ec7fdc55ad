# SPDX-License-Identifier: MIT
"""Kimi Delta Attention, token by token: decoding, and a serving entry with a pool of states."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.ops._common.gates import to_output
from fla.ops._delta.covers import covers_chunk, covers_recurrent_kda
from fla.ops._delta.op import HEAD_FIRST, STATE_LAYOUT, Sizes, Values, delta_op
from fla.ops._delta.outputs import recurrent_outputs
from fla.ops._delta.rows import KDA
from fla.ops._delta.serving import check_serving, serve
from fla.ops._delta.torch_inputs import activate
from fla.ops._delta.torch_recurrent import recurrent_delta

_SHAPES = {"g": "B T HV K", "beta": "B T HV | B T HV V"}


@delta_op(
    KDA,
    _SHAPES,
    outputs=recurrent_outputs,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    triton="fla.ops._delta.vector_decode:fused_recurrent_kda",
    triton_verifier=covers_recurrent_kda,
)
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention for few tokens per sequence, as in decoding.

    The recurrence and the arguments are those of ``chunk_kda``, except that ``beta`` may also be ``[B, T, HV, V]``, one
    strength per value channel. Differentiable in every tensor.

    Returns:
        ``o [B, T, HV, V]`` in the dtype of v, and the final states ``[N, HV, K, V]`` (float32, float64 for float64
        inputs) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states, flags.
        DtypeError: (also TypeError) wrong or mixed dtypes.
    """
    x = activate(
        KDA,
        q,
        k,
        v,
        g,
        beta,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    o, final = recurrent_delta(
        KDA,
        x,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return to_output(o, v.dtype), final if output_final_state else None


def _check_serving(values: Values, sizes: Sizes) -> None:
    tensors = [values[name] for name in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")]
    options = ("inplace_final_state", "state_v_first", "cu_seqlens", "ssm_state_indices", "num_accepted_tokens", "out")
    check_serving(
        sizes,
        values["v"],
        tensors,
        initial_state=values["initial_state"],
        **{name: values[name] for name in options},
    )


@delta_op(
    KDA,
    _SHAPES,
    check=_check_serving,
    renamed=STATE_LAYOUT,
    removed=HEAD_FIRST,
    inplace=True,
    triton="fla.ops._delta.vector_decode:fused_recurrent_kda_fwd",
    triton_verifier=covers_chunk,
)
def fused_recurrent_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    output_final_state: bool = False,
    inplace_final_state: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention for serving: preallocated output, states updated in place, optionally in a pool.

    The recurrence and the shared arguments are those of ``fused_recurrent_kda``. No gradients: inputs that require one
    are an error in grad mode.

    Args:
        initial_state: states ``[N, HV, K, V]`` in sequence order, or with ``ssm_state_indices`` a pool
            ``[slots, HV, K, V]``; any floating dtype.
        output_final_state: return final states when they are not written in place.
        inplace_final_state: overwrite ``initial_state`` and return it.
        ssm_state_indices: pool slots, integers. ``[N]``: sequence n starts from slot ``[n]`` and leaves its last state
            there. ``[N, S]``: it starts from slot ``[n, num_accepted_tokens[n] - 1]`` (column 0 without that argument)
            and leaves the state after its token t in slot ``[n, t]``. A slot outside the pool, such as -1, is skipped:
            a sequence that starts there is not computed, a state that belongs there is not stored.
        num_accepted_tokens: ``[N]`` integers from 1 to ``S``: how many draft tokens of the previous call were accepted.
            A sequence with another value is skipped.
        out: output ``[B, T, HV, V]`` to write into; rows of skipped sequences keep their content (zero if not given).

    Returns:
        ``out``, and the state: ``initial_state`` itself in place; else, if ``output_final_state``, new final states
        ``[N, HV, K, V]``, in pool mode the state after every token ``[tokens, HV, K, V]`` (float32).

    Raises:
        ArgumentError: (ValueError and AssertionError) as ``fused_recurrent_kda``; in place without ``initial_state``;
            ``out`` not like ``v``; two sequences writing one slot, or one starting from a slot that another writes (on
            the CPU); ``out``, or a state written in place, whose elements share memory.
        DtypeError: (also TypeError) wrong or mixed dtypes.
    """
    x = activate(
        KDA,
        q,
        k,
        v,
        g,
        beta,
        l2norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        sigmoid=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )
    return serve(
        KDA,
        x,
        torch.zeros_like(v, memory_format=torch.contiguous_format) if out is None else out,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        inplace_final_state=inplace_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        ssm_state_indices=ssm_state_indices,
        num_accepted_tokens=num_accepted_tokens,
    )


__all__ = ["fused_recurrent_kda", "fused_recurrent_kda_fwd"]
