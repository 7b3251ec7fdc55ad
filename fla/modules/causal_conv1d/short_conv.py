# SPDX-License-Identifier: MIT
"""The short convolution in front of most linear attention layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fla.backends.devices import has_module
from fla.modules.causal_conv1d.conv import causal_conv1d, causal_conv1d_update
from fla.ops._common.checks import ArgumentError

__all__ = ["ShortConvolution"]


def _chosen_backend(backend: str) -> str:
    from fla import settings

    chosen = settings.get("FLA_CONV_BACKEND") or backend
    if chosen not in ("triton", "cuda"):
        raise ArgumentError(f"`backend` (or FLA_CONV_BACKEND) must be 'triton' or 'cuda', got {chosen!r}.")
    if chosen == "cuda" and not has_module("causal_conv1d"):
        warnings.warn(
            "The package causal-conv1d (backend 'cuda') is not installed: ShortConvolution uses 'triton', this "
            "package's own implementation.",
            stacklevel=3,
        )
        return "triton"
    return chosen


class ShortConvolution(nn.Conv1d):
    """Depthwise causal convolution with SiLU on ``[B, T, hidden_size]``; keys ``weight [D, 1, W]`` and ``bias [D]``.

    Args:
        hidden_size: channels `D`.
        kernel_size: taps `W`.
        bias: learn a bias.
        activation: None, ``"silu"`` or ``"swish"``.
        backend: ``"triton"``, this package's own implementation, or ``"cuda"``, the package causal-conv1d for calls
            that it covers (a warning, and ``"triton"``, where it is not installed). ``FLA_CONV_BACKEND`` overrides it.

    Raises:
        ArgumentError: another activation or backend.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str = "triton",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if activation not in (None, "silu", "swish"):
            raise ArgumentError(f"`activation` must be None, 'silu' or 'swish', got {activation!r}.")
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            bias=bias,
            padding=kernel_size - 1,
            device=device,
            dtype=dtype,
        )
        if "use_fast_conv1d" in kwargs:
            warnings.warn("`use_fast_conv1d` has no effect; use `backend`.", stacklevel=2)
        self.hidden_size = hidden_size
        self.activation = activation
        self.backend = _chosen_backend(backend)

    @property
    def state_size(self) -> int:
        """Elements of the state of one sequence."""
        return self.hidden_size * self.kernel_size[0]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve, or take one step of decoding.

        Args:
            x: ``[B, T, D]``.
            residual: like ``x``; added after the activation.
            mask: ``[B, T]``, 0 at padding, whose inputs count as zero. Not together with ``cu_seqlens``.
            cache: ``[N, D, W]``. Written in place by a decoding step, which is taken without autograd when there is
                exactly one token for each sequence; only read otherwise.
            output_final_state: return the state.
            cu_seqlens: boundaries of packed sequences, ``[N + 1]``.
            kwargs: ``cu_seqlens_cpu`` and ``cp_context`` go to :func:`causal_conv1d`; unknown names are ignored.

        Returns:
            ``y`` like ``x``, and the state ``[N, D, W]`` or None.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ArgumentError("`mask` and `cu_seqlens` cannot be given together.")
            if mask.shape != x.shape[:2]:
                raise ArgumentError(f"`mask` must have shape [B, T] = {list(x.shape[:2])}, got {list(mask.shape)}.")
            x = x * mask.to(x.dtype)[..., None]
        if self._is_step(x, cache, cu_seqlens, kwargs.get("cu_seqlens_cpu")):
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x,
            self.weight,
            self.bias,
            residual=residual,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            backend=self.backend,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=kwargs.get("cu_seqlens_cpu"),
            chunk_indices=chunk_indices,
            cp_context=kwargs.get("cp_context"),
        )

    @staticmethod
    def _is_step(x: Tensor, cache: Tensor | None, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None) -> bool:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        B, T = x.shape[:2]
        if cu_seqlens is None:
            return T == 1 and (cache is None or cache.shape[0] == B)
        if B != 1 or cu_seqlens.numel() - 1 != T:
            return False
        offsets = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        return bool((offsets.diff() == 1).all())

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token for each sequence; ``cache`` (zeros when None) is updated in place."""
        N = x.shape[0] * x.shape[1]
        if cache is None:
            cache = x.new_zeros(N, self.hidden_size, self.kernel_size[0])
        y, cache = causal_conv1d_update(x, cache, residual, self.weight, self.bias, self.activation)
        return y, cache if output_final_state else None
