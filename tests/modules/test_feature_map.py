# SPDX-License-Identifier: MIT
"""Feature maps against their formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from fla.modules import feature_map as fm

D = 5
X = torch.randn(2, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def pairs(x, y, strict):
    keep = [(i, j) for i, j in itertools.product(range(D), range(D)) if (i < j if strict else i <= j)]
    return torch.stack([x[..., i] * y[..., j] for i, j in keep], -1)


def test_outer_products_list_the_upper_triangle_row_by_row():
    y = X.flip(-1)
    torch.testing.assert_close(fm.flatten_diag_outer_product(X, y), pairs(X, y, False))
    mixed, squares = fm.flatten_diag_outer_product_off1(X, y)
    torch.testing.assert_close(mixed, pairs(X, y, True))
    torch.testing.assert_close(squares, X * y)
    x = X.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: fm.flatten_diag_outer_product(t, y), x)
    with pytest.raises(ValueError, match="equal last axes"):
        fm.flatten_diag_outer_product(X, X[..., :3])


def test_powers_of_two():
    assert [n for n in range(-2, 17) if fm.is_power_of_2(n)] == [1, 2, 4, 8, 16]


def test_hedgehog_begins_as_the_identity():
    m = fm.HedgehogFeatureMap(D).double()
    torch.testing.assert_close(m(X), torch.cat([2 * X, -2 * X], -1).softmax(-1))
    assert set(m.state_dict()) == {"layer.weight", "layer.bias"}


def test_t2r_dpfp_and_hadamard():
    m = fm.T2RFeatureMap(D, 7, bias=True).double()
    torch.testing.assert_close(m(X), F.relu(m.layer(X)))
    assert fm.T2RFeatureMap(D).double()(X).shape == (2, 3, D)
    r = torch.cat([X.relu(), (-X).relu()], -1)
    expected = torch.cat([r * torch.roll(r, j, -1) for j in (1, 2, 3)], -1)
    torch.testing.assert_close(fm.DPFPFeatureMap(D, 3)(X), expected)
    h = fm.HadamardFeatureMap(D).double()
    torch.testing.assert_close(h(X), h.layer1(X) * h.layer2(X))


def test_learned_outer_product():
    m = fm.LearnableOuterProductFeatureMap(3, D).double()
    x = X[..., :3]
    torch.testing.assert_close(m(x), pairs(m.layer1(x), m.layer2(x), False))
    assert set(m.state_dict()) == {"layer1.weight", "layer2.weight"}


@pytest.mark.parametrize(("degree", "sketches"), [(2, 1), (4, 1), (8, 2), (16, 3)])
def test_polynomial_sketches(degree: int, sketches: int):
    m = fm.LearnablePolySketchNonNegativeFeatureMap(D, 4, degree).double()
    assert len(m.sketches1) == len(m.sketches2) == sketches
    x = F.layer_norm(X, (D,), m.gamma, m.beta, 1e-5)
    for a, b in zip(m.sketches1, m.sketches2, strict=True):
        x = a(x) * b(x) / math.sqrt(D)
    i, j = torch.triu_indices(4, 4)
    torch.testing.assert_close(m(X), x[..., i] * x[..., j])


@pytest.mark.parametrize("degree", [0, 1, 3, None])
def test_degrees_that_are_no_powers_of_two(degree: int | None):
    with pytest.raises(ValueError, match="degree"):
        fm.LearnablePolySketchNonNegativeFeatureMap(D, degree=degree)


def test_products_of_taylor_features_are_the_series():
    y = X.flip(0)
    m = fm.TaylorFeatureMap(D)
    s = (X * y).sum(-1) / math.sqrt(D)
    torch.testing.assert_close((m(X) * m(y)).sum(-1), 1 + s + s * s / 2)
    assert m(X).shape[-1] == 1 + 2 * D + D * (D - 1) // 2


def test_products_of_rebased_features_are_squares():
    y = X.flip(0)
    m = fm.RebasedFeatureMap(D, normalize=False).double()
    torch.testing.assert_close((m(X) * m(y)).sum(-1), (X * y).sum(-1).square() / D)
    n = fm.RebasedFeatureMap(D).double()
    torch.testing.assert_close(n(X, flatten=False), F.layer_norm(X, (D,), n.gamma, n.beta))
    g = fm.RebasedFeatureMap(D, use_beta=False, normalize=False).double()
    torch.testing.assert_close(g(X, flatten=False), X * g.gamma)
    with pytest.raises(RuntimeError, match="use_gamma"):
        fm.RebasedFeatureMap(D, use_gamma=False, normalize=False)(X)


@pytest.mark.parametrize(
    ("kind", "reference"),
    [
        (fm.ReLUFeatureMap, F.relu),
        (fm.SquaredReLUFeatureMap, lambda x: F.relu(x).square()),
        (fm.GELUFeatureMap, F.gelu),
        (fm.SwishFeatureMap, F.silu),
        (fm.SigmoidFeatureMap, torch.sigmoid),
    ],
)
def test_elementwise_maps(kind, reference):
    torch.testing.assert_close(kind()(X), reference(X))
    assert kind()(X.bfloat16()).dtype == torch.bfloat16
