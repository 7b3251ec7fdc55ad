# SPDX-License-Identifier: MIT
"""A decoding step of three short convolutions, those of queries, keys and values, in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.modules._plain import is_plain
from fla.modules.causal_conv1d.conv import _check_update, _covers_update, causal_conv1d_update
from fla.ops._common.checks import ArgumentError

__all__ = ["causal_conv1d_updates", "step_together"]

FACTS = CallFacts(tensors=("q",), key="q", value="v", initial_state=None, state_v_first=None, cu_seqlens=None)


def _check(
    q: Tensor, k: Tensor, v: Tensor, q_cache: Tensor, k_cache: Tensor, v_cache: Tensor, q_weight: Tensor,
    k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None, k_bias: Tensor | None, v_bias: Tensor | None,
    activation: str | None,
) -> None:  # fmt: skip
    _check_update(q, q_cache, None, q_weight, q_bias, activation)
    _check_update(k, k_cache, None, k_weight, k_bias, activation)
    _check_update(v, v_cache, None, v_weight, v_bias, activation)
    if not q_cache.shape[0] == k_cache.shape[0] == v_cache.shape[0]:
        raise ArgumentError("`q_cache`, `k_cache` and `v_cache` must hold as many sequences each.")


def _covers(q: Tensor, q_cache: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[bool, str | None]:
    found = _covers_update(q, q_cache)
    if found[0] and not q_cache.shape[2] == k_cache.shape[2] == v_cache.shape[2]:
        return False, "the kernel takes three convolutions of as many taps"
    if found[0] and not (q_cache.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return False, "the kernel takes contiguous caches"
    return found


@dispatch(
    "modules",
    facts=FACTS,
    validate=_check,
    triton="fla.modules.causal_conv1d.entry:causal_conv1d_updates",
    triton_verifier=_covers,
    inplace=True,
    differentiable=False,
)
def causal_conv1d_updates(
    q: Tensor, k: Tensor, v: Tensor, q_cache: Tensor, k_cache: Tensor, v_cache: Tensor, q_weight: Tensor,
    k_weight: Tensor, v_weight: Tensor, q_bias: Tensor | None = None, k_bias: Tensor | None = None,
    v_bias: Tensor | None = None, activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`causal_conv1d_update` for three inputs of as many sequences; the arguments are described there.

    Returns:
        The three results; the caches are written in place.

    Raises:
        ArgumentError: as there, or caches of different numbers of sequences. Nothing is written then.
    """
    return (
        causal_conv1d_update(q, q_cache, None, q_weight, q_bias, activation)[0],
        causal_conv1d_update(k, k_cache, None, k_weight, k_bias, activation)[0],
        causal_conv1d_update(v, v_cache, None, v_weight, v_bias, activation)[0],
    )


def _on_host(x: Tensor) -> bool:
    return x.device.type == "cpu"


def step_together(
    convs: tuple[Any, ...], inputs: tuple[Tensor, ...], caches: Any, cu_seqlens: Tensor | None, host: Tensor | None
) -> tuple[Tensor, ...] | None:
    """A step of three plain ``ShortConvolution``; None where they must be called one after another.

    Args:
        convs: the modules.
        inputs: ``[B, 1, D]`` each, or ``[1, N, D]`` with ``cu_seqlens`` ``[N + 1]``.
        caches: ``[N, D, W]`` each, written in place.
        cu_seqlens: boundaries, and ``host``, their copy on the host.
    """
    from fla.modules.causal_conv1d.short_conv import ShortConvolution

    if len(convs) != 3 or torch.is_grad_enabled() or _on_host(inputs[0]):
        return None
    first: Any = convs[0]
    if not all(is_plain(c, ShortConvolution) and c.activation == first.activation for c in convs):
        return None
    if any(c.kernel_size != first.kernel_size or (c.bias is None) != (first.bias is None) for c in convs):
        return None
    if not all(ShortConvolution._is_step(x, s, cu_seqlens, host) for x, s in zip(inputs[:1], caches, strict=False)):
        return None
    q, k, v = convs
    return causal_conv1d_updates(
        inputs[0], inputs[1], inputs[2], caches[0], caches[1], caches[2], q.weight, k.weight, v.weight, q.bias, k.bias,
        v.bias, first.activation,
    )  # fmt: skip
