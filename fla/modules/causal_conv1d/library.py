# SPDX-License-Identifier: MIT
"""The package causal-conv1d behind the same dispatch, for calls that ask for it with ``backend="cuda"``.

Written from the package's interface and tested with a stub of it only (tests/modules/test_conv_library.py): no machine
of the project had it installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.backends import BaseBackend, Capability, hookimpl
from fla.modules.causal_conv1d.conv import causal_conv1d_update_states


class CausalConv1d(BaseBackend):
    """2 to 4 taps, multiples of 8 channels. States go in and come out as in our own implementation."""

    backend_type = "causal_conv1d"
    package_name = "causal_conv1d"
    env_var = "FLA_CAUSAL_CONV1D"
    capability = Capability(device_types=("cuda",), dtypes=("bfloat16", "float16", "float32"))

    def causal_conv1d_verifier(
        self,
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        activation: str | None = None,
        backend: str = "triton",
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[bool, str | None]:
        assert weight is not None
        if backend != "cuda":
            return False, f"the call asks for backend={backend!r}"
        D, W = weight.shape[0], weight.shape[-1]
        if not 2 <= W <= 4:
            return False, f"it has 2 to 4 taps, got {W}"
        if D % 8:
            return False, f"it takes multiples of 8 channels, got {D}"
        if cu_seqlens is not None and initial_state is not None:
            return False, "it takes no initial state with packed sequences"
        return True, None

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        activation: str | None = None,
        backend: str = "triton",
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        cp_context: Any = None,
        *,
        seq_idx: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        from causal_conv1d import causal_conv1d_fn

        rows = x.flatten(2)
        if rows.stride(2) != 1 or rows.stride(0) % 8 or rows.stride(1) % 8:
            rows = rows.contiguous()
        past = None
        if initial_state is not None:
            # Its states have no slot for the input that no output reads. Channels lie side by side, as in `x`.
            past = initial_state[..., 1:].to(x.dtype).transpose(1, 2).contiguous().transpose(1, 2)
        if cu_seqlens is not None:
            token = torch.arange(rows.shape[1], device=x.device)
            ends = cu_seqlens[1:].long().contiguous()
            seq_idx = torch.searchsorted(ends, token, right=True).to(torch.int32)[None]
        y = causal_conv1d_fn(
            rows.transpose(1, 2),
            weight.flatten(1).to(x.dtype),
            None if bias is None else bias.to(x.dtype),
            seq_idx=seq_idx,
            initial_states=past,
            activation=activation,
        ).transpose(1, 2)
        y = y.reshape(x.shape)
        if residual is not None:
            y = y + residual.to(y.dtype)
        if not output_final_state:
            return y, None
        # By our own gather, which carries gradients and knows packed sequences.
        return y, causal_conv1d_update_states(rows, weight.shape[-1], initial_state, cu_seqlens)


@hookimpl
def register_backends(registry: Any) -> None:
    registry.register("modules", CausalConv1d())


__all__ = ["CausalConv1d", "register_backends"]
