# SPDX-License-Identifier: MIT
"""Rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fla.modules.rotary.ops import (
    rotary_embedding,
    rotary_embedding_fwdbwd,
    rotary_embedding_ref,
    rotary_pair,
    rotate_half,
)
from fla.ops._common.checks import ArgumentError

__all__ = ["RotaryEmbedding", "rotary_embedding", "rotary_embedding_fwdbwd", "rotary_embedding_ref", "rotate_half"]


def _readable(x: Tensor) -> bool:
    """Whether looking at the numbers of `x` waits for no device and breaks no trace."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


class RotaryEmbedding(nn.Module):
    """Rotary embedding of queries and keys, with tables that grow as positions do. It has no state.

    Pair `i` turns by ``position * base ** (-2i / dim)``. With ``scale_base`` (xPos, https://arxiv.org/abs/2212.10554)
    queries are multiplied and keys divided by ``((2i + 0.4 dim) / (1.4 dim)) ** ((position - L // 2) / scale_base)``,
    `L` being the length of the tables.

    Args:
        dim: rotated channels, an even number.
        base: base of the frequencies.
        scale_base: base of the xPos scale, or None for none.
        interleaved: pair neighbours instead of halves.
        pos_idx_in_fp32: accepted and ignored; angles are float32 always.
        device: device of the first tables.

    Raises:
        ArgumentError: an odd ``dim``.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        scale_base: float | None = None,
        interleaved: bool = False,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ArgumentError(f"`dim` must be a positive even number, got {dim}.")
        self.dim = dim
        self.base = float(base)
        self.scale_base = scale_base
        self.interleaved = interleaved
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.device = device
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    # Not buffers: casting the model to 16 bits, or moving it off the meta device, would spoil them.
    @property
    def inv_freq(self) -> Tensor:
        """Angle per position ``[dim / 2]``, float32."""
        return self._frequencies(self.device)

    @property
    def scale(self) -> Tensor | None:
        """Base of the xPos scale ``[dim / 2]``, float32, or None."""
        return None if self.scale_base is None else self._scales(self.device)

    def _frequencies(self, device: Any) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _scales(self, device: Any) -> Tensor:
        return (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) + 0.4 * self.dim) / (1.4 * self.dim)

    def _tables(self, length: int, like: Tensor) -> tuple[Tensor, ...]:
        position = torch.arange(length, device=like.device, dtype=torch.float32)
        angle = torch.outer(position, self._frequencies(like.device))
        cos, sin = angle.cos(), angle.sin()
        if self.scale_base is None:
            tables = (cos, sin, cos, sin)
        else:
            power = ((position - length // 2) / self.scale_base)[:, None]
            scale = self._scales(like.device) ** power
            tables = (cos * scale, sin * scale, cos / scale, sin / scale)
        return tuple(t.to(like.dtype) for t in tables)

    def _cached(self, length: int, like: Tensor) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling():
            return self._tables(max(length, 1), like)
        cos = self._cos_cached
        if (
            cos is None
            or length > self._seq_len_cached
            or cos.device != like.device
            or cos.dtype != like.dtype
            or (self.training and cos.is_inference())
        ):
            self._seq_len_cached = max(length, self._seq_len_cached)
            tables = self._tables(self._seq_len_cached, like)
            self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = tables
        return self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached  # type: ignore[return-value]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        seqlen_offset: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        chunk_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys.

        Args:
            q: ``[B, T, H, D]``.
            k: ``[B, T, HK, D]``.
            seqlen_offset: added to the positions, one int or int32 or int64 ``[N]``.
            cu_seqlens: boundaries ``[N + 1]`` of packed sequences.
            max_seqlen: length the tables must have at least; needed with a tensor of offsets while the tables are
                empty, and on a device whenever such offsets reach beyond them (they are not read). By default the
                longest sequence plus the offset.
            chunk_indices: ignored.

        Returns:
            The rotated ``(q, k)``.

        Raises:
            ArgumentError: see :func:`rotary_embedding`; or no ``max_seqlen`` where it is needed.
        """
        if max_seqlen is not None:
            length = max_seqlen
        else:
            longest = max(q.shape[1], k.shape[1])
            if cu_seqlens is not None and cu_seqlens.numel() > 1 and _readable(cu_seqlens):
                longest = int(cu_seqlens.diff().max())
            if not isinstance(seqlen_offset, Tensor):
                length = longest + seqlen_offset
            elif self._seq_len_cached == 0:
                raise ArgumentError("`max_seqlen` must be given with a tensor `seqlen_offset`, got None.")
            elif seqlen_offset.numel() and _readable(seqlen_offset):
                length = longest + int(seqlen_offset.max())
            else:
                length = self._seq_len_cached
        cos, sin, cos_k, sin_k = self._cached(length, q)
        if q.shape[:2] != k.shape[:2]:  # tokens of their own, as before a cache is joined
            rotated = rotary_embedding(q, cos, sin, self.interleaved, False, seqlen_offset, cu_seqlens)
            return rotated, rotary_embedding(k, cos_k, sin_k, self.interleaved, False, seqlen_offset, cu_seqlens)
        return rotary_pair(q, k, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, cu_seqlens)
