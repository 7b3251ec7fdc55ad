# SPDX-License-Identifier: MIT
"""Decoders of Mamba: one mixer to a block, and no feed-forward part."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from fla.models.decoder import DecoderModel, GradientCheckpointingLayer, make_mixer, make_norm
from fla.models.family import Family
from fla.modules.mlp import GatedMLP

__all__ = ["MambaBlock", "MambaModel", "SambaBlock"]


class MambaBlock(GradientCheckpointingLayer):
    """``h += mixer(norm(h))``, with ``h`` in float32 where ``residual_in_fp32`` says so."""

    family: ClassVar[Family]
    norm_name: ClassVar[str] = "norm"

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.add_module(self.norm_name, make_norm(config))
        self.mixer: Any = make_mixer(self.family, config, layer_idx)
        if config.rescale_prenorm_residual:
            out: Any = getattr(self.mixer, "out_proj", None) or self.mixer.o_proj  # the latter in attention
            out.residual_additions = config.num_hidden_layers

    def forward(
        self, hidden_states: Tensor, stream_dtype: torch.dtype | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        """``[B, T, D]`` to ``(hidden_states, attention weights or None, past_key_values)``.

        Args:
            stream_dtype: dtype of the inputs of the mixer; None for that of ``hidden_states``.
            kwargs: what the mixer takes.
        """
        normed = getattr(self, self.norm_name)(hidden_states)
        mixed, weights, past_key_values = self.mixer(hidden_states=normed.to(stream_dtype or normed.dtype), **kwargs)
        residual = hidden_states.float() if self.config.residual_in_fp32 else hidden_states
        return residual + mixed, weights, past_key_values


class SambaBlock(MambaBlock):
    """A :class:`MambaBlock` followed by ``h += mlp(mlp_norm(h))``."""

    norm_name = "mixer_norm"

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.mlp_norm = make_norm(config)
        self.mlp = GatedMLP(
            config.hidden_size, config.hidden_ratio, hidden_act=config.hidden_act, fuse_swiglu=config.fuse_swiglu
        )
        if config.rescale_prenorm_residual:
            self.mlp.down_proj.residual_additions = config.num_hidden_layers

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Any]:
        """See :meth:`MambaBlock.forward`."""
        residual, *rest = super().forward(hidden_states, *args, **kwargs)
        dtype = kwargs.get("stream_dtype") or residual.dtype
        return residual + self.mlp(self.mlp_norm(residual).to(dtype), **kwargs), *rest


class MambaModel(DecoderModel):
    """A :class:`DecoderModel` that takes checkpoints whose embedding is called ``embedding``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_load_state_dict_pre_hook(_rename_embedding)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`DecoderModel.forward`."""
        return super().forward(*args, **kwargs, stream_dtype=self.embeddings.weight.dtype)

    # What inspect.signature shows, here and to transformers.
    forward.__wrapped__ = DecoderModel.forward  # type: ignore[attr-defined]


def _rename_embedding(module: Any, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
    old = f"{prefix}embedding.weight"
    if old in state_dict:
        state_dict[f"{prefix}embeddings.weight"] = state_dict.pop(old)
