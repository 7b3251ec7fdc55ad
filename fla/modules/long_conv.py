# SPDX-License-Identifier: MIT
"""Causal convolutions as long as the sequence, by FFT.

The filter is a parameter (https://arxiv.org/abs/2302.06646) or the output of a small network over positions, as in
Hyena (https://arxiv.org/abs/2302.10866, section 3.3).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.backends import CallFacts, dispatch
from fla.modules._dtype import upcast
from fla.ops._common.checks import ArgumentError, check_floating, check_same_device

__all__ = ["ImplicitLongConvolution", "LongConvolution", "PositionalEmbedding", "fft_conv"]

_FACTS = CallFacts(tensors=("u",), key="u", value="u", initial_state=None, state_v_first=None, cu_seqlens=None)


def _check(u: Tensor, k: Tensor, dropout_mask: Tensor | None, k_rev: Tensor | None) -> None:
    check_floating(u=u, k=k, k_rev=k_rev)
    check_same_device(u=u, k=k, k_rev=k_rev, dropout_mask=dropout_mask)
    if u.dim() < 2:
        raise ArgumentError(f"`u` must have shape [..., D, L], got {list(u.shape)}.")
    for name, filters in (("k", k), ("k_rev", k_rev)):
        if filters is not None and (filters.dim() < 1 or filters.shape[:-1] not in ((), u.shape[-2:-1], u.shape[:-1])):
            raise ArgumentError(
                f"`{name}` must have shape [D, taps] with D = {u.shape[-2]}, got {list(filters.shape)}."
            )
    if dropout_mask is not None and dropout_mask.shape != u.shape[:-1]:
        raise ArgumentError(f"`dropout_mask` must have shape {list(u.shape[:-1])}, got {list(dropout_mask.shape)}.")


def _outputs(
    u: Tensor, k: Tensor, dropout_mask: Tensor | None, gelu: bool = True, k_rev: Tensor | None = None
) -> Tensor:
    return u.new_empty(u.shape)


@dispatch("modules", facts=_FACTS, validate=_check, outputs=_outputs)
def fft_conv(
    u: Tensor, k: Tensor, dropout_mask: Tensor | None, gelu: bool = True, k_rev: Tensor | None = None
) -> Tensor:
    """``y[t] = u[t] + sum_j k[j] * u[t - j]`` (note the skip connection), computed in float32 or float64.

    Args:
        u: ``[..., D, L]``, channels first.
        k: ``[D, taps]``. Taps past the `L`-th reach no input and are left out: a shorter transform would wrap them
            around to inputs of the future.
        dropout_mask: ``[..., D]``, factor on every channel's output, or None.
        gelu: apply GELU (before the mask).
        k_rev: ``[D, taps]``, adds ``sum_j k_rev[j] * u[t + j]``, which looks ahead.

    Returns:
        ``[..., D, L]`` in the dtype of ``u``.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit.
    """
    L = u.shape[-1]
    if u.numel() == 0:
        return u + 0
    wide = torch.promote_types(upcast(u).dtype, upcast(k).dtype)
    x = u.to(wide)
    spectrum = torch.fft.rfft(k[..., :L].to(wide), n=2 * L)
    if k_rev is not None:
        spectrum = spectrum + torch.fft.rfft(k_rev[..., :L].to(wide), n=2 * L).conj()
    y = torch.fft.irfft(torch.fft.rfft(x, n=2 * L) * spectrum, n=2 * L)[..., :L] + x
    y = F.gelu(y) if gelu else y
    if dropout_mask is not None:
        y = y * dropout_mask[..., None].to(wide)
    return y.to(u.dtype)


def _over_time(x: Tensor, k: Tensor) -> Tensor:
    if x.dim() != 3:
        raise ArgumentError(f"`x` must have shape [B, L, D], got {list(x.shape)}.")
    return fft_conv(x.transpose(1, 2), k, None, False).transpose(1, 2).contiguous()


class LongConvolution(nn.Module):
    """``x + x * filter`` along time, causal, with ``filter`` ``[hidden_size, max_len]``.

    Args:
        hidden_size: number of channels `D`.
        max_len: number of taps. Longer inputs are filtered with that many taps.
    """

    def __init__(self, hidden_size: int, max_len: int, **kwargs: Any) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.filter = nn.Parameter(torch.randn(hidden_size, max_len))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[B, L, D] -> [B, L, D]``. Further arguments are ignored, as blocks pass those of other mixers."""
        return _over_time(x, self.filter)


class PositionalEmbedding(nn.Module):
    """Positions ``z`` ``[1, seq_len, emb_dim]``: time in [0, 1], and cosines and sines of growing frequency.

    Args:
        emb_dim: odd and at least 3.
        seq_len: number of positions.
    """

    def __init__(self, emb_dim: int, seq_len: int, **kwargs: Any) -> None:
        super().__init__()
        if emb_dim < 3 or emb_dim % 2 == 0:
            raise ArgumentError(f"`emb_dim` must be odd and at least 3, got {emb_dim}.")
        self.emb_dim = emb_dim
        bands = (emb_dim - 1) // 2
        t = torch.linspace(0, 1, seq_len)[:, None]
        w = 2 * math.pi * torch.arange(seq_len)[:, None] / max(1, seq_len)
        angle = torch.linspace(1e-4, bands - 1, bands) * w
        # A parameter, so that checkpoints of the reference package load; it is not trained.
        self.z = nn.Parameter(torch.cat([t, angle.cos(), -angle.sin()], -1)[None], requires_grad=False)

    def forward(self, L: int) -> Tensor:
        """The first `L` positions ``[1, L, emb_dim]``."""
        return self.z[:, :L]


class ImplicitLongConvolution(nn.Module):
    """As :class:`LongConvolution`, the filter being computed from positions by two linear layers.

    Args:
        hidden_size: number of channels `D`.
        max_len: number of taps. Longer inputs are filtered with that many taps.
        d_emb: width of the positions, odd and at least 3.
        d_hidden: width between the layers.

    Raises:
        ArgumentError: ``d_emb`` is even or below 3.
    """

    def __init__(self, hidden_size: int, max_len: int, d_emb: int = 3, d_hidden: int = 16, **kwargs: Any) -> None:
        super().__init__()
        if d_emb < 3 or d_emb % 2 == 0:
            raise ArgumentError(f"`d_emb` must be odd and at least 3, got {d_emb}.")
        self.hidden_size = hidden_size
        self.d_emb = d_emb
        self.pos_emb = PositionalEmbedding(d_emb, max_len)
        self.mlp = nn.Sequential(nn.Linear(d_emb, d_hidden), nn.ReLU(), nn.Linear(d_hidden, hidden_size))

    def filter(self, seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        """Filter ``[1, D, min(seq_len, max_len)]``."""
        return self.mlp(self.pos_emb(seq_len)).transpose(1, 2)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[B, L, D] -> [B, L, D]``. Further arguments are ignored, as blocks pass those of other mixers."""
        return _over_time(x, self.filter(x.shape[1])[0])
