# SPDX-License-Identifier: MIT
"""The gated feed-forward network of a decoder block (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fla.modules._linears import linears
from fla.modules._plain import is_plain_linear
from fla.modules.activations import powglu, powglu_linear, swiglu, swiglu_linear
from fla.ops._common.checks import check_choice

__all__ = ["GatedMLP", "SwiGLULinear"]


class SwiGLULinear(nn.Module):
    """``swiglu_linear`` as a module without parameters, so that tensor-parallel plans can address it by name."""

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``F.linear(swish(x) * y, weight, bias)``."""
        return swiglu_linear(x, y, weight, bias)


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` on ``[..., hidden_size]``.

    Args:
        hidden_size: width of input and output.
        hidden_ratio: width of the inner layer over ``hidden_size`` before the 2/3 of a gated unit; 4 when None.
        intermediate_size: inner width; when None, ``2/3 * hidden_size * hidden_ratio`` rounded up to a multiple of 256.
        hidden_act: ``"swish"`` or ``"powlu"``.
        fuse_swiglu: compute the product inside the down projection, as long as that is a plain ``nn.Linear`` without
            hooks (an adapter in its place is called as a module).
        powglu_power: exponent of the ``"powlu"`` gate.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: float | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        powglu_power: float = 3.0,
    ) -> None:
        super().__init__()
        check_choice("hidden_act", hidden_act, ("swish", "powlu"))
        if hidden_ratio is None:
            hidden_ratio = 4
        if intermediate_size is None:
            intermediate_size = 256 * ((int(hidden_size * hidden_ratio * 2 / 3) + 255) // 256)
        self.hidden_size = hidden_size
        self.hidden_ratio = hidden_ratio
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.fuse_swiglu = fuse_swiglu
        self.powglu_power = powglu_power
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        if fuse_swiglu and hidden_act == "swish":
            self.swiglu_linear = SwiGLULinear()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """``[..., D] -> [..., D]``. Unknown keywords are ignored: blocks pass the keywords of the mixer on."""
        gate, y = linears(x, (self.gate_proj, self.up_proj))
        fuse = self.fuse_swiglu and is_plain_linear(self.down_proj)
        if self.hidden_act == "powlu":
            if fuse:
                return powglu_linear(gate, y, self.down_proj.weight, self.down_proj.bias, self.powglu_power)
            return self.down_proj(powglu(gate, y, self.powglu_power))
        if fuse:
            return self.swiglu_linear(gate, y, self.down_proj.weight, self.down_proj.bias)
        return self.down_proj(swiglu(gate, y))

    def extra_repr(self) -> str:
        return f"hidden_act={self.hidden_act!r}, fuse_swiglu={self.fuse_swiglu}"


def __getattr__(name: str) -> Any:
    # Plans import torch.distributed.tensor, which nobody else should wait for.
    if name == "SwiGLULinearParallel":
        from fla.modules.parallel import SwiGLULinearParallel

        return SwiGLULinearParallel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
