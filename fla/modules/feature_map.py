# SPDX-License-Identifier: MIT
"""Feature maps of linear attention. All act on the last axis, ``[..., head_dim]``, and run on any device.

Outer products are listed as the upper triangle in row-major order, the order of :func:`torch.triu_indices`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fla.modules._dtype import upcast
from fla.ops._common.checks import ArgumentError

__all__ = [
    "DPFPFeatureMap",
    "GELUFeatureMap",
    "HadamardFeatureMap",
    "HedgehogFeatureMap",
    "LearnableOuterProductFeatureMap",
    "LearnablePolySketchNonNegativeFeatureMap",
    "ReLUFeatureMap",
    "RebasedFeatureMap",
    "SigmoidFeatureMap",
    "SquaredReLUFeatureMap",
    "SwishFeatureMap",
    "T2RFeatureMap",
    "TaylorFeatureMap",
    "flatten_diag_outer_product",
    "flatten_diag_outer_product_off1",
    "is_power_of_2",
]


def _triangle(x: Tensor, y: Tensor, offset: int) -> Tensor:
    if x.shape[-1] != y.shape[-1]:
        raise ArgumentError(f"`x` and `y` must have equal last axes, got {x.shape[-1]} and {y.shape[-1]}.")
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], offset, device=x.device)
    return x.index_select(-1, i) * y.index_select(-1, j)


def _triangle_and_diagonal(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return _triangle(x, y, 1), x * y


def flatten_diag_outer_product(x: Tensor, y: Tensor) -> Tensor:
    """``x_i y_j`` for ``i <= j``, ``[..., d (d + 1) / 2]``. Computed again in the backward pass instead of kept."""
    return checkpoint(_triangle, x, y, 0, use_reentrant=False)


def flatten_diag_outer_product_off1(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``x_i y_j`` for ``i < j``, ``[..., d (d - 1) / 2]``, and ``x_i y_i``, ``[..., d]``; kept as the whole is."""
    return checkpoint(_triangle_and_diagonal, x, y, use_reentrant=False)


def is_power_of_2(n: int) -> bool:
    """Whether ``n`` is a power of two, 1 included."""
    return n > 0 and n & (n - 1) == 0


class HedgehogFeatureMap(nn.Module):
    """``softmax([2 h, -2 h])`` of a learned ``h``, initially the identity (https://arxiv.org/abs/2402.04347)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim)
        self.init_weights_()

    def init_weights_(self) -> None:
        """Make the layer the identity."""
        with torch.no_grad():
            nn.init.eye_(self.layer.weight)
            nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., 2 d]``."""
        h = 2 * self.layer(x)
        return torch.cat([h, -h], -1).softmax(-1)


class T2RFeatureMap(nn.Module):
    """``relu(W x)`` (https://arxiv.org/abs/2103.13076).

    Args:
        head_dim: `d`.
        dot_dim: features; as many as channels when None.
        bias: learn a bias.
    """

    def __init__(self, head_dim: int, dot_dim: int | None = None, bias: bool | None = False) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.dot_dim = head_dim if dot_dim is None else dot_dim
        self.bias = bias
        self.layer = nn.Linear(head_dim, self.dot_dim, bias=bool(bias))

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., dot_dim]``."""
        return self.layer(x).relu()


class DPFPFeatureMap(nn.Module):
    """Products of ``r = [relu(x), relu(-x)]`` with itself rolled by 1 to ``nu`` (https://arxiv.org/abs/2102.11174)."""

    def __init__(self, head_dim: int, nu: int = 4) -> None:
        super().__init__()
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., 2 d nu]``."""
        r = torch.cat([x.relu(), (-x).relu()], -1)
        return torch.cat([r * r.roll(j, -1) for j in range(1, self.nu + 1)], -1)


class HadamardFeatureMap(nn.Module):
    """The product of two linear layers, element by element."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., d]``."""
        return self.layer1(x) * self.layer2(x)


class LearnableOuterProductFeatureMap(nn.Module):
    """Upper triangle, with the diagonal, of the outer product of two learned projections.

    Args:
        head_dim: `d`.
        feature_dim: width `f` of the projections.
    """

    def __init__(self, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, feature_dim, bias=False)
        self.layer2 = nn.Linear(head_dim, feature_dim, bias=False)
        self.normalizer = feature_dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., f (f + 1) / 2]``."""
        return flatten_diag_outer_product(self.layer1(x), self.layer2(x))


class LearnablePolySketchNonNegativeFeatureMap(nn.Module):
    """A learned sketch of a polynomial kernel, squared so that no value is negative (https://arxiv.org/abs/2310.01655).

    Args:
        head_dim: `d`.
        sketch_size: width `s` of a sketch; `d` when None.
        degree: of the polynomial, a power of two and at least 2. Degrees 2 and 4 are the same network, as in the
            reference package.

    Raises:
        ArgumentError: another degree.
    """

    def __init__(self, head_dim: int, sketch_size: int | None = None, degree: int | None = 2) -> None:
        super().__init__()
        if degree is None or degree < 2 or not is_power_of_2(degree):
            raise ArgumentError(f"`degree` must be a power of two and at least 2, got {degree}.")
        self.head_dim = head_dim
        self.sketch_size = head_dim if sketch_size is None else sketch_size
        self.degree = degree
        self.gamma = nn.Parameter(torch.ones(head_dim))
        self.beta = nn.Parameter(torch.zeros(head_dim))
        widths = [head_dim] + [self.sketch_size] * max(0, int(math.log2(degree)) - 2)
        self.sketches1 = nn.ModuleList(nn.Linear(n, self.sketch_size, bias=False) for n in widths)
        self.sketches2 = nn.ModuleList(nn.Linear(n, self.sketch_size, bias=False) for n in widths)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., s (s + 1) / 2]``."""
        x = F.layer_norm(x, (self.head_dim,), self.gamma.to(x.dtype), self.beta.to(x.dtype), 1e-5)
        for first, second in zip(self.sketches1, self.sketches2, strict=True):
            x = first(x) * second(x) * self.head_dim**-0.5
        return flatten_diag_outer_product(x, x)


class TaylorFeatureMap(nn.Module):
    """Terms of the second-order series of ``exp(q k / sqrt(d))`` (https://arxiv.org/abs/2402.18668)."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.r2 = math.sqrt(2)
        self.rd = math.sqrt(head_dim)
        self.rrd = math.sqrt(self.rd)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., d] -> [..., 1 + 2 d + d (d - 1) / 2]``: 1, `x`, squares, products of different channels, scaled."""
        mixed, squares = flatten_diag_outer_product_off1(x, x)
        one = torch.ones_like(x[..., :1])
        return torch.cat([one, x / self.rrd, squares / (self.r2 * self.rd), mixed / self.rd], -1)


class RebasedFeatureMap(nn.Module):
    """Squares and products of channels after an affine map (https://arxiv.org/abs/2402.10644).

    Args:
        head_dim: `d`.
        use_gamma, use_beta: learn a factor and an offset for each channel.
        normalize: layer norm before them.

    Raises:
        RuntimeError: in ``forward``, with neither ``use_gamma`` nor ``normalize``, unless the offset alone is learned.
    """

    def __init__(
        self, head_dim: int, use_gamma: bool | None = True, use_beta: bool | None = True, normalize: bool | None = True
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.use_gamma = use_gamma
        self.use_beta = use_beta
        self.normalize = normalize
        self.gamma = nn.Parameter(torch.ones(head_dim)) if use_gamma else None
        self.beta = nn.Parameter(torch.zeros(head_dim)) if use_beta else None

    def forward(self, x: Tensor, flatten: bool | None = True) -> Tensor:
        """``[..., d] -> [..., d (d + 1) / 2]``; without ``flatten`` the affine map alone, ``[..., d]``."""
        gamma = None if self.gamma is None else self.gamma.to(x.dtype)
        beta = None if self.beta is None else self.beta.to(x.dtype)
        if self.normalize:
            x = F.layer_norm(x, (self.head_dim,), gamma, beta)
        elif gamma is not None:
            x = x * gamma if beta is None else torch.addcmul(beta, x, gamma)
        else:
            raise RuntimeError("RebasedFeatureMap needs `normalize` or `use_gamma`, both are off.")
        if not flatten:
            return x
        mixed, squares = flatten_diag_outer_product_off1(x, x)
        root = self.head_dim**-0.5
        return torch.cat([squares * root, mixed * (root * math.sqrt(2))], -1)


class ReLUFeatureMap(nn.Module):
    """``relu(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SquaredReLUFeatureMap(nn.Module):
    """``relu(x) ** 2``, squared in float32 at least."""

    def forward(self, x: Tensor) -> Tensor:
        return upcast(F.relu(x)).square().to(x.dtype)


class GELUFeatureMap(nn.Module):
    """``gelu(x)``, exact."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class SwishFeatureMap(nn.Module):
    """``x * sigmoid(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class SigmoidFeatureMap(nn.Module):
    """``sigmoid(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)
