# SPDX-License-Identifier: MIT
"""The decoder that the families share: block and base model. Which mixer it has says the family's row."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fla.models import attnres
from fla.models._compat import (
    CACHE_FIELD,
    BaseModelOutputWithPast,
    PreTrainedModel,
    checkpointing_layer,
)
from fla.models.attention_config import get_attention_spec
from fla.models.family import Family, load
from fla.models.generation_utils import own_cache, resolve_cache
from fla.modules._plain import is_plain
from fla.modules.mlp import GatedMLP
from fla.modules.norm import RMSNorm

__all__ = ["Block", "DecoderModel", "FLAPreTrainedModel"]

GradientCheckpointingLayer: Any = checkpointing_layer()


def make_norm(config: Any) -> nn.Module:
    """A block norm: ours, which adds the residual in the same pass, or torch's. The keys are the same."""
    norm = RMSNorm if config.fuse_norm else nn.RMSNorm
    return norm(config.hidden_size, eps=config.norm_eps)


def with_stream(norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """``norm(x)`` and ``x``. In training our norm puts both out, so that it adds up their gradients."""
    fused = torch.is_grad_enabled() and is_plain(norm, RMSNorm) and not torch.compiler.is_compiling()
    return norm(x, None, True) if fused else (norm(x), x)


def make_mixer(family: Family, config: Any, layer_idx: int) -> nn.Module:
    """The token mixer of a layer: softmax attention where the configuration's ``attn`` says so, else the family's."""
    spec = get_attention_spec(getattr(config, "attn", None), layer_idx)
    if spec is None:
        kwargs = {argument: getattr(config, name) for argument, name in family.mixer_kwargs.items()}
        return load(family.mixer)(**kwargs, layer_idx=layer_idx)
    options = {name: spec[name] for name in ("num_heads", "num_kv_heads", "qkv_bias", "window_size", "rope_theta")}
    return load("fla.layers.attn:Attention")(
        hidden_size=config.hidden_size,
        qk_norm=spec.get("qk_norm", False),
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
        layer_idx=layer_idx,
        **options,
    )


def rescale_residual(projection: Any, additions: int) -> None:
    """Initialise a projection into the residual stream so that ``additions`` of its kind keep the variance.

    A weight that was loaded keeps its values.
    """
    if not getattr(projection.weight, "_is_hf_initialized", False):
        nn.init.kaiming_uniform_(projection.weight, a=math.sqrt(5))
        with torch.no_grad():
            projection.weight.div_(math.sqrt(additions))


class Block(GradientCheckpointingLayer):
    """``h += attn(attn_norm(h)); h += mlp(mlp_norm(h))``."""

    family: ClassVar[Family]
    feed_forward: ClassVar[str] = "mlp"
    make_norm = staticmethod(make_norm)

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.attn_norm = self.make_norm(config)
        self.attn: Any = make_mixer(self.family, config, layer_idx)
        self.add_module(f"{self.feed_forward}_norm", self.make_norm(config))
        self.add_module(self.feed_forward, self.make_feed_forward())
        if getattr(config, "attnres_block_size", None) is not None:
            attnres.add_mixture(self, "attn_", config)
            attnres.add_mixture(self, f"{self.feed_forward}_", config)

    def make_feed_forward(self) -> nn.Module:
        """What follows the token mixer."""
        config = self.config
        return GatedMLP(
            hidden_size=config.hidden_size,
            hidden_ratio=config.hidden_ratio,
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            fuse_swiglu=config.fuse_swiglu,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        residual_sums: list[Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """``[B, T, D]`` to ``(hidden_states, attention weights or None, past_key_values)``.

        With ``residual_sums`` it attends over residuals and returns those sums too, see :mod:`fla.models.attnres`.
        """
        kwargs |= {"attention_mask": attention_mask, "past_key_values": past_key_values, "use_cache": use_cache}
        if residual_sums is not None:
            return attnres.block_forward(self, hidden_states, residual_sums, output_attentions, **kwargs)
        hidden_states, residual = with_stream(self.attn_norm, hidden_states)
        hidden_states, weights, past_key_values = self.attn(
            hidden_states=hidden_states, output_attentions=output_attentions, **kwargs
        )
        norm = getattr(self, f"{self.feed_forward}_norm")
        if self.config.fuse_norm:
            hidden_states, residual = norm(hidden_states, residual, True)
        else:
            residual = residual + hidden_states
            hidden_states = norm(residual)
        return residual + getattr(self, self.feed_forward)(hidden_states, **kwargs), weights, past_key_values


class FLAPreTrainedModel(PreTrainedModel):
    """Base of all models: initialisation and what transformers has to know."""

    family: ClassVar[Family]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_cache_class = True
    # A recurrent state cannot be rolled back, so that generation strategies which guess ahead are refused.
    _is_stateful = True
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012 (transformers declares it so)
    _input_embed_layer = "embeddings"

    def _init_weights(self, module: nn.Module, prenorm_residual_strategy: str | None = None) -> None:
        # Only through torch.nn.init, which transformers guards so that loaded parameters keep their values.
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            std = 0.0 if hasattr(module, "_is_attnres_proj") else self.config.initializer_range
            nn.init.normal_(module.weight, mean=0.0, std=std)
            if (additions := getattr(module, "residual_additions", None)) is not None:
                rescale_residual(module, additions)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        if prenorm_residual_strategy is not None:
            self._init_residual(module, prenorm_residual_strategy)

    def _init_residual(self, module: nn.Module, strategy: str) -> None:
        """Shrink what is added to the residual stream: ``"rescale"`` by its depth, or ``"zero"``."""
        if strategy not in ("rescale", "zero"):
            raise ValueError(f"`prenorm_residual_strategy` must be 'rescale' or 'zero', got {strategy!r}.")
        for name in ("o_proj", "down_proj"):
            projection = getattr(module, name, None)
            if not isinstance(projection, nn.Linear):
                continue
            if strategy == "zero":
                nn.init.zeros_(projection.weight)
                continue
            rescale_residual(projection, 2 * self.config.num_hidden_layers)

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        base = self if isinstance(self, DecoderModel) else getattr(self, self.base_model_prefix)
        return base.embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding of tokens."""
        base = self if isinstance(self, DecoderModel) else getattr(self, self.base_model_prefix)
        base.embeddings = value


class DecoderModel(FLAPreTrainedModel):
    """The stack of blocks."""

    make_norm = staticmethod(make_norm)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embeddings: Any = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        block = self.family.get(f"{self.family.stem}Block")
        self.attends_residuals = getattr(config, "attnres_block_size", None) is not None
        if self.attends_residuals and not ("attnres_block_size" in self.family.fields and issubclass(block, Block)):
            raise NotImplementedError(
                f"`attnres_block_size` is not implemented for {self.family.stem}; set it to None."
            )
        self.layers = nn.ModuleList(block(config, i) for i in range(config.num_hidden_layers))
        setattr(self, self.family.final_norm, self.make_norm(config))
        if self.attends_residuals:
            attnres.add_mixture(self, "", config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Run the stack.

        Args:
            input_ids: ``[B, T]``, or ``inputs_embeds`` ``[B, T, D]``.
            attention_mask: padding mask ``[B, S]``, ``S >= T``.
            past_key_values: a :class:`fla.models.utils.Cache`; ``cache`` is another name.
            use_cache: fill and return a cache; by default as the configuration says, and not in training.
            output_hidden_states: also return the embeddings and the output of every block, the last one normalised.
            return_dict: return an output object instead of a tuple.
            kwargs: ``cu_seqlens`` ``[N + 1]`` for sequences packed into one row, and what else a mixer understands.

        Raises:
            ValueError: both or neither of ``input_ids`` and ``inputs_embeds``.
        """
        config: Any = self.config
        past_key_values = resolve_cache(past_key_values, kwargs)
        if output_attentions:
            _warn_once("`output_attentions=True` has no effect: the model has no attention weights to return.")
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        training = self.training
        if use_cache is None:
            use_cache = config.use_cache and not training
        if return_dict is None:
            return_dict = config.return_dict
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of `input_ids` and `inputs_embeds`.")
        if inputs_embeds is None:
            if input_ids.dim() != 2:  # type: ignore[union-attr]
                raise ValueError(f"`input_ids` must have shape [B, T], got {list(input_ids.shape)}.")  # type: ignore[union-attr]
            inputs_embeds = self.embeddings(input_ids)
        if self.gradient_checkpointing and training and torch.is_grad_enabled():
            # A block that runs twice would update the cache twice.
            use_cache, past_key_values = False, None
            if self.attends_residuals:
                attnres.check_checkpointing(self.layers[0])
        if use_cache or past_key_values is not None:
            past_key_values = own_cache(past_key_values)
        hidden_states: Any = inputs_embeds
        kept: tuple[Tensor, ...] | None = () if output_hidden_states else None
        if self.attends_residuals:
            kwargs["residual_sums"] = []
        for layer in self.layers:
            if kept is not None:
                kept += (hidden_states,)
            # Positionally: reentrant checkpointing finds the inputs that need gradients only there.
            hidden_states, _, past_key_values, *sums = layer(
                hidden_states,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                output_attentions=False,
                **kwargs,
            )
            if self.attends_residuals:
                kwargs["residual_sums"] = sums[0]
        norm = getattr(self, self.family.final_norm)
        if self.attends_residuals:
            hidden_states = attnres.mix(self, "", norm, [*kwargs["residual_sums"], hidden_states])
        else:
            hidden_states = norm(hidden_states).to(inputs_embeds.dtype)
        if kept is not None:
            kept += (hidden_states,)
        cache = past_key_values if use_cache else None
        if not return_dict:
            return tuple(value for value in (hidden_states, cache, kept) if value is not None)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, hidden_states=kept, **{CACHE_FIELD: cache})


_said: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _said and not torch.compiler.is_compiling():
        _said.add(message)
        from transformers.utils import logging

        logging.get_logger("fla.models").warning(message)
