# SPDX-License-Identifier: MIT
"""Softmax attention with rotary positions: the layer of the Transformer and of hybrid models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fla.layers.utils import (
    check_padding_mask,
    get_layer_cache,
    get_unpad_indices_and_cu,
    host_offsets,
    index_first_axis,
    pad_input,
    row_offsets,
    update_layer_cache,
)
from fla.modules._linears import linears
from fla.modules._softmax import dense_attention, packed_attention
from fla.modules.norm import RMSNorm
from fla.modules.rotary import RotaryEmbedding
from fla.ops._common.checks import ArgumentError

if TYPE_CHECKING:
    from fla.decoding import StaticPosition

__all__ = ["Attention"]


class Attention(nn.Module):
    """Causal softmax attention, with fewer heads of keys and values and a sliding window where wanted.

    Runs through SDPA of torch on any device. Packed and windowed sequences in 16 bits on an NVIDIA GPU go through
    flash-attn if it is installed, or the variable-length kernel of torch (2.10).

    Args:
        hidden_size: width `D`.
        num_heads: query heads `H`, of ``D / H`` channels.
        num_kv_heads: heads of keys and values, a divisor of `H`; `H` when None.
        qkv_bias: learn biases of the three projections.
        qk_norm: normalise queries and keys of every head.
        window_size: tokens that one sees, itself included; None for all. A cache keeps as many.
        rope_theta: base of the rotary frequencies.
        max_position_embeddings: length of the first rotary tables, which grow with the positions.
        layer_idx: place in a cache.

    Raises:
        ArgumentError: heads that do not divide, an odd head, a window below 1.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        num_heads: int = 32,
        num_kv_heads: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window_size: int | None = None,
        rope_theta: float | None = 10000.0,
        max_position_embeddings: int | None = None,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        if num_kv_heads is None:
            num_kv_heads = num_heads
        if num_heads < 1 or hidden_size % (2 * num_heads):
            raise ArgumentError(
                f"`num_heads` must divide hidden_size = {hidden_size} into even heads, got {num_heads}."
            )
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ArgumentError(f"`num_kv_heads` must divide num_heads = {num_heads}, got {num_kv_heads}.")
        if window_size is not None and window_size < 1:
            raise ArgumentError(f"`window_size` must be at least 1 or None, got {window_size}.")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, num_kv_heads
        self.num_kv_groups = num_heads // num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.kv_dim = num_kv_heads * self.head_dim
        self.qkv_bias, self.qk_norm, self.window_size = qkv_bias, qk_norm, window_size
        self.rope_theta = 10000.0 if rope_theta is None else rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.layer_idx = layer_idx
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden_size, self.kv_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        if qk_norm:
            self.q_norm = RMSNorm(self.head_dim)
            self.k_norm = RMSNorm(self.head_dim)
        self.rotary = RotaryEmbedding(self.head_dim, base=self.rope_theta)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        output_attentions: bool | None = False,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """Attend within each sequence.

        Args:
            hidden_states: ``[B, T, D]``.
            attention_mask: padding mask ``[B, S]``: of past and present, or of the present `T` alone. Ignored when
                ``cu_seqlens`` is given. A window of a cache counts padding, so pad on the left there.
            past_key_values: a :class:`fla.models.utils.Cache` to read and, with ``use_cache``, to write.
            output_attentions: ignored; the weights are never formed.
            use_cache: store keys and values.
            kwargs: ``cu_seqlens`` ``[N + 1]`` of packed sequences, over all tokens of the batch; not with a cache that
                holds a past. ``cache`` is another name of ``past_key_values``. Unknown names are ignored.

        Returns:
            ``(output [B, T, D], None, past_key_values)``.

        Raises:
            ArgumentError: a mask that is no padding mask, or ``cu_seqlens`` that do not fit.
            ValueError: a cache for a layer without ``layer_idx``.
        """
        cache = kwargs.get("cache") if past_key_values is None else past_key_values
        check_padding_mask(attention_mask)
        past = (get_layer_cache(self, cache) or {}).get("attn_state")
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        if kwargs.get("static_position") is not None:
            return self._static_step(hidden_states, cache, kwargs["static_position"]), None, past_key_values
        cu_seqlens = kwargs.get("cu_seqlens")
        batch, length = hidden_states.shape[:2]
        x, indices, max_seqlen = hidden_states, None, max(seen + length, self.max_position_embeddings or 0)
        offset: int | Tensor = seen
        if cu_seqlens is not None:
            if past is not None:
                raise ArgumentError("`cu_seqlens` cannot be given with a cache that holds a past of attention.")
            attention_mask, x = None, x.reshape(1, -1, x.shape[-1])
            max_seqlen = max(max_seqlen, x.shape[1])
        elif attention_mask is not None:
            check_padding_mask(attention_mask, batch)
            offset = row_offsets(attention_mask, length, seen)
            if length > 1:
                indices, cu_seqlens = get_unpad_indices_and_cu(attention_mask, length)
                x = index_first_axis(x.flatten(0, 1), indices)[None]
        host = kwargs.get("cu_seqlens_cpu")
        if host is None or indices is not None:
            host = host_offsets(cu_seqlens)
        q, k, v = self._project(x, offset, cu_seqlens, max_seqlen)
        new = k, v
        if indices is not None:
            new = tuple(pad_input(t[0], indices, batch, length) for t in new)  # type: ignore[assignment]
        keys = new if past is None else self._with_past(past, new)
        valid = None
        if attention_mask is not None and (past is not None or length == 1):
            missing = keys[0].shape[1] - attention_mask.shape[1]
            valid = attention_mask[:, -keys[0].shape[1] :] != 0
            if missing > 0:  # a mask of the new tokens only
                valid = torch.nn.functional.pad(valid, (missing, 0), value=True)
        if indices is not None and valid is not None:
            rows, cu_k = get_unpad_indices_and_cu(valid)
            k, v = (index_first_axis(t.flatten(0, 1), rows)[None] for t in keys)
            o = packed_attention(q, k, v, cu_seqlens, cu_k, self.window_size, host, host_offsets(cu_k))  # type: ignore[arg-type]
        elif cu_seqlens is not None:
            o = packed_attention(q, k, v, cu_seqlens, None, self.window_size, host)
        else:
            o = dense_attention(q, keys[0], keys[1], self.window_size, valid)
            if valid is not None:  # a row whose token is padding
                o = o.masked_fill(~valid[:, -1, None, None, None], 0)
        o = self.o_proj(o.flatten(-2))
        if use_cache:
            update_layer_cache(
                self,
                cache,
                attn_state=tuple(t.flatten(-2) for t in new),
                offset=length,
                cache_kwargs={"window_size": self.window_size},
            )
        if indices is not None:
            o = pad_input(o[0], indices, batch, length)
        return o.view(batch, length, self.hidden_size), None, past_key_values

    def _project(
        self, x: Tensor, offset: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of queries, keys (both rotated) and values."""
        projections = linears(x, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)) for p in projections)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return *self.rotary(q, k, seqlen_offset=offset, max_seqlen=max_seqlen, cu_seqlens=cu_seqlens), v

    def _static_step(self, x: Tensor, cache: Any, position: StaticPosition) -> Tensor:
        """The layer on one token a sequence, with a ring of keys and values that is written in place."""
        q, k, v = self._project(x, position.offsets, None, position.limit)
        ring = cache[self.layer_idx]["attn_state"]
        slot, seen = position.slots(ring[0].shape[1])
        for kept, new in zip(ring, (k, v), strict=True):
            kept.index_copy_(1, slot, new.flatten(-2).to(kept.dtype))
        k, v = (kept.unflatten(-1, (-1, self.head_dim)).to(q.dtype) for kept in ring)
        update_layer_cache(self, cache, offset=1)
        return self.o_proj(dense_attention(q, k, v, None, seen).flatten(-2))

    def _with_past(self, past: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keys and values that the new tokens see: those of the cache and their own."""
        old = (p.unflatten(-1, (-1, self.head_dim)) for p in past)
        length = new[0].shape[1]
        reach = None if self.window_size is None else self.window_size + length - 1
        both = (torch.cat((o.to(n.dtype), n), 1) for o, n in zip(old, new, strict=True))
        return tuple(t if reach is None else t[:, -reach:] for t in both)
