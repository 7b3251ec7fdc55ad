# SPDX-License-Identifier: MIT
"""Padding and cache helpers of the layers.

A padded batch is run as packed sequences: the valid tokens of all rows, one row after the other, with their boundaries
in ``cu_seqlens``. No layer then sees padding, on whichever side it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fla.ops._common.checks import ArgumentError
from fla.utils import tensor_cache

__all__ = [
    "get_layer_cache",
    "get_unpad_data",
    "get_unpad_indices_and_cu",
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "repad_hidden_states",
    "require_cache_layer_idx",
    "row_offsets",
    "unpad_hidden_states",
    "unpad_input",
    "update_layer_cache",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` of ``x`` ``[R, ...]``. Differentiable."""
    return x.index_select(0, indices)


def index_put_first_axis(x: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``[first_axis_dim, ...]`` of zeros with the rows of ``x`` at ``indices``. Differentiable."""
    return x.new_zeros(first_axis_dim, *x.shape[1:]).index_copy(0, indices, x)


class _Unpadding(NamedTuple):
    indices: Tensor  # [total] positions of the valid tokens in the flattened [B * T]
    cu_seqlens: Tensor  # [B + 1] int32
    max_seqlen: int


@tensor_cache
def _find_valid(mask: Tensor, q_len: int) -> _Unpadding:
    # Remembered by mask: the layers of a model ask one after the other, and counting waits for the device.
    mask = mask[:, mask.shape[1] - q_len :] != 0
    lengths = mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    full = indices.shape[0] == mask.numel()  # then the device need not be asked again
    return _Unpadding(indices, cu_seqlens, mask.shape[1] if full else int(lengths.max()))


@tensor_cache
def _to_host(offsets: Tensor) -> Tensor:
    return offsets.cpu()


def host_offsets(cu_seqlens: Tensor | None) -> Tensor | None:
    """A host copy of ``cu_seqlens``, made once for all layers; None where it is on the host or must not be read."""
    if cu_seqlens is None or cu_seqlens.device.type in ("cpu", "meta") or torch.compiler.is_compiling():
        return None
    if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return _to_host(cu_seqlens)


def check_padding_mask(attention_mask: Tensor | None, batch: int | None = None) -> None:
    """Raise unless the mask is a padding mask ``[B, S]``, with ``batch`` rows unless that is None."""
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise ArgumentError(f"`attention_mask` must be a tensor [B, S], got {type(attention_mask).__name__}.")
    if attention_mask.dim() != 2:
        raise ArgumentError(
            "`attention_mask` must be a padding mask [B, S] of zeros and ones; masks of attention scores "
            f"([B, T, S] and the like) are not supported, got {list(attention_mask.shape)}."
        )
    if batch is not None and attention_mask.shape[0] != batch:
        raise ArgumentError(
            f"`attention_mask` must have a row for each of the {batch} sequences, got {list(attention_mask.shape)}."
        )


def _unpadding(attention_mask: Tensor, q_len: int, batch: int | None = None) -> _Unpadding:
    check_padding_mask(attention_mask, batch)
    if attention_mask.shape[1] < q_len:
        raise ArgumentError(
            f"`attention_mask` must cover past and present tokens, at least {q_len} columns, "
            f"got {list(attention_mask.shape)}."
        )
    return _find_valid(attention_mask, q_len)


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Positions of the valid tokens in the flattened mask, ``cu_seqlens`` ``[B + 1]`` int32, the longest row.

    Args:
        attention_mask: ``[B, T]``, 0 at padding on any side.
    """
    return tuple(_unpadding(attention_mask, attention_mask.shape[-1]))  # type: ignore[return-value]


def get_unpad_indices_and_cu(attention_mask: Tensor, q_len: int | None = None) -> tuple[Tensor, Tensor]:
    """As :func:`get_unpad_data` for the last ``q_len`` columns (all when None), without the longest row."""
    found = _unpadding(attention_mask, attention_mask.shape[-1] if q_len is None else q_len)
    return found.indices, found.cu_seqlens


def row_offsets(attention_mask: Tensor, length: int, seen: int) -> int | Tensor:
    """Valid tokens ``[B]`` before the last ``length`` columns; ``seen`` counts the past with its padding."""
    if not seen:
        return 0
    past = attention_mask[:, :-length] if length else attention_mask
    return seen - past.shape[1] + (past != 0).sum(-1)


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seq_len: int) -> Tensor:
    """``[total, ...]`` to ``[batch_size, seq_len, ...]`` with zeros at padding."""
    return index_put_first_axis(hidden_states, indices, batch_size * seq_len).unflatten(0, (batch_size, seq_len))


def unpad_hidden_states(
    hidden_states: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, q_len: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The valid tokens of ``[B, q_len, D]`` as ``[1, total, D]``, their positions, and ``cu_seqlens``.

    Given ``cu_seqlens`` win: the mask is ignored then. With neither, or without padding, the input comes back as it is.
    """
    if cu_seqlens is not None and not isinstance(cu_seqlens, Tensor):
        raise ArgumentError(f"`cu_seqlens` must be a tensor [N + 1], got {type(cu_seqlens).__name__}.")
    if cu_seqlens is not None or attention_mask is None:
        return hidden_states, None, cu_seqlens
    indices, cu_seqlens, _ = _unpadding(attention_mask, q_len, hidden_states.shape[0])
    if indices.shape[0] == hidden_states.shape[0] * q_len:
        return hidden_states, None, None
    return index_first_axis(hidden_states.flatten(0, 1), indices)[None], indices, cu_seqlens


def repad_hidden_states(hidden_states: Tensor, indices: Tensor | None, batch_size: int, q_len: int) -> Tensor:
    """Undo :func:`unpad_hidden_states`; ``indices=None`` returns the input."""
    if indices is None:
        return hidden_states
    return pad_input(hidden_states.squeeze(0), indices, batch_size, q_len)


def unpad_input(
    q: Tensor | tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    attention_mask: Tensor,
    q_len: int,
    keepdim: bool = False,
) -> tuple[Any, tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """Unpad queries and states of attention.

    Args:
        q: one or more ``[B, q_len, ...]``.
        states: keys, values and the like ``[B, S, ...]``.
        attention_mask: ``[B, S]``.
        q_len: ``S`` (prefill) or 1 (decoding).
        keepdim: put an axis of size 1 in front.

    Returns:
        ``q``, ``states``, positions of the queries, ``(cu_q, cu_k)``, ``(max_q, max_k)``.

    Raises:
        NotImplementedError: another ``q_len``.
    """
    B, S = states[0].shape[:2]
    keys = _unpadding(attention_mask, S, B)
    many = isinstance(q, tuple)
    queries = q if isinstance(q, tuple) else (q,)
    if q_len == S:
        indices_q, cu_q, max_q = keys
    elif q_len == 1:
        # One query a row, which is the newest token and therefore valid.
        cu_q = torch.arange(B + 1, dtype=torch.int32, device=attention_mask.device)
        indices_q, max_q = cu_q[:-1].long(), 1
    else:
        raise NotImplementedError(f"`q_len` must be the length of the states, {S}, or 1, got {q_len}.")

    def take(x: Tensor, indices: Tensor) -> Tensor:
        rows = index_first_axis(x.flatten(0, 1), indices)
        return rows[None] if keepdim else rows

    packed = tuple(take(x, indices_q) for x in queries)
    return (
        packed if many else packed[0],
        tuple(take(x, keys.indices) for x in states),
        indices_q,
        (cu_q, keys.cu_seqlens),
        (max_q, keys.max_seqlen),
    )


def require_cache_layer_idx(module: Any, past_key_values: Any) -> None:
    """Raise when a cache is passed to a layer that does not know its place in it."""
    if past_key_values is not None and getattr(module, "layer_idx", None) is None:
        raise ValueError(
            f"{type(module).__name__} requires `layer_idx` to use a cache: pass it to the constructor, or call the "
            "layer without `past_key_values`."
        )


def get_layer_cache(module: Any, past_key_values: Any) -> dict[str, Any] | None:
    """The states of this layer in the cache, or None when it has none yet."""
    require_cache_layer_idx(module, past_key_values)
    if past_key_values is None or len(past_key_values) <= module.layer_idx:
        return None
    return past_key_values[module.layer_idx]


def update_layer_cache(module: Any, past_key_values: Any, **kwargs: Any) -> Any:
    """Write this layer's states into the cache; None without one."""
    require_cache_layer_idx(module, past_key_values)
    if past_key_values is None:
        return None
    return past_key_values.update(layer_idx=module.layer_idx, **kwargs)
