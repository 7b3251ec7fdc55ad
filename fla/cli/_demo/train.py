# SPDX-License-Identifier: MIT
"""The demo's model, its time-bounded training loop and its held-out measurement."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fla.cli._demo.corpus import END_OF_FILE, Bytes
from fla.cli._families import small_config
from fla.models._index import Entry


@dataclass(frozen=True)
class Recipe:
    """Sizes and rates of one run. The defaults were chosen by measurement on two CPU cores; see docs/demo.md."""

    hidden_size: int = 96
    layers: int = 2
    heads: int = 1
    head_dim: int = 32
    batch: int = 16
    length: int = 128
    learning_rate: float = 4e-3
    warmup: float = 0.05  # share of the time
    final_rate: float = 0.02  # share of the learning rate
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass
class Curve:
    """What the loop saw: one entry a step."""

    seconds: list[float] = field(default_factory=list)
    bits_per_byte: list[float] = field(default_factory=list)
    bytes_seen: int = 0

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_seen / self.seconds[-1] if self.seconds else 0.0

    def smoothed(self, window: int = 20) -> float:
        """Mean of the last steps, NaN before the first."""
        last = self.bits_per_byte[-window:]
        return sum(last) / len(last) if last else math.nan


class Interrupt:
    """Turns Ctrl-C into a flag that loops ask for, so that nothing stops half-way; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.asked = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def build_model(family: Entry, recipe: Recipe, device: torch.device, seed: int) -> Any:
    """A language model of the family over bytes, with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = small_config(
        family,
        vocab_size=256,
        hidden_size=recipe.hidden_size,
        num_hidden_layers=recipe.layers,
        num_heads=recipe.heads,
        head_dim=recipe.head_dim,
        intermediate_size=3 * recipe.hidden_size,
        max_position_embeddings=1 << 20,  # a recurrence knows no limit, and tables of positions grow
        bos_token_id=END_OF_FILE,
        eos_token_id=END_OF_FILE,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).to(device)


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 arithmetic on accelerators, float32 on the CPU."""
    return contextlib.nullcontext() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)


def train(
    model: Any,
    data: Bytes,
    recipe: Recipe,
    *,
    seconds: float,
    seed: int,
    interrupt: Interrupt,
    on_step: Callable[[Curve], None],
) -> Curve:
    """Train on random windows of `data` until `seconds` are over or `interrupt` asks to stop.

    The schedule follows the clock, not a step count: linear warm-up, then a cosine down to `final_rate`.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(_parameter_groups(model, recipe.weight_decay), lr=0.0, betas=(0.9, 0.95))
    random = np.random.default_rng(seed)
    offsets = np.arange(recipe.length)
    curve = Curve()
    model.train()
    _warm_up(model, recipe)
    start = time.perf_counter()
    elapsed = 0.0
    while elapsed < seconds and not interrupt.asked:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(elapsed / seconds, recipe)
        starts = random.integers(0, len(data) - recipe.length, size=(recipe.batch, 1))
        tokens = torch.from_numpy(data[starts + offsets].astype(np.int64)).to(device)
        with autocast(device):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        elapsed = time.perf_counter() - start
        curve.seconds.append(elapsed)
        curve.bits_per_byte.append(loss.item() / math.log(2.0))
        curve.bytes_seen += tokens.numel()
        on_step(curve)
    return curve


def _warm_up(model: Any, recipe: Recipe) -> None:
    """One forward and backward pass that is thrown away: what the first one loads must not eat into the time."""
    device = next(model.parameters()).device
    tokens = torch.ones(recipe.batch, recipe.length, dtype=torch.long, device=device)
    with autocast(device):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    model.zero_grad(set_to_none=True)


def _rate(progress: float, recipe: Recipe) -> float:
    if progress < recipe.warmup:
        return progress / recipe.warmup + 1e-3
    cosine = 0.5 * (1.0 + math.cos(math.pi * min((progress - recipe.warmup) / (1.0 - recipe.warmup), 1.0)))
    return recipe.final_rate + (1.0 - recipe.final_rate) * cosine


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and the parameters that ask not to (`_no_weight_decay`) do not."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        plain = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
        (others if plain else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def held_out_windows(data: Bytes, length: int, limit: int) -> np.ndarray[Any, Any]:
    """Positions `[n, length]` of non-overlapping windows spread evenly over `data`, at most `limit` bytes in all."""
    length = min(length, len(data))
    available = len(data) // length
    wanted = max(min(available, limit // length), 1)
    starts = (np.arange(wanted) * available // wanted) * length
    return starts[:, None] + np.arange(length)


@torch.no_grad()
def bits_per_byte(model: Any, data: Bytes, windows: np.ndarray[Any, Any], batch: int = 16) -> float:
    """Mean bits the model needs for every byte of `windows` except the first of each, which it sees no context for."""
    device = next(model.parameters()).device
    model.eval()
    total = 0.0
    for rows in np.array_split(windows, math.ceil(len(windows) / batch)):
        tokens: Tensor = torch.from_numpy(data[rows].astype(np.int64)).to(device)
        with autocast(device):
            logits = model(input_ids=tokens, use_cache=False).logits
        total += F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
    return total / math.log(2.0) / (len(windows) * (windows.shape[1] - 1))
