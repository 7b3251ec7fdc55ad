# SPDX-License-Identifier: MIT
"""Depthwise causal convolution over time with a carried state, for dense batches and packed sequences.

The state of a sequence is its last `W` inputs, `[N, D, W]` with the newest in slot ``W - 1``. Both layouts become one
buffer in which every sequence is preceded by its `W` carried inputs (zeros without a state), so that taps, states and
their gradients need no case of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import CallFacts, add_builtin, dispatch
from fla.backends.devices import has_module
from fla.modules._covers import TRANSFORMED
from fla.modules._dtype import upcast
from fla.modules.causal_conv1d.taps import convolve
from fla.ops._common.checks import ArgumentError, check_choice, check_floating, check_same_device, check_varlen
from fla.ops._common.single import transformed

__all__ = ["causal_conv1d", "causal_conv1d_update", "causal_conv1d_update_states"]

FACTS = CallFacts(tensors=("x",), key="x", value="x", initial_state="initial_state", state_v_first=None)
_ACTIVATIONS = (None, "silu", "swish")
MAX_TAPS = 4
"""Of the Triton kernels; wider convolutions run in PyTorch."""


class _Packing(NamedTuple):
    """Rows of the buffer, for sequences packed into one row of `T` tokens."""

    tokens: Tensor  # [T] row of each token
    states: Tensor  # [N * W] rows of the carried inputs
    finals: Tensor  # [N * W] rows of the last W inputs
    rows: int


def _pack(cu_seqlens: Tensor, T: int, W: int) -> _Packing:
    N = cu_seqlens.numel() - 1
    device = cu_seqlens.device
    cu_seqlens = cu_seqlens.long()
    token = torch.arange(T, device=device)
    # Reading the owner off the boundaries needs no wait for the device, unlike repeat_interleave.
    owner = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    start = cu_seqlens[:-1] + torch.arange(N, device=device) * W
    end = cu_seqlens[1:] + torch.arange(N, device=device) * W
    slot = torch.arange(W, device=device)
    return _Packing(
        tokens=token + (owner + 1) * W,
        states=(start[:, None] + slot).flatten(),
        finals=(end[:, None] + slot).flatten(),
        rows=T + N * W,
    )


def _activate(p: Tensor, activation: str | None) -> Tensor:
    return p if activation is None else F.silu(p)


def _check_parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None, activation: str | None, D: int) -> int:
    """The number of taps."""
    if weight is None:
        raise ArgumentError("`weight` [D, W] must be given, got None.")
    size = weight.shape
    if not (len(size) == 2 or (len(size) == 3 and size[1] == 1)) or size[0] != D or size[-1] < 1:
        raise ArgumentError(f"`weight` must have shape [D, W] or [D, 1, W] with D = {D}, got {list(size)}.")
    if bias is not None and bias.shape != (D,):
        raise ArgumentError(f"`bias` must have shape [D] with D = {D}, got {list(bias.shape)}.")
    if activation not in _ACTIVATIONS:
        raise ArgumentError(f"`activation` must be None, 'silu' or 'swish', got {activation!r}.")
    return size[-1]


def check_conv(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    activation: str | None,
    backend: str,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    cp_context: Any,
    seq_idx: Tensor | None,
) -> None:
    if x.dim() < 3:
        raise ArgumentError(f"`x` must have shape [B, T, D] or [B, T, ...], got {list(x.shape)}.")
    check_floating(x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state)
    check_same_device(x=x, weight=weight, bias=bias, residual=residual, initial_state=initial_state)
    B, T, D = x.shape[0], x.shape[1], x.shape[2:].numel()
    W = _check_parameters(x, weight, bias, activation, D)
    if residual is not None and residual.shape != x.shape:
        raise ArgumentError(f"`residual` must have the shape of `x`, {list(x.shape)}, got {list(residual.shape)}.")
    if backend not in ("triton", "cuda", "mix"):
        raise ArgumentError(f"Unsupported backend: `backend` must be 'triton', 'cuda' or 'mix', got {backend!r}.")
    if backend == "cuda" and not has_module("causal_conv1d"):
        raise ArgumentError(
            "`backend='cuda'` needs the package causal-conv1d, which is not installed; 'triton', the default, is this "
            "package's own implementation and runs on every device."
        )
    if cp_context is not None:
        raise NotImplementedError("`cp_context` (context parallelism) is not supported by causal_conv1d yet.")
    if seq_idx is not None:
        raise NotImplementedError("`seq_idx` is not supported: pass the boundaries as `cu_seqlens`.")
    N = check_varlen(cu_seqlens, cu_seqlens_cpu, B, T, initial_state, device=x.device)
    if initial_state is not None and initial_state.shape != (N, D, W):
        raise ArgumentError(
            f"`initial_state` must have shape [N, D, W] = {[N, D, W]}, got {list(initial_state.shape)}."
        )


def covers_conv(x: Tensor, weight: Tensor) -> tuple[bool, str | None]:
    if transformed():
        return TRANSFORMED
    if x.dtype == torch.float64:
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    if weight.shape[-1] > MAX_TAPS:
        return False, f"the Triton kernels take up to {MAX_TAPS} taps, got {weight.shape[-1]}"
    return True, None


def _conv_outputs(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, output_final_state: bool
) -> tuple[Tensor, Tensor | None]:
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(N, weight.shape[0], weight.shape[-1]) if output_final_state else None


@dispatch(
    "modules",
    facts=FACTS,
    validate=check_conv,
    outputs=_conv_outputs,
    triton="fla.modules.causal_conv1d.entry:causal_conv1d",
    triton_verifier=covers_conv,
)
def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``y[t] = act(bias + sum_w weight[:, w] * x[t - W + 1 + w]) + residual[t]`` in every sequence and channel.

    Args:
        x: ``[B, T, D]``, or ``[B, T, ...]`` whose trailing axes hold `D` channels. Any strides.
        weight: ``[D, W]``, newest input last, or ``[D, 1, W]`` as ``nn.Conv1d`` has it.
        bias: ``[D]``.
        residual: like ``x``; added after the activation.
        initial_state: ``[N, D, W]``, the last `W` inputs before the first token; zeros when None. Not changed.
        output_final_state: return the last `W` inputs of every sequence, in the dtype of ``x``.
        activation: None, ``"silu"`` or ``"swish"``.
        backend: ``"triton"``, this package's implementation (the reference's name for it; it runs on every device);
            ``"cuda"``, the package causal-conv1d where it covers the call (:mod:`.library`), else ours; ``"mix"``, a
            choice of speed in the reference package, is ours.
        cu_seqlens: boundaries ``[N + 1]`` of sequences packed into one row (``B = 1``); empty sequences are allowed.
        cu_seqlens_cpu: the same on the host.
        chunk_indices: accepted for callers of the reference package and not needed.
        cp_context: not supported yet.

    Returns:
        ``y`` like ``x``, and the final state ``[N, D, W]`` or None. Both carry gradients.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit, another activation or backend.
        NotImplementedError: ``cp_context`` or ``seq_idx``.
    """
    assert weight is not None
    weight = weight.flatten(1)
    shape, (D, W) = x.shape, weight.shape
    rows = x.flatten(2)
    B, T = rows.shape[:2]
    final: Tensor | None = None
    if cu_seqlens is None:
        state = rows.new_zeros(B, W, D) if initial_state is None else initial_state.transpose(1, 2).to(x.dtype)
        buffer = torch.cat([state, rows], 1)
        y = convolve(buffer[:, 1:], weight)
        last = buffer[:, T:]
    else:
        plan = _pack(cu_seqlens, T, W)
        buffer = rows.new_zeros(plan.rows, D).index_copy(0, plan.tokens, rows[0])
        if initial_state is not None:
            buffer = buffer.index_copy(0, plan.states, initial_state.transpose(1, 2).reshape(-1, D).to(x.dtype))
        y = convolve(buffer[None], weight).index_select(1, plan.tokens - (W - 1))
        last = buffer.index_select(0, plan.finals).view(-1, W, D) if output_final_state else buffer
    y = _activate(y if bias is None else y + bias.to(y.dtype), activation).view(shape)
    if residual is not None:
        y = y + residual.to(y.dtype)
    if output_final_state:
        final = last.transpose(1, 2).contiguous()
    return y.to(x.dtype), final


def _covers_update(x: Tensor, cache: Tensor) -> tuple[bool, str | None]:
    if transformed():
        return TRANSFORMED
    if torch.float64 in (x.dtype, cache.dtype):
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    return True, None


def _check_update(
    x: Tensor,
    cache: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
) -> None:
    if cache is None:
        raise ArgumentError("`cache` [N, D, W] must be given, got None: without it the update would ignore `x`.")
    N, D = cache.shape[0], x.shape[-1]
    if x.shape not in ((N, D), (N, 1, D), (1, N, D)):
        raise ArgumentError(
            f"`x` must have shape [N, D], [N, 1, D] or [1, N, D] with N = {N} from `cache`, got {list(x.shape)}."
        )
    W = _check_parameters(x, weight, bias, activation, D)
    check_floating(x=x, cache=cache, residual=residual, weight=weight, bias=bias)
    check_same_device(x=x, cache=cache, residual=residual, weight=weight, bias=bias)
    if cache.shape != (N, D, W):
        raise ArgumentError(f"`cache` must have shape [N, D, W] = {[N, D, W]}, got {list(cache.shape)}.")
    if residual is not None and residual.shape != x.shape:
        raise ArgumentError(f"`residual` must have the shape of `x`, {list(x.shape)}, got {list(residual.shape)}.")


@dispatch(
    "modules",
    facts=FACTS,
    validate=_check_update,
    triton="fla.modules.causal_conv1d.entry:causal_conv1d_update",
    triton_verifier=_covers_update,
    inplace=True,
    differentiable=False,
)
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each sequence; ``cache`` is shifted and written in place. Carries no gradient.

    Args:
        x: ``[N, D]``, ``[N, 1, D]`` or ``[1, N, D]``. Any strides.
        cache: ``[N, D, W]``, the last `W` inputs; any float dtype.
        residual: like ``x``; added after the activation.
        weight: ``[D, W]`` or ``[D, 1, W]``.
        bias: ``[D]``.
        activation: None, ``"silu"`` or ``"swish"``.

    Returns:
        ``y`` like ``x``, and ``cache``, the object that was passed.

    Raises:
        ArgumentError: no cache, or shapes, dtypes or devices that do not fit. Nothing is written then.
    """
    assert weight is not None
    with torch.no_grad():
        N, D, _ = cache.shape
        cache.copy_(torch.cat([cache[:, :, 1:], x.reshape(N, D, 1).to(cache.dtype)], -1))
        p = (upcast(cache) * upcast(weight.flatten(1))).sum(-1)
        y = _activate(p if bias is None else p + bias.to(p.dtype), activation).view(x.shape)
        if residual is not None:
            y = y + residual.to(y.dtype)
        return y.to(x.dtype), cache


def causal_conv1d_update_states(
    x: Tensor, state_len: int, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> Tensor:
    """The last ``state_len`` inputs ``[N, D, state_len]`` of every sequence of ``x`` ``[B, T, D]``.

    Where a sequence is shorter, the newest slots of ``initial_state`` ``[N, D, state_len]`` (zeros when None) fill the
    rest. Differentiable.
    """
    check_choice("state_len > 0", state_len > 0, (True,))
    zero = x.new_zeros(x.shape[2:].numel(), state_len)
    final = causal_conv1d(x, zero, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens)[1]
    assert final is not None
    return final


add_builtin("fla.modules.causal_conv1d.library")
