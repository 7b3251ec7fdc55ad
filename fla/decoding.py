# SPDX-License-Identifier: MIT
"""Decoding with states that stay where they are, so that a step can be a CUDA graph."""

from __future__ import annotations

import gc
import logging
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fla.models.cache_layer import State, map_tensors
from fla.models.cache_utils import Cache, FLACache
from fla.modules._plain import is_plain
from fla.modules.rotary import RotaryEmbedding

__all__ = ["InPlaceCache", "StaticDecode", "StaticPosition", "cache_for", "suits"]

logger = logging.getLogger(__name__)

PLAIN_STEPS = 8
"""Steps that ``generate`` takes as usual before it decodes in place unasked: capturing costs about as much."""


def suits(model: nn.Module, device: str = "cuda") -> bool:
    """Whether nobody will notice that ``model`` decodes in place, except by the time it takes.

    It is in evaluation mode and on one device, its parameters are plain ones and its modules are torch's and ours
    without hooks (Python code of others would not run in the replay of a graph), and its states do not grow.
    """
    parameters = [*model.parameters()] if isinstance(model, nn.Module) else []
    return bool(parameters) and (
        not model.training
        and all(type(p) is nn.Parameter and p.device == parameters[0].device for p in parameters)
        and parameters[0].device.type == device
        and not any(isinstance(module, RotaryEmbedding) for module in model.modules())
        and all(
            type(module).__module__.startswith(("fla.", "torch.nn."))
            and is_plain(module, type(module))
            and module._compiled_call_impl is None
            for module in model.modules()
        )
    )


def cache_for(model: Any, config: Any, kwargs: dict[str, Any]) -> InPlaceCache | None:
    """The cache of ``model.generate(generation_config=config, **kwargs)``; None leaves it to the model.

    Takes ``cache_implementation`` out of ``kwargs`` where that names something of ours.
    """
    asked, used = (kwargs.get(n, getattr(config, n, None)) for n in ("cache_implementation", "use_cache"))
    if kwargs.get("cache_implementation") in ("static", "dynamic"):
        del kwargs["cache_implementation"]
        return InPlaceCache() if asked == "static" else None
    return InPlaceCache(PLAIN_STEPS) if asked is None and used is not False and suits(model) else None


class StaticPosition(NamedTuple):
    """Where the new token of each sequence stands. Layers find it as ``static_position`` in their keywords."""

    column: Tensor  # [1] tokens before it, padding included
    offsets: Tensor  # [B] tokens before it, without padding
    valid: Tensor | None  # [B, limit] which tokens are no padding
    limit: int  # positions there may be

    def slots(self, size: int) -> tuple[Tensor, Tensor]:
        """Where a ring of ``size`` entries keeps the new token ``[1]``, and which entries it sees ``[B, size]``."""
        entry = torch.arange(size, device=self.column.device)
        position = self.column - (self.column - entry) % size  # what an entry holds, negative for nothing yet
        seen = (position >= 0).expand(len(self.offsets), size)
        if self.valid is not None:
            seen = seen & self.valid[:, position.clamp(min=0)]
        return self.column % size, seen


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if value is None:
        return []
    return [t for part in (value.values() if isinstance(value, dict) else value) for t in _tensors(part)]


class StaticDecode:
    """Takes a model from token to token with a cache whose tensors never move.

    On a CUDA device the step is captured once and replayed: a step then costs one launch, however many layers there
    are. Elsewhere it runs as it is. No autograd.

    Args:
        model: a language model of this package in evaluation mode.
        cache: what a prefill returned (``use_cache=True``). It is copied and stays as it is.
        graph: capture the step; by default on CUDA devices.
        attention_mask: padding mask ``[B, S]`` of that prefill, if it had one.
        max_length: positions there may be, prompt included, for models that look at them: softmax attention without a
            window keeps keys and values of as many. By default ``max_position_embeddings``, and at least 1024 beyond
            the prompt.

    Raises:
        ValueError: an empty cache, a model in training mode, a mask or a length that does not fit the cache.
    """

    def __init__(
        self,
        model: Any,
        cache: FLACache,
        graph: bool | None = None,
        attention_mask: Tensor | None = None,
        max_length: int | None = None,
    ) -> None:
        if model.training:
            raise ValueError("`model` must be in evaluation mode; call model.eval().")
        seen = cache.get_seq_length()
        if seen == 0:
            raise ValueError("`cache` must hold the states of a prompt, got an empty one.")
        if max_length is None:
            max_length = max(getattr(model.config, "max_position_embeddings", 0), seen + 1024)
        elif max_length <= seen:
            raise ValueError(f"`max_length` must be more than the {seen} tokens of the cache, got {max_length}.")
        first = _tensors(cache.to_legacy_cache())[0]
        batch, device = first.shape[0], first.device
        if attention_mask is not None and attention_mask.shape != (batch, seen):
            raise ValueError(f"`attention_mask` must have shape {[batch, seen]}, got {list(attention_mask.shape)}.")
        self.model = model
        self._seen = seen
        self._bounded = any(isinstance(module, RotaryEmbedding) for module in model.modules())
        self._position = _position(attention_mask, batch, seen, max_length, device)
        self._windows = [getattr(layer, "window_size", None) for layer in cache.layers]
        self._entries: Any = tuple(
            _static(entry or {}, seen, window or max_length)
            for entry, window in zip(cache.to_legacy_cache(), self._windows, strict=True)
        )
        self.tokens = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self.logits: Tensor
        self.graph: Any = None
        if first.is_cuda if graph is None else graph:
            self._capture()

    def _run(self) -> None:
        cache = Cache.from_legacy_cache(self._entries, self._seen)
        out = self.model(self.tokens, past_key_values=cache, use_cache=True, static_position=self._position)
        self.logits = out.logits[:, -1]
        for old, new in zip(_tensors(self._entries), _tensors(cache.to_legacy_cache()), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        self._position.column.add_(1)
        self._position.offsets.add_(1)

    @torch.no_grad()
    def _capture(self) -> None:
        kept = [*_tensors(self._entries), self._position.column, self._position.offsets]
        saved = [t.clone() for t in kept]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile and allocate outside of the graph
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        # torch.cuda.graph would first collect garbage and empty the allocator's cache, which takes longer.
        graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(stream):
                # Other threads may go on allocating.
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._run()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = graph
        for state, old in zip(kept, saved, strict=True):
            state.copy_(old)

    @property
    def room(self) -> bool:
        """Whether there is a position for another token."""
        return not self._bounded or self._seen < self._position.limit

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` after one more token of each sequence.

        The same tensor comes back from every step of a graph; copy what should outlive the next one.

        Args:
            tokens: ``[B]`` or ``[B, 1]``.

        Raises:
            ValueError: no position is left.
        """
        if not self.room:
            raise ValueError(f"`max_length` = {self._position.limit} positions are taken.")
        self.tokens.copy_(tokens.view(-1, 1))
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        self._seen += 1
        return self.logits

    def reorder(self, rows: Tensor) -> None:
        """Go on with the sequences ``rows`` ``[B]``, as beam search does."""
        position = self._position
        kept = [*_tensors(self._entries), position.offsets, *([] if position.valid is None else [position.valid])]
        for t in kept:
            t.copy_(t.index_select(0, rows.to(t.device)))

    def cache(self) -> Cache:
        """The states as a cache of its own, to go on in another way."""
        entries = tuple(_growing(entry, self._seen) for entry in self._entries)
        cache = Cache.from_legacy_cache(entries, self._seen)
        for layer, window in zip(cache.layers, self._windows, strict=True):
            layer.window_size, layer.is_sliding = window, window is not None
        return cache


class InPlaceCache(Cache):
    """A cache with which a language model takes single tokens through :class:`StaticDecode`.

    ``generate(cache_implementation="static")`` makes one. It is for inference in evaluation mode; tokens after the
    prompt are never padding.

    Args:
        usual_steps: single tokens that the model takes as it does with any cache before that. If more than none and the
            step cannot be captured then, it goes on as usual.

    Attributes:
        refused: why it does, or None.
    """

    _steps: StaticDecode | None = None

    def __init__(self, usual_steps: int = 0) -> None:
        super().__init__()
        self._usual_steps = usual_steps
        self._may_fail = usual_steps > 0
        self.refused: str | None = None

    def get_seq_length(self, layer_idx: int | None = 0, cache_position: Any = None) -> int:
        """See :meth:`FLACache.get_seq_length`."""
        return super().get_seq_length(layer_idx) if self._steps is None else self._steps._seen

    def step(self, model: Any, tokens: Any, attention_mask: Tensor | None) -> Tensor | None:
        """Logits ``[B, 1, V]`` after ``tokens`` ``[B, 1]``; None where the model has to run as usual."""
        usual = tokens is None or tokens.shape[1] != 1 or torch.is_grad_enabled() or model.training
        if usual or (self._steps is not None and self._steps.model is not model):
            self.leave()
            return None
        if self._usual_steps:
            self._usual_steps -= 1
            return None
        if self._steps is None or not self._steps.room:
            seen = self.get_seq_length()
            if not seen:
                return None
            mask = None if attention_mask is None else attention_mask[:, :seen]
            self.leave()
            longer = max(getattr(model.config, "max_position_embeddings", 0), 2 * seen, seen + 1024)
            try:
                self._steps = StaticDecode(model, self, attention_mask=mask, max_length=longer)
            except RuntimeError as error:
                if not self._may_fail:
                    raise
                self._usual_steps, self.refused = sys.maxsize, f"{type(error).__name__}: {error}"
                logger.info("[FLA decoding] steps are taken as usual: %s", self.refused)
                return None
        return self._steps.step(tokens)[:, None]

    def leave(self) -> None:
        """Take the states back, and free the graph."""
        if self._steps is not None:
            cache, self._steps = self._steps.cache(), None
            self.layers = cache.layers

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See :meth:`FLACache.reorder_cache`."""
        if self._steps is None:
            super().reorder_cache(beam_idx)
        else:
            self._steps.reorder(beam_idx)


def _copied(value: Any) -> Any:
    return map_tensors(value, lambda t: t.clone(memory_format=torch.contiguous_format))


def _position(mask: Tensor | None, batch: int, seen: int, limit: int, device: torch.device) -> StaticPosition:
    offsets, valid = torch.full((batch,), seen, device=device), None
    if mask is not None and not (mask != 0).all():
        valid = torch.ones(batch, limit, dtype=torch.bool, device=device)
        valid[:, :seen] = mask != 0
        offsets = valid[:, :seen].sum(1)
    return StaticPosition(torch.full((1,), seen, device=device), offsets, valid, limit)


def _static(entry: State, seen: int, size: int) -> State:
    """A copy of a layer's states, with a ring of ``size`` entries in place of growing ones."""

    def ring(kept: Tensor) -> Tensor:
        full = kept.new_zeros(kept.shape[0], size, *kept.shape[2:])
        full[:, torch.arange(seen - kept.shape[1], seen) % size] = kept
        return full

    return {k: map_tensors(value, ring) if k == "attn_state" else _copied(value) for k, value in entry.items()}


def _growing(entry: State, seen: int) -> State:
    """The reverse of :func:`_static`."""

    def take(full: Tensor) -> Tensor:
        size = full.shape[1]
        return full[:, torch.arange(max(0, seen - size), seen) % size]

    return {k: map_tensors(value, take) if k == "attn_state" else _copied(value) for k, value in entry.items()}
