# SPDX-License-Identifier: MIT
"""What the layers with a recurrent state share: padding, choice of kernel, short convolutions, cache, gate parameters.

A layer registers its projections under the names of its state dict and writes :meth:`RecurrentLayer.mix`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fla.layers.utils import (
    check_padding_mask,
    get_layer_cache,
    host_offsets,
    repad_hidden_states,
    unpad_hidden_states,
    update_layer_cache,
)
from fla.modules._linears import joinable, joined
from fla.modules._plain import is_plain
from fla.modules.causal_conv1d import ShortConvolution
from fla.modules.causal_conv1d.together import step_together
from fla.ops._common.checks import ArgumentError

SHORT = 64
"""Up to this many tokens the step-by-step kernel is faster than the chunked one."""


@dataclass
class Call:
    """What a layer is asked for, behind padding and cache.

    Attributes:
        mode: kernel to run.
        state: the layer's entry of the cache, or an empty dict.
        keep_state: whether the states are wanted.
        cu_seqlens: boundaries ``[N + 1]``, or None.
        cu_seqlens_cpu: their host copy, or None.
        kwargs: what else the caller of the layer passed.
        projected: results of linear layers on the layer's input, where they were computed together.
    """

    mode: str
    state: dict[str, Any]
    keep_state: bool
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    kwargs: dict[str, Any]
    projected: dict[nn.Module, Tensor] = field(default_factory=dict)

    def linear(self, module: Any, x: Tensor) -> Tensor:
        """``module(x)``: a linear layer, or several in a row, on the input of the layer."""
        if self.projected and is_plain(module, nn.Sequential):
            for part in module:
                x = self.linear(part, x)
            return x
        done = self.projected.pop(module, None)
        return module(x) if done is None else done

    def pick(self, chunk: Any, fused_recurrent: Any) -> Any:
        """The kernel of ``mode``."""
        return fused_recurrent if self.mode == "fused_recurrent" else chunk

    @property
    def options(self) -> dict[str, Any]:
        """States and boundaries as every kernel takes them."""
        return {
            "initial_state": self.state.get("recurrent_state"),
            "output_final_state": self.keep_state,
            "cu_seqlens": self.cu_seqlens,
        }

    @property
    def host_options(self) -> dict[str, Any]:
        """:attr:`options`, and the host copy of the boundaries for chunked kernels, some of which take it."""
        host = {} if self.mode == "fused_recurrent" else {"cu_seqlens_cpu": self.cu_seqlens_cpu}
        return {**self.options, **host}

    def convolve(self, conv: Any, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Short convolution of ``x`` after ``state``, and its state where that is wanted."""
        return conv(
            x,
            cache=state,
            output_final_state=self.keep_state,
            cu_seqlens=self.cu_seqlens,
            cu_seqlens_cpu=self.cu_seqlens_cpu,
        )


class Mixed(NamedTuple):
    """What :meth:`RecurrentLayer.mix` returns."""

    output: Tensor  # [B, T, D]
    recurrent_state: Any
    conv_state: Any


def whole(name: str, value: float) -> int:
    """``value`` as an integer, for sizes that come from an expansion ratio."""
    if not math.isclose(value, round(value), rel_tol=1e-9):
        raise ArgumentError(f"`{name}` must come out as a whole number, got {value}.")
    return round(value)


def reset_dt_bias(dt_bias: nn.Parameter, dt_range: tuple[float, float] = (1e-3, 1e-1), dt_floor: float = 1e-4) -> None:
    """Initialise a bias so that its softplus is log-uniform on ``dt_range``; one that was loaded keeps its values."""
    if not getattr(dt_bias, "_is_hf_initialized", False):
        with torch.no_grad():
            dt = dt_bias.uniform_(*map(math.log, dt_range)).exp_().clamp_(min=dt_floor)
            # The inverse of softplus, dt + log(1 - exp(-dt)).
            dt.add_(dt.neg().expm1_().neg_().log_())


def reset_decay_gate(
    A_log: nn.Parameter,
    dt_bias: nn.Parameter,
    low: float,
    high: float = 16,
    dt_range: tuple[float, float] = (1e-3, 1e-1),
    dt_floor: float = 1e-4,
) -> None:
    """Initialise a gate ``-exp(A_log) * softplus(x + dt_bias)`` as Mamba does.

    ``exp(A_log)`` is uniform on ``[low, high]`` and ``softplus(dt_bias)`` log-uniform on ``dt_range``. Written with
    in-place operations, which work on sharded parameters too; parameters that were loaded keep their values.
    """
    if not getattr(A_log, "_is_hf_initialized", False):
        with torch.no_grad():
            A_log.uniform_(low, high).clamp_(min=1e-8).log_()
    reset_dt_bias(dt_bias, dt_range, dt_floor)


class RecurrentLayer(nn.Module):
    """Base of the recurrent token mixers.

    Attributes:
        modes: kernels that the layer accepts as ``mode``.
        undecayed: parameters that optimisers should not decay; trainers read the flag ``_no_weight_decay``.
        any_mode_trains: whether every kernel has gradients, so that short inputs always take the step-by-step one.
        training_needs_chunk: whether training mode refuses another kernel than the chunked one without autograd too.
        silu_without_conv: whether projections without a short convolution get SiLU.
        reads: linear layers on the layer's input, of those that it has.
        mode: the kernel for long inputs without autograd.
        layer_idx: place of the layer in a cache; None for a layer that is never given one.
    """

    modes: ClassVar[tuple[str, ...]] = ("chunk", "fused_recurrent")
    undecayed: ClassVar[tuple[str, ...]] = ()
    any_mode_trains: ClassVar[bool] = False
    training_needs_chunk: ClassVar[bool] = True
    silu_without_conv: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = tuple(f"{name}_proj" for name in (*"qkvgfibaw", "gk"))
    mode: str
    layer_idx: int | None
    use_short_conv: bool

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter; also what loading a checkpoint goes through, which makes new parameters."""
        super().register_parameter(name, param)
        if param is not None and name in self.undecayed:
            self._parameters[name]._no_weight_decay = True  # type: ignore[union-attr]

    def check_mode(self, mode: str) -> str:
        """``mode`` if the layer has it."""
        if mode not in self.modes:
            raise ArgumentError(f"`mode` must be one of {list(self.modes)}, got {mode!r}.")
        return mode

    def select_mode(self, length: int) -> str:
        """The kernel for ``length`` tokens (as padded): the chunked one under autograd, unless every one trains."""
        if self.any_mode_trains:
            return "fused_recurrent" if length <= SHORT else self.mode
        if torch.is_grad_enabled():
            return "chunk"
        chunk_only = self.training and self.training_needs_chunk
        if chunk_only and self.mode != "chunk":
            raise ArgumentError(f"Only mode 'chunk' can be used in training mode, got {self.mode!r}.")
        return "fused_recurrent" if length <= SHORT and not chunk_only else self.mode

    def add_short_convs(self, conv_size: int, conv_bias: bool, activation: str | None = "silu", **widths: int) -> None:
        """Register a :class:`ShortConvolution` as ``<name>_conv1d`` for every ``name=width``."""
        for name, width in widths.items():
            self.add_module(f"{name}_conv1d", ShortConvolution(width, conv_size, bias=conv_bias, activation=activation))

    def project(self, x: Tensor, names: str, call: Call) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...] | None]:
        """``<name>_proj`` and ``<name>_conv1d`` (or SiLU) for every letter of ``names``.

        Without convolutions the projections get SiLU, or nothing where ``silu_without_conv`` is False.

        Returns:
            The projections in that order, and the states of the convolutions (None without convolutions).
        """
        projected = tuple(call.linear(getattr(self, f"{name}_proj"), x) for name in names)
        if not self.use_short_conv:
            return tuple(F.silu(p) for p in projected) if self.silu_without_conv else projected, None
        states = call.state.get("conv_state") or (None,) * len(names)
        if states[0] is not None and call.keep_state:
            convs = tuple(getattr(self, f"{n}_conv1d") for n in names)
            stepped = step_together(convs, projected, states, call.cu_seqlens, call.cu_seqlens_cpu)
            if stepped is not None:
                return stepped, tuple(states)
        inputs = zip(names, projected, states, strict=True)
        outputs, kept = zip(*(call.convolve(getattr(self, f"{n}_conv1d"), p, s) for n, p, s in inputs), strict=True)
        return outputs, kept

    def read(self, x: Tensor) -> dict[nn.Module, Tensor]:
        """The layers :attr:`reads` on ``x``, joined for the sake of its gradient; empty where that is not possible."""
        found: Any = (getattr(self, name, None) for name in self.reads)
        found = [part[0] if is_plain(part, nn.Sequential) else part for part in found if part is not None]
        return dict(zip(found, joined(x, found), strict=True)) if joinable(x, found) else {}

    def mix(self, x: Tensor, call: Call) -> Mixed:
        """The layer itself, without padding and cache.

        Args:
            x: ``[B, T, D]``, or ``[1, total, D]`` with ``cu_seqlens``.
            call: the rest.
        """
        raise NotImplementedError

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """Mix the tokens of each sequence.

        Args:
            hidden_states: ``[B, T, D]``; packed sequences are one row ``[1, T, D]``.
            attention_mask: padding mask ``[B, S]`` with ``S >= T``, of which the last `T` columns count. Ignored when
                ``cu_seqlens`` is given.
            past_key_values: a :class:`fla.models.utils.Cache` to read and, with ``use_cache``, to write.
            use_cache: store the states after the last token.
            output_attentions: ignored; there are no attention weights.
            kwargs: ``cu_seqlens`` ``[N + 1]`` and ``cu_seqlens_cpu``; ``cache`` is another name of
                ``past_key_values``. Unknown names are ignored.

        Returns:
            ``(output [B, T, D], None, past_key_values)``.

        Raises:
            ArgumentError: a mask that is no padding mask, or ``cu_seqlens`` that do not fit.
            ValueError: a cache for a layer without ``layer_idx``.
        """
        cache = kwargs.pop("cache", None)
        past_key_values = cache if past_key_values is None else past_key_values
        check_padding_mask(attention_mask)
        state = get_layer_cache(self, past_key_values) or {}
        batch, length = hidden_states.shape[:2]
        mode = self.select_mode(length)
        x, indices, cu_seqlens = unpad_hidden_states(
            hidden_states, kwargs.pop("cu_seqlens", None), attention_mask, length
        )
        host = kwargs.pop("cu_seqlens_cpu", None)
        host = host_offsets(cu_seqlens) if host is None else host
        call = Call(mode, state, bool(use_cache), cu_seqlens, host, kwargs)
        if torch.is_grad_enabled() and x.requires_grad:
            call.projected = self.read(x)
        mixed = self.mix(x, call)
        if use_cache:
            update_layer_cache(
                self,
                past_key_values,
                recurrent_state=mixed.recurrent_state,
                conv_state=mixed.conv_state,
                offset=length,
            )
        return repad_hidden_states(mixed.output, indices, batch, length), None, past_key_values
