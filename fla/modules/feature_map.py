# SPDX-License-Identifier: MIT
"""Feature maps of linear attention: functions of the channels of a head, ``[..., D]`` to ``[..., F]``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.modules.activations import fast_gelu_impl, sigmoid, sqrelu, swish
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


def _products(x: Tensor, y: Tensor, offset: int) -> Tensor:
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], offset, device=x.device)
    return x[..., i] * y[..., j]


def flatten_diag_outer_product(x: Tensor, y: Tensor) -> Tensor:
    """``x_i y_j`` for ``i <= j``, row by row: ``[..., D]`` to ``[..., D (D + 1) / 2]``."""
    return _products(x, y, 0)


def flatten_diag_outer_product_off1(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``x_i y_j`` for ``i < j``, row by row ``[..., D (D - 1) / 2]``, and ``x_i y_i`` ``[..., D]``."""
    return _products(x, y, 1), x * y


def is_power_of_2(n: int) -> bool:
    """Whether ``n`` is 1, 2, 4, 8 and so on."""
    return n > 0 and n & (n - 1) == 0


class HedgehogFeatureMap(nn.Module):
    """``softmax([2 h, -2 h])`` with a linear ``h`` that starts as the identity (https://arxiv.org/abs/2402.04347).

    ``[..., D]`` to ``[..., 2 D]``.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the layer to the identity."""
        with torch.no_grad():
            nn.init.zeros_(self.layer.bias)
            nn.init.eye_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = 2 * self.layer(x)
        return torch.cat([h, -h], -1).softmax(-1)


class T2RFeatureMap(nn.Module):
    """``relu(layer(x))`` (https://arxiv.org/abs/2103.13076); ``[..., D]`` to ``[..., dot_dim]`` (`D` when None)."""

    def __init__(self, head_dim: int, dot_dim: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(head_dim, head_dim if dot_dim is None else dot_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x))


class DPFPFeatureMap(nn.Module):
    """``r * roll(r, j)`` for ``j = 1 .. nu`` with ``r = [relu(x), relu(-x)]`` (https://arxiv.org/abs/2102.11174).

    ``[..., D]`` to ``[..., 2 D nu]``.
    """

    def __init__(self, head_dim: int, nu: int = 4) -> None:
        super().__init__()
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        r = torch.cat([F.relu(x), F.relu(-x)], -1)
        return torch.cat([r * r.roll(j, -1) for j in range(1, self.nu + 1)], -1)


class HadamardFeatureMap(nn.Module):
    """``layer1(x) * layer2(x)``; ``[..., D]`` to ``[..., D]``."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, head_dim)
        self.layer2 = nn.Linear(head_dim, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer1(x) * self.layer2(x)


class LearnableOuterProductFeatureMap(nn.Module):
    """Products of two projections to ``feature_dim`` channels: ``[..., D]`` to ``[..., F (F + 1) / 2]``."""

    def __init__(self, head_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.layer1 = nn.Linear(head_dim, feature_dim, bias=False)
        self.layer2 = nn.Linear(head_dim, feature_dim, bias=False)
        self.normalizer = feature_dim**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return flatten_diag_outer_product(self.layer1(x), self.layer2(x))


class LearnablePolySketchNonNegativeFeatureMap(nn.Module):
    """Learned sketches of a polynomial kernel, squared so that no score is negative (https://arxiv.org/abs/2310.01655).

    ``[..., D]`` to ``[..., S (S + 1) / 2]`` with ``S = sketch_size`` (`D` when None).

    Raises:
        ArgumentError: a ``degree`` that is not a power of two, at least 2.
    """

    def __init__(self, head_dim: int, sketch_size: int | None = None, degree: int = 2) -> None:
        super().__init__()
        if degree < 2 or not is_power_of_2(degree):
            raise ArgumentError(f"`degree` must be a power of two, at least 2, got {degree}.")
        self.head_dim, self.degree = head_dim, degree
        self.sketch_size = size = head_dim if sketch_size is None else sketch_size
        self.gamma = nn.Parameter(torch.ones(head_dim))
        self.beta = nn.Parameter(torch.zeros(head_dim))
        # Degrees 2 and 4 give the same network: the reference starts counting at 4.
        widths = [head_dim, *[size] * max(0, degree.bit_length() - 3)]
        self.sketches1 = nn.ModuleList(nn.Linear(width, size, bias=False) for width in widths)
        self.sketches2 = nn.ModuleList(nn.Linear(width, size, bias=False) for width in widths)

    def reset_parameters(self) -> None:
        """Set scale and shift; the sketches initialise themselves."""
        nn.init.ones_(self.gamma)
        nn.init.zeros_(self.beta)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x, (self.head_dim,), self.gamma.to(x.dtype), self.beta.to(x.dtype), 1e-5)
        for a, b in zip(self.sketches1, self.sketches2, strict=True):
            x = a(x) * b(x) * self.head_dim**-0.5
        return flatten_diag_outer_product(x, x)


class TaylorFeatureMap(nn.Module):
    """The terms of ``exp(q . k / sqrt(D))`` up to order 2 (https://arxiv.org/abs/2402.18668).

    ``[..., D]`` to ``[..., 1 + D + D (D + 1) / 2]``: 1, ``x_i``, ``x_i ** 2``, ``x_i x_j``, each with its factor.
    """

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        off, diagonal = flatten_diag_outer_product_off1(x, x)
        root = self.head_dim**0.5
        parts = [torch.ones_like(x[..., :1]), x / root**0.5, diagonal / (2**0.5 * root), off / root]
        return torch.cat(parts, -1)


class RebasedFeatureMap(nn.Module):
    """Squares and products of normalised channels (https://arxiv.org/abs/2402.10644).

    ``[..., D]`` to ``[..., D (D + 1) / 2]``, or the normalised ``[..., D]`` with ``flatten=False``.

    Args:
        head_dim: `D`.
        use_gamma: learn a scale.
        use_beta: learn a shift, where there is a norm or a scale.
        normalize: apply a layer norm.
    """

    def __init__(
        self, head_dim: int, use_gamma: bool | None = True, use_beta: bool | None = True, normalize: bool | None = True
    ) -> None:
        super().__init__()
        self.head_dim, self.use_gamma, self.use_beta, self.normalize = head_dim, use_gamma, use_beta, normalize
        self.gamma: nn.Parameter | None
        self.beta: nn.Parameter | None
        self.register_parameter("gamma", nn.Parameter(torch.ones(head_dim)) if use_gamma else None)
        self.register_parameter("beta", nn.Parameter(torch.zeros(head_dim)) if use_beta else None)

    def reset_parameters(self) -> None:
        """Set scale and shift to those that change nothing."""
        if self.gamma is not None:
            nn.init.ones_(self.gamma)
        if self.beta is not None:
            nn.init.zeros_(self.beta)

    def forward(self, x: Tensor, flatten: bool | None = True) -> Tensor:
        gamma, beta = (None if p is None else p.to(x.dtype) for p in (self.gamma, self.beta))
        if self.normalize:
            x = F.layer_norm(x, (self.head_dim,), gamma, beta, 1e-5)
        elif gamma is None:
            raise RuntimeError("RebasedFeatureMap needs `normalize` or `use_gamma`.")
        else:
            x = x * gamma if beta is None else torch.addcmul(beta, x, gamma)
        if not flatten:
            return x
        off, diagonal = flatten_diag_outer_product_off1(x, x)
        return torch.cat([diagonal * self.head_dim**-0.5, off * (2 / self.head_dim) ** 0.5], -1)


class ReLUFeatureMap(nn.Module):
    """``relu(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class SquaredReLUFeatureMap(nn.Module):
    """``relu(x) ** 2``."""

    def forward(self, x: Tensor) -> Tensor:
        return sqrelu(x)


class GELUFeatureMap(nn.Module):
    """GELU in its tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        return fast_gelu_impl(x)


class SwishFeatureMap(nn.Module):
    """``x * sigmoid(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return swish(x)


class SigmoidFeatureMap(nn.Module):
    """``sigmoid(x)``."""

    def forward(self, x: Tensor) -> Tensor:
        return sigmoid(x)
