# SPDX-License-Identifier: MIT
"""Decoders of RWKV: layer norms, and a feed-forward part that looks at the token before."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from fla.layers.rwkv6 import LerpLinear, shift_tokens
from fla.layers.utils import get_layer_cache, repad_hidden_states, unpad_hidden_states, update_layer_cache
from fla.models.decoder import Block, DecoderModel
from fla.modules.activations import ACT2FN
from fla.modules.norm import LayerNorm

__all__ = ["RWKV6Block", "RWKV6FeedForward", "RWKVModel"]


def make_layer_norm(config: Any) -> nn.Module:
    """A layer norm: ours, which adds the residual in the same pass, or torch's. The keys are the same."""
    norm: Any = LayerNorm if config.fuse_norm else nn.LayerNorm
    return norm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)


class RWKV6FeedForward(nn.Module):
    """``sigmoid(receptance(x)) * value(act(key(x)))``, where both see a mixture of each token with the one before."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        D, width = config.hidden_size, config.intermediate_size
        if width is None:
            width = -(-int(D * (config.hidden_ratio or 3.5)) // 32) * 32
        self.hidden_size, self.intermediate_size, self.layer_idx = D, width, layer_idx
        self.key = LerpLinear(D, width)
        self.value = nn.Linear(width, D, bias=False)
        self.receptance = LerpLinear(D, D)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """``[B, T, D]`` to ``[B, T, D]``; arguments as for the token mixers. The last tokens are cached."""
        batch, length = x.shape[:2]
        state = get_layer_cache(self, past_key_values) or {}
        x, indices, cu_seqlens = unpad_hidden_states(x, cu_seqlens, attention_mask, length)
        delta, last = shift_tokens(x, cu_seqlens, state.get("ffn_state"), bool(use_cache))
        y = self.receptance(x, delta).sigmoid() * self.value(self.act_fn(self.key(x, delta)))
        if use_cache:  # the token mixer has counted the tokens
            update_layer_cache(self, past_key_values, ffn_state=last, offset=0)
        return repad_hidden_states(y, indices, batch, length)


class RWKV6Block(Block):
    """``h += attn(attn_norm(h)); h += ffn(ffn_norm(h))``, after a norm of the embeddings in layer 0."""

    feed_forward = "ffn"
    make_norm = staticmethod(make_layer_norm)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.norm_first and layer_idx == 0:
            self.pre_norm = make_layer_norm(config)
        self.attn.o_proj.residual_additions = 2 * config.num_hidden_layers

    def make_feed_forward(self) -> nn.Module:
        """See :meth:`Block.make_feed_forward`."""
        return RWKV6FeedForward(self.config, self.layer_idx)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Any]:
        """See :meth:`Block.forward`."""
        if hasattr(self, "pre_norm"):
            hidden_states = self.pre_norm(hidden_states)
        return super().forward(hidden_states, *args, **kwargs)


_PARAMETERS = [*inspect.signature(DecoderModel.forward).parameters.values()]
_PARAMETERS.insert(-1, inspect.Parameter("cu_seqlens", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None))


class RWKVModel(DecoderModel):
    """A :class:`DecoderModel` with layer norms."""

    make_norm = staticmethod(make_layer_norm)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`DecoderModel.forward`; ``cu_seqlens`` may be given by position too, as the last."""
        places = len(_PARAMETERS) - 3  # without `self`, `cu_seqlens` and `kwargs`
        kwargs.update(zip(["cu_seqlens"], args[places:], strict=False))
        return super().forward(*args[:places], **kwargs)

    forward.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
