# SPDX-License-Identifier: MIT
"""Decoding with states that stay where they are, so that a step can be a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.layers._recurrent import RecurrentLayer
from fla.models.cache_layer import map_tensors
from fla.models.cache_utils import Cache, FLACache

__all__ = ["StaticDecode"]


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
        model: a language model of this package in evaluation mode, all of whose mixers have a state of fixed size and
            do not look at positions: not softmax attention, not RetNet.
        cache: what a prefill returned (``use_cache=True``). It is copied and stays as it is.
        graph: capture the step; by default on CUDA devices.

    Raises:
        ValueError: an empty cache, a model in training mode, or a mixer that cannot take part; the message names it.
    """

    def __init__(self, model: Any, cache: FLACache, graph: bool | None = None) -> None:
        for name, module in model.named_modules():
            if isinstance(module, RecurrentLayer) and not module.static_step:
                kind = type(module).__name__
                raise ValueError(f"`model` has a mixer whose step depends on its position: {name}, a {kind}.")
        if model.training:
            raise ValueError("`model` must be in evaluation mode; call model.eval().")
        if cache.get_seq_length() == 0:
            raise ValueError("`cache` must hold the states of a prompt, got an empty one.")
        for i, entry in enumerate(cache):
            if entry is not None and entry["attn_state"] is not None:
                raise ValueError(f"`cache` has a growing state in layer {i}, of softmax attention.")
        self.model = model
        self._seen = cache.get_seq_length()
        self._entries: Any = tuple(
            {field: _copied(value) for field, value in (entry or {}).items()} for entry in cache.to_legacy_cache()
        )
        first = _tensors(self._entries)[0]
        self.tokens = torch.zeros(first.shape[0], 1, dtype=torch.long, device=first.device)
        self.logits: Tensor
        self.graph: Any = None
        if first.is_cuda if graph is None else graph:
            self._capture()

    def _run(self) -> None:
        cache = Cache.from_legacy_cache(self._entries, self._seen)
        self.logits = self.model(self.tokens, past_key_values=cache, use_cache=True).logits[:, -1]
        for old, new in zip(_tensors(self._entries), _tensors(cache.to_legacy_cache()), strict=True):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    @torch.no_grad()
    def _capture(self) -> None:
        saved = [t.clone() for t in _tensors(self._entries)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compile and allocate outside of the graph
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._run()
        for state, old in zip(_tensors(self._entries), saved, strict=True):
            state.copy_(old)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` after one more token of each sequence.

        The same tensor comes back from every step of a graph; copy what should outlive the next one.

        Args:
            tokens: ``[B]`` or ``[B, 1]``.
        """
        self.tokens.copy_(tokens.view(-1, 1))
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        self._seen += 1
        return self.logits

    def cache(self) -> Cache:
        """The states as a cache of its own, to go on in another way."""
        entries = tuple({field: _copied(value) for field, value in entry.items()} for entry in self._entries)
        return Cache.from_legacy_cache(entries, self._seen)


def _copied(value: Any) -> Any:
    return map_tensors(value, lambda t: t.clone(memory_format=torch.contiguous_format))
