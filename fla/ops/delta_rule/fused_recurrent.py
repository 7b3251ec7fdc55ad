# SPDX-License-Identifier: MIT
"""Delta rule, token by token."""

from __future__ import annotations

from torch import Tensor

from fla.ops._common.checks import ArgumentError
from fla.ops._common.gates import to_output
from fla.ops._delta.covers import covers_recurrent_delta_rule
from fla.ops._delta.op import Sizes, Values, delta_op
from fla.ops._delta.outputs import k_first_outputs
from fla.ops._delta.rows import DELTA_RULE
from fla.ops._delta.torch_inputs import activate
from fla.ops._delta.torch_recurrent import recurrent_delta


def _check(values: Values, sizes: Sizes) -> None:
    scale = values["scale"]
    if scale is not None and scale <= 0:
        raise ArgumentError(f"`scale` must be positive, got {scale}.")


@delta_op(
    DELTA_RULE,
    {"beta": "B T H | B T H V"},
    grouped=False,
    check=_check,
    outputs=k_first_outputs,
    triton="fla.ops._delta.entry:fused_recurrent_delta_rule",
    triton_verifier=covers_recurrent_delta_rule,
)
def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta rule for few tokens per sequence, as in decoding. Differentiable in every tensor.

    The recurrence and the arguments are those of ``chunk_delta_rule``, except that ``beta`` may also be ``[B, T, H,
    V]``, one strength per value channel, or None for ones.

    Returns:
        ``o [B, T, H, V]`` in the dtype of v, and the final states ``[N, H, K, V]`` (float32, float64 for float64
        inputs) or None.

    Raises:
        ArgumentError: (ValueError and AssertionError) wrong shapes, devices, offsets, states; ``scale`` not positive.
        DtypeError: (also TypeError) wrong or mixed dtypes.
    """
    o, final = recurrent_delta(
        DELTA_RULE,
        activate(DELTA_RULE, q, k, v, None, beta, l2norm=use_qk_l2norm_in_kernel),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    return to_output(o, v.dtype), final if output_final_state else None


__all__ = ["fused_recurrent_delta_rule"]
