# SPDX-License-Identifier: MIT
"""The language model that the families share: a base model, a head, a loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fla.models._compat import CACHE_FIELD, CausalLMOutputWithPast
from fla.models.decoder import FLAPreTrainedModel
from fla.models.generation_utils import renamed_keyword, resolve_cache
from fla.models.loss import language_model_loss
from fla.modules._plain import is_plain_linear
from fla.modules.fused_cross_entropy import FusedCrossEntropyLoss
from fla.modules.fused_linear_cross_entropy import FusedLinearCrossEntropyLoss

__all__ = ["CausalLM"]


class CausalLM(FLAPreTrainedModel):
    """A base model with a language model head.

    ``criterion`` may be set to a loss module. A loss of torch or a ``FusedCrossEntropyLoss`` is called
    ``(logits, labels)``; a ``FusedLinearCrossEntropyLoss``, or a class of your own where the configuration asks for the
    linear loss, ``(hidden_states, labels, weight, bias)``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        model = self.family.get(f"{self.family.stem}Model")(config)
        setattr(self, self.family.prefix, model)
        self.vocab_size = config.vocab_size
        self.lm_head: Any = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion: nn.Module | None = None
        self.post_init()

    def get_decoder(self) -> Any:
        """The base model."""
        return getattr(self, self.family.prefix)

    def set_decoder(self, decoder: nn.Module) -> None:
        """Replace the base model."""
        setattr(self, self.family.prefix, decoder)

    def get_output_embeddings(self) -> Any:
        """The language model head."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        """Replace the language model head; None detaches it."""
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor | None = 0,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the loss when ``labels`` are given.

        Args:
            input_ids, attention_mask, inputs_embeds, past_key_values, use_cache, output_hidden_states, return_dict:
                as for the base model.
            labels: ``[B, T]``, the inputs themselves; token `t` is trained to predict ``labels[:, t + 1]``. -100 is
                ignored. Boundaries of packed sequences are not masked: set the first label of each to -100.
            logits_to_keep: compute the logits of the last `n` positions only (0 or None: all), or of these positions.
                With ``labels`` all are computed.
            num_items_in_batch: divide the summed loss by this instead of by the number of labels.
            kwargs: ``cu_seqlens`` for packed sequences; ``shift_labels`` ``[B, T]``, targets that are shifted already.

        Returns:
            Loss, logits (None where the linear loss never forms them), cache, hidden states.
        """
        config: Any = self.config
        past_key_values = resolve_cache(past_key_values, kwargs)
        logits_to_keep = renamed_keyword(kwargs, "num_logits_to_keep", "logits_to_keep", logits_to_keep, 0)
        shift_labels = kwargs.pop("shift_labels", None)
        if return_dict is None:
            return_dict = config.return_dict
        has_labels = labels is not None or shift_labels is not None
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        step = getattr(past_key_values, "step", None)
        usual = output_hidden_states or has_labels or not return_dict or "cu_seqlens" in kwargs
        if step is not None and (logits := step(self, None if usual else input_ids, attention_mask)) is not None:
            return CausalLMOutputWithPast(logits=logits, **{CACHE_FIELD: past_key_values})
        outputs = self.get_decoder()(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        # The linear loss forms the logits in chunks of its own and keeps none.
        linear = has_labels and self._uses_linear_loss()
        logits = (
            None if linear else self.lm_head(_kept_positions(hidden_states, None if has_labels else logits_to_keep))
        )
        loss = None
        if has_labels:
            loss = language_model_loss(
                hidden_states,
                logits,
                self.lm_head,
                labels=labels,
                shift_labels=shift_labels,
                criterion=self.criterion,
                fused=getattr(config, "fuse_cross_entropy", False),
                use_l2warp=getattr(config, "use_l2warp", False),
                num_items_in_batch=num_items_in_batch,
            )
        cache = getattr(outputs, CACHE_FIELD)
        if not return_dict:
            return tuple(value for value in (loss, logits, cache, outputs.hidden_states) if value is not None)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE_FIELD: cache}
        )

    def _uses_linear_loss(self) -> bool:
        if isinstance(self.criterion, FusedLinearCrossEntropyLoss):
            return True
        if isinstance(self.criterion, (FusedCrossEntropyLoss, nn.modules.loss._Loss)):
            return False
        training = self.training
        flag = self.family.linear_loss
        asked = bool(getattr(self.config, flag, False)) and (training or flag != "fuse_cross_entropy")
        # A head that is more than its weight (an adapter, say) has to be called.
        return asked and (self.criterion is not None or is_plain_linear(self.lm_head))


def _kept_positions(hidden_states: Tensor, keep: int | Tensor | None) -> Tensor:
    if keep is None:
        return hidden_states
    if isinstance(keep, Tensor):
        return hidden_states[:, keep]
    if keep < 0:
        raise ValueError(f"`logits_to_keep` must not be negative, got {keep}.")
    return hidden_states[:, -keep:] if keep else hidden_states
