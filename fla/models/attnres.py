# SPDX-License-Identifier: MIT
"""Attention over residuals: what enters a part of a block is a learned mixture of what earlier parts put out.

The outputs of consecutive attention and feed-forward parts are summed in groups of ``attnres_block_size``; the
embeddings are a group of their own. A part sees the sums of all groups so far, weighted by a softmax for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fla.modules._dtype import upcast
from fla.modules.norm import RMSNorm
from fla.modules.norm.layernorm import normalize

__all__ = ["add_mixture", "block_forward", "check_checkpointing", "mix"]


def add_mixture(module: nn.Module, prefix: str, config: Any) -> None:
    """Register ``<prefix>res_proj``, the query (zero at first), and ``<prefix>res_norm``, of what it is held to."""
    query = nn.Linear(config.hidden_size, 1, bias=False)
    query._is_attnres_proj = True  # type: ignore[assignment]
    module.add_module(f"{prefix}res_proj", query)
    module.add_module(f"{prefix}res_norm", RMSNorm(config.hidden_size, eps=config.norm_eps))


def check_checkpointing(block: Any) -> None:
    """Raise where the block is checkpointed reentrantly, which gives no gradient to a list of sums."""
    if getattr(block._gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
        raise ValueError(
            "`attnres_block_size` needs gradient checkpointing that is not reentrant: "
            "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
        )


def _mixture(query: Tensor, scale: Tensor, out_scale: Tensor, eps: float, out_eps: float, *sums: Tensor) -> Tensor:
    key = (upcast(query) * upcast(scale)).flatten()
    wide = [upcast(s) for s in sums]
    scores = torch.stack([torch.rsqrt(s.square().mean(-1) + eps) * (s @ key) for s in wide], -1)
    shares = scores.softmax(-1).unbind(-1)
    mixed: Any = sum(p[..., None] * s for p, s in zip(shares, wide, strict=True))
    return normalize(mixed, out_scale, None, out_eps, is_rms_norm=True).to(sums[-1].dtype)


def mix(module: nn.Module, prefix: str, norm: Any, sums: list[Tensor]) -> Tensor:
    """The norm ``norm`` of the mixture of ``sums``, each ``[B, T, D]``; recomputed by the backward pass."""
    query, scale = getattr(module, f"{prefix}res_proj"), getattr(module, f"{prefix}res_norm")
    arguments = (query.weight, scale.weight, norm.weight, scale.eps, norm.eps, *sums)
    if not torch.is_grad_enabled():
        return _mixture(*arguments)
    return checkpoint(_mixture, *arguments, use_reentrant=False)


def block_forward(
    block: Any, hidden_states: Tensor, sums: list[Tensor], output_attentions: bool | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None, Any, list[Tensor]]:
    """A block of the decoder: ``hidden_states`` is the sum of the group that is open, ``sums`` those of the others.

    Returns:
        As the block does, and the sums of the groups that are closed by now.
    """
    size, weights, cache = block.config.attnres_block_size, None, kwargs["past_key_values"]
    for part, name in enumerate(("attn", block.feed_forward)):
        x = mix(block, f"{name}_", getattr(block, f"{name}_norm"), [*sums, hidden_states])
        if name == "attn":
            x, weights, cache = block.attn(hidden_states=x, output_attentions=output_attentions, **kwargs)
        else:
            x = getattr(block, name)(x, **kwargs)
        if (2 * block.layer_idx + part) % size == 0:
            sums, hidden_states = [*sums, hidden_states], x
        else:
            hidden_states = hidden_states + x
    return hidden_states, weights, cache, sums
