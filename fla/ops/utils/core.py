# SPDX-License-Identifier: MIT
"""What the helpers compute, without checks and without autograd: PyTorch bodies, Triton paths beside them."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.ops._common.gates import compute_dtype
from fla.ops._common.single import transformed
from fla.ops._common.varlen import host_offsets, plan_chunks
from fla.ops.utils.index import prepare_chunk_offsets, prepare_lens, prepare_position_ids

_FACTS = CallFacts(tensors=("x",), key=None, value=None, initial_state=None, state_v_first=None)
_LONGEST_CHUNK, _LONGEST_ROW = 2048, 65536

Answer = tuple[bool, str | None]


_TRANSFORMED = False, "the Triton kernels compute no forward-mode derivatives and no torch.func transforms"


def covers(x: Tensor) -> Answer:
    """What every Triton path here needs."""
    if transformed():
        return _TRANSFORMED
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False, f"the Triton kernels take float16, bfloat16 and float32, got {x.dtype}"
    return True, None


def covers_chunks(x: Tensor, chunk: int) -> Answer:
    """The running sums of a chunk are one tile."""
    if chunk > _LONGEST_CHUNK:
        return False, f"the Triton kernel takes chunks up to {_LONGEST_CHUNK} tokens, got {chunk}"
    return covers(x)


def covers_rows(x: Tensor) -> Answer:
    """A row is one tile."""
    if x.shape[-1] > _LONGEST_ROW:
        return False, f"the Triton kernel takes rows up to {_LONGEST_ROW}, got {x.shape[-1]}"
    return covers(x)


def covers_softmax_grad(p: Tensor) -> Answer:
    """As `covers_rows`."""
    return covers_rows(p)


def covers_means_grad(dy: Tensor) -> Answer:
    """As `covers`."""
    return covers(dy)


def covers_moves(x: Tensor) -> Answer:
    """Rows are moved as they are, whatever they hold."""
    if transformed():
        return _TRANSFORMED
    if x.is_complex():
        return False, "Triton has no complex numbers"
    return True, None


def _sums(x: Tensor, dim: int, reverse: bool) -> Tensor:
    # Suffix sums are summed from the end: total minus prefix would lose small suffixes after a huge prefix.
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


@dispatch("utils", facts=_FACTS, triton="fla.ops.utils.triton_path:local_sums", triton_verifier=covers_chunks)
def local_sums(
    x: Tensor, chunk: int, reverse: bool, scale: float, cu_seqlens: Tensor | None, dtype: torch.dtype, uncovered: bool
) -> Tensor:
    """Running sums of ``[B, T, ...]`` inside chunks; ``uncovered``: there may be rows of no sequence, which get 0."""
    plan = plan_chunks(x.shape[0], x.shape[1], chunk, x.device, cu_seqlens)
    sums = _sums(plan.pack(x.to(compute_dtype(x.dtype))), 1, reverse)
    return (plan.unpack(sums) * scale).to(dtype).contiguous()


@dispatch("utils", facts=_FACTS, triton="fla.ops.utils.triton_path:global_sums", triton_verifier=covers)
def global_sums(x: Tensor, reverse: bool, scale: float, cu_seqlens: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Running sums of ``[B, T, ...]`` over whole sequences."""
    wide = x.to(compute_dtype(x.dtype))
    if cu_seqlens is None:
        sums = _sums(wide, 1, reverse)
    else:
        lens = [b - a for a, b in itertools.pairwise(host_offsets(cu_seqlens))]
        sums = torch.cat([_sums(part, 1, reverse) for part in wide.split(lens, 1)], 1)
    return (sums * scale).to(dtype)


@dispatch("utils", facts=_FACTS, triton="fla.ops.utils.triton_path:softmax", triton_verifier=covers_rows)
def softmax(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Softmax over the last axis."""
    return x.to(compute_dtype(x.dtype)).softmax(-1).to(dtype)


def softmax_grad_formula(p: Tensor, dp: Tensor, dtype: torch.dtype) -> Tensor:
    """`softmax_grad` in PyTorch, differentiable."""
    wide = compute_dtype(p.dtype)
    q, dq = p.to(wide), dp.to(wide)
    return (q * (dq - (q * dq).sum(-1, keepdim=True))).to(dtype)


@dispatch(
    "utils",
    facts=CallFacts(tensors=("p",), key=None, value=None),
    triton="fla.ops.utils.triton_path:softmax_grad",
    triton_verifier=covers_softmax_grad,
)
def softmax_grad(p: Tensor, dp: Tensor, dtype: torch.dtype) -> Tensor:
    """``p (dp - sum(p dp))``."""
    return softmax_grad_formula(p, dp, dtype)


@dispatch("utils", facts=_FACTS, triton="fla.ops.utils.triton_path:logsumexp", triton_verifier=covers_rows)
def logsumexp(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``log(sum(exp(scale x)))`` over the last axis."""
    return (x.to(compute_dtype(x.dtype)) * scale).logsumexp(-1).to(dtype)


@dispatch("utils", facts=_FACTS, triton="fla.ops.utils.triton_path:chunk_means", triton_verifier=covers)
def chunk_means(x: Tensor, chunk: int, cu_seqlens: Tensor | None) -> Tensor:
    """Means of the chunks of ``[B, T, ...]``."""
    dtype = compute_dtype(x.dtype)
    plan = plan_chunks(x.shape[0], x.shape[1], chunk, x.device, cu_seqlens)
    counts = plan.pack(x.new_ones(x.shape[:2], dtype=dtype)).sum(1)
    means = plan.pack(x.to(dtype)).sum(1) / counts.view(-1, *[1] * (x.dim() - 2))
    return plan.chunk_states(means).to(x.dtype)


@dispatch(
    "utils",
    facts=CallFacts(tensors=("dy",), key=None, value=None),
    triton="fla.ops.utils.triton_path:chunk_means_grad",
    triton_verifier=covers_means_grad,
)
def chunk_means_grad(dy: Tensor, shape: tuple[int, ...], chunk: int, cu_seqlens: Tensor | None) -> Tensor:
    """Gradient of `chunk_means` for inputs of ``shape``: each row gets its share of its chunk."""
    T = shape[1]
    if cu_seqlens is None:
        first = torch.arange(T, device=dy.device) // chunk * chunk
        index, length = first // chunk, torch.full_like(first, T)
    else:
        lens, position = prepare_lens(cu_seqlens), prepare_position_ids(cu_seqlens)
        first = position // chunk * chunk
        length = lens.repeat_interleave(lens)
        index = prepare_chunk_offsets(cu_seqlens, chunk)[:-1].repeat_interleave(lens) + first // chunk
    share = dy.to(compute_dtype(dy.dtype)).index_select(1, index)
    return (share / (length - first).clamp(max=chunk).view(-1, *[1] * (len(shape) - 2))).to(dy.dtype)


def _rows(cu_seqlens: Tensor, width: int, left: bool) -> Tensor:
    """Row of each packed token in the padded batch, whose sequences lie `width` rows apart."""
    lens = prepare_lens(cu_seqlens)
    first = torch.arange(len(lens), device=lens.device) * width
    if left:
        first = first + (width - lens)
    return torch.repeat_interleave(first, lens) + prepare_position_ids(cu_seqlens)


@dispatch("utils", facts=_FACTS, triton="fla.ops.utils.triton_path:pack", triton_verifier=covers_moves)
def pack(x: Tensor, cu_seqlens: Tensor, left: bool, total: int) -> Tensor:
    """``[N, S, ...]`` to ``[total, ...]``."""
    return x.flatten(0, 1).index_select(0, _rows(cu_seqlens, x.shape[1], left))


@dispatch("utils", facts=_FACTS, triton="fla.ops.utils.triton_path:unpack", triton_verifier=covers_moves)
def unpack(x: Tensor, cu_seqlens: Tensor, left: bool, width: int) -> Tensor:
    """``[total, ...]`` to ``[N, width, ...]``."""
    N = len(cu_seqlens) - 1
    y = x.new_zeros(N * width, *x.shape[1:]).index_copy(0, _rows(cu_seqlens, width, left), x)
    return y.unflatten(0, (N, width))
