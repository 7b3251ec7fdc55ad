# SPDX-License-Identifier: MIT
"""Validation that the ops of the delta family share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError, DtypeError


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: Mapping[str, tuple[Tensor | None, str]],
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    parameters: Mapping[str, Tensor | None] | None = None,
    allow_uncovered: bool = False,
    grouped: bool = True,
) -> dict[str, int]:
    """Check the tensors that every op has and return the sizes ``B, T, H, HV, K, V, N``.

    ``others`` are gates and coefficients with their shapes, ``parameters`` per-head tensors of any shape. With
    ``grouped=False`` there must be as many value heads as query heads.
    """
    value = "B T HV V" if grouped else "B T H V"
    sizes = checks.check_shapes(q=(q, "B T H K"), k=(k, "B T H K"), v=(v, value), **others)
    checks.check_same_dtype(q=q, k=k, v=v)
    tensors = {name: tensor for name, (tensor, _) in others.items()}
    if parameters:
        tensors.update(parameters)
    checks.check_floating(**tensors)
    checks.check_same_device(q=q, k=k, v=v, initial_state=initial_state, **tensors)
    HV = sizes.setdefault("HV", sizes["H"])
    checks.check_heads(sizes["H"], HV)
    N = sizes["N"] = checks.check_varlen(
        cu_seqlens,
        cu_seqlens_cpu,
        sizes["B"],
        sizes["T"],
        initial_state,
        device=q.device if cu_seqlens is not None else None,
        allow_uncovered=allow_uncovered,
    )
    checks.check_state("initial_state", initial_state, N, HV, sizes["K"], sizes["V"], state_v_first)
    checks.check_scale(scale, sizes["K"])
    return sizes


def check_gate(
    enabled: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    heads: int,
    bias_numel: int,
    lower_bound: float | None = None,
    bounded: bool = True,
) -> None:
    """Check the parameters of a gate computed in the op: ``A_log`` (or, if ``bounded`` exists, a lower bound),
    ``dt_bias``."""
    if not enabled:
        for name, given in (("A_log", A_log), ("dt_bias", dt_bias)):
            if given is not None:
                raise ArgumentError(
                    f"`{name}` was given, but the gate is not computed in the op: pass use_gate_in_kernel=True, "
                    "or leave it out when `g` already is the log decay."
                )
        return
    if lower_bound is not None and not isinstance(lower_bound, (int, float, torch.SymFloat)):
        raise DtypeError(f"`lower_bound` must be a number or None, got {type(lower_bound).__name__}.")
    if A_log is None and lower_bound is None:
        wanted = "`A_log` or `lower_bound`" if bounded else "`A_log`"
        raise ArgumentError(f"use_gate_in_kernel=True needs {wanted}.")
    checks.check_numel("A_log", A_log, heads, "one per value head")
    checks.check_numel("dt_bias", dt_bias, bias_numel, "one per channel of the gate")


def check_safe_gate(safe_gate: bool, gate_in_kernel: bool, lower_bound: float | None) -> None:
    """The bound that ``safe_gate`` promises, where the gate is computed here and the bound is known."""
    if safe_gate and gate_in_kernel and (lower_bound is None or not -5 <= lower_bound < 0):
        raise ArgumentError(f"safe_gate=True needs `lower_bound` in [-5, 0), got {lower_bound}.")


def check_beta(sigmoid: bool, allow_neg_eigval: bool) -> None:
    """Check the flags of the write gate."""
    if allow_neg_eigval and not sigmoid:
        raise ArgumentError("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True: it doubles the sigmoid.")


def check_graph(use_graph: bool, max_num_seqs: int | None, cu_seqlens: Tensor | None) -> None:
    """Check the fixed number of sequences of graph mode (empty ones pad the tail)."""
    if use_graph and max_num_seqs is not None and cu_seqlens is not None and cu_seqlens.shape[0] != max_num_seqs + 1:
        raise ArgumentError(
            f"With use_graph=True `cu_seqlens` must have max_num_seqs + 1 = {max_num_seqs + 1} entries "
            f"(repeat the last offset for missing sequences), got {cu_seqlens.shape[0]}."
        )


def check_intermediate_states(wanted: bool, disable_recompute: bool) -> None:
    """States per chunk are returned for inference only."""
    if not wanted:
        return
    if torch.is_grad_enabled():
        raise ArgumentError("return_intermediate_states=True needs torch.inference_mode() or torch.no_grad().")
    if disable_recompute:
        raise ArgumentError("return_intermediate_states=True and disable_recompute=True exclude each other.")
