# SPDX-License-Identifier: MIT
"""RWKV-6: linear attention with token shift and data-dependent decay (https://arxiv.org/abs/2404.05892)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fla.layers._recurrent import Call, Mixed, RecurrentLayer, whole
from fla.modules._dtype import autocast_dtype, upcast
from fla.modules._plain import is_plain_linear
from fla.modules.activations import ACT2FN
from fla.modules.norm import GroupNorm
from fla.modules.token_shift import token_shift
from fla.ops._common.checks import check_choice
from fla.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

__all__ = ["DDLerpLinear", "LerpLinear", "LoRA", "RWKV6Attention"]


class LoRA(nn.Module):
    """``lora.2(tanh(lora.0(x)))``, a map of rank ``low_rank_dim`` with a bias."""

    def __init__(self, input_dim: int, output_dim: int, low_rank_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.lora = nn.Sequential(
            nn.Linear(input_dim, low_rank_dim, bias=False), nn.Tanh(), nn.Linear(low_rank_dim, output_dim, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[..., input_dim]`` to ``[..., output_dim]``."""
        return self.lora(x)


class DDLerpLinear(nn.Module):
    """A projection of ``x + delta * mu`` with ``mu`` from the caller; of low rank where ``low_rank_dim`` is given."""

    def __init__(self, input_dim: int, output_dim: int, low_rank_dim: int | None = None) -> None:
        super().__init__()
        self.linear: nn.Module
        if low_rank_dim is None:
            self.linear = nn.Linear(input_dim, output_dim, bias=False)
        else:
            self.linear = LoRA(input_dim, output_dim, low_rank_dim)

    def forward(self, x: Tensor, mu: Tensor, delta: Tensor) -> Tensor:
        """All ``[B, T, input_dim]``, to ``[B, T, output_dim]``."""
        return self.linear(torch.addcmul(x, delta, mu))


class LerpLinear(DDLerpLinear):
    """A :class:`DDLerpLinear` with a learned ``mu`` ``[input_dim]``."""

    def __init__(self, input_dim: int, output_dim: int, low_rank_dim: int | None = None) -> None:
        super().__init__(input_dim, output_dim, low_rank_dim)
        self.mu = nn.Parameter(torch.zeros(input_dim))

    def reset_parameters(self) -> None:
        """Set ``mu`` to zero; the projection initialises itself."""
        nn.init.zeros_(self.mu)

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:  # type: ignore[override]
        """Both ``[B, T, input_dim]``, to ``[B, T, output_dim]``."""
        return super().forward(x, self.mu.to(x.dtype), delta)


class RWKV6Attention(RecurrentLayer):
    """The time mixing of RWKV-6.

    With ``delta`` the difference of each token to the one before, five low-rank maps of both say where between the two
    the inputs of `r`, `w`, `k`, `v` and the output gate lie. Each head keeps
    ``S <- diag(exp(-exp(w))) S + k v^T`` and puts out ``(S + diag(bonus) k v^T)^T r`` of the state before the update,
    which is normalised by head, gated and projected.

    Args:
        mode: ``"chunk"`` or ``"fused_recurrent"``, the kernel of inputs of more than 64 tokens.
        hidden_size: width `D`.
        expand_k: key channels of all heads over `D`.
        expand_v: value channels of all heads over `D`.
        num_heads: heads `H`.
        gate_fn: activation of the output gate, one of :data:`fla.modules.activations.ACT2FN`.
        proj_low_rank_dim: rank of each of the five maps.
        gate_low_rank_dim: rank of the projection to `w`.
        fuse_norm: accepted and ignored.
        elementwise_affine: learn a scale and a shift in the output norm.
        norm_eps: epsilon of the output norm.
        layer_idx: place in a cache.

    Raises:
        ArgumentError: fractional heads, another mode or activation.
    """

    any_mode_trains: ClassVar[bool] = True

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        gate_fn: str = "swish",
        proj_low_rank_dim: int = 32,
        gate_low_rank_dim: int = 64,
        fuse_norm: bool = True,
        elementwise_affine: bool = True,
        norm_eps: float = 1e-5,
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.mode = self.check_mode(mode)
        self.hidden_size, self.expand_k, self.expand_v = hidden_size, expand_k, expand_v
        self.num_heads = num_heads
        self.key_dim = whole("hidden_size * expand_k", hidden_size * expand_k)
        self.value_dim = whole("hidden_size * expand_v", hidden_size * expand_v)
        self.head_k_dim = whole("hidden_size * expand_k / num_heads", self.key_dim / num_heads)
        self.head_v_dim = whole("hidden_size * expand_v / num_heads", self.value_dim / num_heads)
        self.proj_low_rank_dim, self.gate_low_rank_dim = proj_low_rank_dim, gate_low_rank_dim
        self.layer_idx = layer_idx
        check_choice("gate_fn", gate_fn, ACT2FN)
        self.gate_fn = ACT2FN[gate_fn]
        self.x_proj = nn.Sequential(
            LerpLinear(hidden_size, proj_low_rank_dim * 5),
            nn.Tanh(),
            nn.Linear(proj_low_rank_dim * 5, hidden_size, bias=False),
        )
        self.x_bias = nn.Parameter(torch.zeros(5, hidden_size))
        self.r_proj = DDLerpLinear(hidden_size, self.key_dim)
        self.w_proj = DDLerpLinear(hidden_size, self.key_dim, gate_low_rank_dim)
        self.k_proj = DDLerpLinear(hidden_size, self.key_dim)
        self.v_proj = DDLerpLinear(hidden_size, self.value_dim)
        self.g_proj = DDLerpLinear(hidden_size, self.value_dim)
        self.bonus = nn.Parameter(torch.zeros(num_heads, self.head_k_dim))
        self.g_norm = GroupNorm(num_heads, self.value_dim, elementwise_affine, True, norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)

    def reset_parameters(self) -> None:
        """Set the constant part of the five maps and the bonus to zero; the other parts initialise themselves."""
        nn.init.zeros_(self.x_bias)
        nn.init.zeros_(self.bonus)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """See :meth:`RecurrentLayer.forward`."""
        kwargs["cu_seqlens"] = cu_seqlens
        return super().forward(hidden_states, attention_mask, past_key_values, use_cache, output_attentions, **kwargs)

    def _side_by_side(self, low: Tensor) -> Tensor:
        """``[B, T, 5, R]`` to ``[5, B, T, D]`` by the five maps whose weights stand side by side in ``x_proj.2``."""
        last: Any = self.x_proj[2]
        eye = torch.eye(5, dtype=low.dtype, device=low.device)
        if is_plain_linear(last):
            dtype = autocast_dtype(low)
            return torch.einsum("btnr,dnr->nbtd", low.to(dtype), last.weight.unflatten(-1, (5, -1)).to(dtype))
        # Adapters and the like have to be called: each part alone, between zeros.
        return last((low * eye[:, None, None, :, None]).flatten(-2))

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """See :meth:`RecurrentLayer.mix`; the states are ``[N, H, K, V]`` float32 and the last tokens ``[N, D]``."""
        delta, last = shift_tokens(x, call.cu_seqlens, call.state.get("conv_state"), call.keep_state)
        low = self.x_proj[1](self.x_proj[0](x, delta)).unflatten(-1, (5, self.proj_low_rank_dim))
        mu = self._side_by_side(low) + self.x_bias.to(low.dtype)[:, None, None]
        r, w, k, v, g = (
            projection(x, m, delta)
            for projection, m in zip((self.r_proj, self.w_proj, self.k_proj, self.v_proj, self.g_proj), mu, strict=True)
        )
        r, w, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in (r, -upcast(w).exp(), k, v))
        kernel = call.pick(chunk_rwkv6, fused_recurrent_rwkv6)
        o, recurrent_state = kernel(r, k, v, w, self.bonus, scale=1.0, **call.host_options)
        return Mixed(self.o_proj(self.g_norm(o.flatten(-2)) * self.gate_fn(g)), recurrent_state, last)


def shift_tokens(
    x: Tensor, cu_seqlens: Tensor | None, last: Tensor | None, keep_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Difference of each token ``[B, T, D]`` to the one before, and the last token of each sequence where wanted."""
    shifted = token_shift(x, cu_seqlens, last, output_cache=keep_state)
    return shifted if isinstance(shifted, tuple) else (shifted, None)
