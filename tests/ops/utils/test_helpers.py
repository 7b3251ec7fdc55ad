# SPDX-License-Identifier: MIT
"""Sums, packing, pooling, reductions and inverses against plain formulas."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch

from fla.ops import utils

PACKED = [0, 5, 5, 70, 77]


def pieces(offsets: list[int] | None, T: int, chunk: int | None) -> list[tuple[int, int]]:
    spans = itertools.pairwise(offsets) if offsets else [(0, T)]
    return [(i, min(i + (chunk or T), b)) for a, b in spans for i in range(a, b, chunk or T)]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [16, 64, None])
@pytest.mark.parametrize(("shape", "offsets"), [((2, 77, 3), None), ((1, 77, 2), PACKED), ((1, 77, 2, 5), PACKED)])
def test_sums_restart_at_each_chunk_and_sequence(shape, offsets, chunk, reverse) -> None:
    g = torch.randn(shape)
    want = torch.empty_like(g)
    for a, b in pieces(offsets, 77, chunk):
        part = g[:, a:b]
        want[:, a:b] = part.flip(1).cumsum(1).flip(1) if reverse else part.cumsum(1)
    cu = torch.tensor(offsets) if offsets else None
    if chunk is None:
        got = utils.chunk_global_cumsum(g, reverse=reverse, cu_seqlens=cu, scale=0.5)
    else:
        got = utils.chunk_local_cumsum(g, chunk, reverse=reverse, cu_seqlens=cu, scale=0.5)
    torch.testing.assert_close(got, want * 0.5)


def test_small_suffixes_survive_a_huge_prefix() -> None:
    g = torch.full((1, 64, 1), 1e-3)
    g[:, 0] = 1e8
    want = g.flip(1).cumsum(1).flip(1)
    assert torch.equal(utils.chunk_local_cumsum(g, 64, reverse=True), want)
    assert torch.equal(utils.chunk_global_cumsum(g, reverse=True), want)


def test_sums_reject_what_they_cannot_sum() -> None:
    g = torch.randn(2, 8, 3)
    assert utils.chunk_local_cumsum(g.half(), 8).dtype == torch.float32
    assert utils.chunk_local_cumsum(g.half(), 8, output_dtype=None).dtype == torch.float16
    with pytest.raises(AssertionError, match="power of two"):
        utils.chunk_local_cumsum(g, 12)
    with pytest.raises(AssertionError, match="batch size is expected to be 1"):
        utils.chunk_local_cumsum(g, 8, cu_seqlens=torch.tensor([0, 8]))


@pytest.mark.parametrize("offsets", [[0, 9], [1, 8], [0, 5, 3, 8], [0, 7]])
def test_sums_refuse_offsets_that_do_not_fit(offsets) -> None:
    g, cu = torch.randn(1, 8, 2), torch.tensor(offsets)
    for sums in (
        utils.chunk_global_cumsum,
        lambda g, cu_seqlens: utils.chunk_local_cumsum(g, 4, cu_seqlens=cu_seqlens),
    ):
        with pytest.raises(ValueError, match="`cu_seqlens` must"):
            sums(g, cu_seqlens=cu)
    if offsets == [0, 7]:
        sums = utils.chunk_local_cumsum(g, 4, cu_seqlens=cu, use_graph=True)
        assert torch.equal(sums[:, :7], utils.chunk_local_cumsum(g[:, :7], 4))
        assert not sums[:, 7:].any()
    with pytest.raises(ValueError, match="shape"):
        utils.chunk_local_cumsum_vector(g, 8)
    with pytest.raises(DeprecationWarning, match="head_first"):
        utils.chunk_global_cumsum(g, head_first=True)
    with pytest.raises(TypeError):
        utils.chunk_global_cumsum(g, headfirst=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_packing_undoes_padding(side: str) -> None:
    cu = torch.tensor([0, 3, 3, 8])
    x = torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True)
    padded = utils.unpack_sequence(x, cu, padding_side=side)
    assert padded.shape == (3, 5, 2, 4)
    assert torch.equal(padded[0, 2:] if side == "left" else padded[0, :3], x[:3])
    assert not padded[1].any()
    assert torch.equal(utils.pack_sequence(padded, cu, padding_side=side), x)
    weight = torch.randn(3, 7, 2, 4, dtype=torch.float64)
    (utils.unpack_sequence(x, cu, side, desired_shape=(3, 7, 2, 4)) * weight).sum().backward()
    assert torch.equal(x.grad, utils.pack_sequence(weight, cu, side))


def test_packing_rejects_shapes_that_do_not_fit() -> None:
    cu = torch.tensor([0, 3, 8])
    with pytest.raises(AssertionError, match="padding_side"):
        utils.pack_sequence(torch.randn(2, 5), cu, padding_side="middle")
    with pytest.raises(AssertionError, match="axes"):
        utils.pack_sequence(torch.randn(5), cu)
    with pytest.raises(AssertionError, match="entries"):
        utils.pack_sequence(torch.randn(3, 5), cu)
    with pytest.raises(AssertionError, match="longer"):
        utils.pack_sequence(torch.randn(2, 4), cu)
    with pytest.raises(AssertionError, match="desired_shape"):
        utils.unpack_sequence(torch.randn(8, 4), cu, desired_shape=(3, 5, 4))


@pytest.mark.parametrize("offsets", [None, PACKED])
def test_pooling_divides_ragged_chunks_by_their_length(offsets) -> None:
    x = torch.randn(1, 77, 2, 3, dtype=torch.float64, requires_grad=True)
    got = utils.mean_pooling(x, 16, None if offsets is None else torch.tensor(offsets))
    want = torch.stack([x[:, a:b].mean(1) for a, b in pieces(offsets, 77, 16)], 1)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    torch.testing.assert_close(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (got, want)))
    with pytest.raises(ValueError, match="batch size"):
        utils.mean_pooling(torch.randn(2, 8, 1, 1), 4, torch.tensor([0, 8]))


def test_softmax_and_logsumexp_equal_torch() -> None:
    x = torch.randn(3, 4, 50, requires_grad=True)
    p = torch.softmax(x, -1)
    dp = torch.randn_like(p)
    torch.testing.assert_close(utils.softmax_fwd(x), p)
    torch.testing.assert_close(utils.softmax_bwd(p, dp), torch.autograd.grad(p, x, dp)[0])
    torch.testing.assert_close(utils.logsumexp_fwd(x, scale=0.3), (0.3 * x).logsumexp(-1))
    assert utils.logsumexp_fwd(x.half()).dtype == torch.float32
    assert utils.softmax_fwd(x.half(), dtype=None).dtype == torch.float16


def test_reductions_and_products_have_gradients() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    a, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 5), (5, 3)))
    A = torch.randn(1, 20, 1, 16, dtype=torch.float64, requires_grad=True)
    checked = {
        "softmax": (lambda t: utils.softmax_fwd(t, None), (x,)),
        "softmax_bwd": (lambda p, d: utils.softmax_bwd(p, d, None), (x, x)),
        "logsumexp": (lambda t: utils.logsumexp_fwd(t, 0.5), (x,)),
        "matmul": (lambda p, q: utils.matmul(p, q, "tanh"), (a, b)),
        "addmm": (lambda p, q: utils.addmm(torch.ones(3, dtype=p.dtype), p, q, 2.0), (a, b)),
        "solve_tril": (lambda t: utils.solve_tril(0.1 * t, output_dtype=None), (A,)),
        "cumsum": (lambda t: utils.chunk_local_cumsum(t, 16, True, 0.5, output_dtype=None), (A,)),
        "global": (lambda t: utils.chunk_global_cumsum(t, scale=0.5, output_dtype=None), (A,)),
    }
    for name, (fn, inputs) in checked.items():
        assert torch.autograd.gradcheck(fn, inputs), name


def test_products_with_activation_and_plain_number_factors() -> None:
    a, b, x = torch.randn(2, 5, 7), torch.randn(7, 3), torch.randn(3)
    torch.testing.assert_close(utils.matmul(a, b, "relu"), (a @ b).relu())
    torch.testing.assert_close(utils.addmm(x, a[0], b, alpha=2.0, beta=0.5), 0.5 * x + 2 * (a[0] @ b))
    torch.testing.assert_close(utils.addmm(torch.ones(5, 3), a[0], b), 1 + a[0] @ b)
    with pytest.raises(ValueError, match="activation"):
        utils.matmul(a, b, "gelu")
    with pytest.raises(AssertionError, match="K"):
        utils.matmul(a, b.T)


def test_sinkhorn_balances_rows_and_columns() -> None:
    x = torch.randn(2, 4, 4, requires_grad=True)
    y = utils.sinkhorn(x, 50)
    torch.testing.assert_close(y.sum(-1), torch.ones(2, 4))
    torch.testing.assert_close(y.sum(-2), torch.ones(2, 4), rtol=1e-3, atol=1e-3)
    y[..., 0, 0].sum().backward()
    assert x.grad.isfinite().all()
    for bad in (torch.randn(9, 9), torch.randn(2, 3), torch.ones(2, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="logits"):
            utils.sinkhorn(bad)
    with pytest.raises(ValueError, match="num_iters"):
        utils.sinkhorn(x, 0)


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("offsets", [None, PACKED])
def test_inverses_of_unit_triangular_chunks(C: int, offsets) -> None:
    A = torch.randn(1, 77, 2, C, dtype=torch.float64) * 0.3
    got = utils.solve_tril(A, None if offsets is None else torch.tensor(offsets), output_dtype=None)
    for a, b in pieces(offsets, 77, C):
        lower = A[0, a:b, :, : b - a].transpose(0, 1).tril(-1)
        want = torch.linalg.inv(torch.eye(b - a, dtype=A.dtype) + lower)
        torch.testing.assert_close(got[0, a:b, :, : b - a].transpose(0, 1), want)
        assert not got[0, a:b, :, b - a :].any()
    with pytest.raises(AssertionError, match="16, 32 or 64"):
        utils.solve_tril(torch.randn(1, 8, 1, 8))


def test_constants_do_not_depend_on_the_default_device() -> None:
    from fla.ops.utils import constant

    with torch.device("meta"):  # as models are built before their weights are loaded
        importlib.reload(constant)
    rounded = torch.tensor(1 / math.log(2), dtype=torch.float32).item()
    assert rounded == constant.RCP_LN2


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_list_the_queries_that_selected_them(packed) -> None:
    B, T, H, S, size = (1, 40, 2, 3, 8) if packed else (2, 20, 2, 3, 8)
    cu = torch.tensor([0, 11, 11, 40]) if packed else None
    first = [0, 2, 2] if packed else None
    total = 6 if packed else 3
    index = torch.randint(-1, 5, (B, T, H, S), generator=torch.Generator().manual_seed(0))
    counts = torch.randint(0, 4, (B, T, H), generator=torch.Generator().manual_seed(1))
    queries, offsets = utils.prepare_block_csr(index, counts, cu, None, total, size)
    want: dict[tuple[int, int, int], list[int]] = {}
    for b in range(B):
        for t in range(T):
            n = 0 if cu is None else (0 if t < 11 else 2)
            for h in range(H):
                for s in range(int(counts[b, t, h])):
                    j, position = int(index[b, t, h, s]), t - (0 if cu is None else int(cu[n]))
                    block = j + (first[n] if first else 0)
                    if j >= 0 and block < total and j * size <= position:
                        want.setdefault((b, h, block), []).append(b * T + t)
    assert queries.dtype == offsets.dtype == torch.int32
    rows = [(b, h, j) for b in range(B) for h in range(H) for j in range(total)]
    for n, row in enumerate(rows):
        assert sorted(queries[offsets[n] : offsets[n + 1]].tolist()) == sorted(want.get(row, []))
