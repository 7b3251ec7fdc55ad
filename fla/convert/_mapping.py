# SPDX-License-Identifier: MIT
"""Conversions as tables: which parameter of ours is made of which of theirs, in both directions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Conversion", "ConversionError", "Entry", "apply"]


class ConversionError(ValueError):
    """A checkpoint that cannot be converted; the message names the parameters or fields."""


def _same(x: Tensor) -> Tensor:
    return x


class Entry(NamedTuple):
    """One parameter of ours.

    Names may hold ``{i}``, which stands for every layer.
    """

    ours: str
    theirs: str | tuple[str, ...]
    forward: Callable[..., Tensor] = _same  # from the tensors called `theirs`
    backward: Callable[[Tensor], Tensor | Sequence[Tensor]] = _same
    optional: bool = False  # may be absent, as tied heads and biases are

    def at(self, i: int) -> Entry:
        """The entry of layer ``i``."""
        theirs = tuple(name.replace("{i}", str(i)) for name in self.sources)
        return self._replace(ours=self.ours.replace("{i}", str(i)), theirs=theirs)

    @property
    def sources(self) -> tuple[str, ...]:
        """``theirs`` as a tuple."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


@dataclass(frozen=True)
class Conversion:
    """A kind of checkpoint.

    Attributes:
        model_types: what ``config.json`` calls it.
        family: package of ours that runs it.
        entries: the table, from their configuration.
        config: fields of our configuration, from theirs and their state dict (or {}). Raises ConversionError.
        back: fields of their configuration, from ours; None where transformers has no class for it.
        ignored: pattern of their names that carry nothing.
    """

    model_types: tuple[str, ...]
    family: str
    entries: Callable[[Mapping[str, Any]], Sequence[Entry]]
    config: Callable[[Mapping[str, Any], Mapping[str, Tensor]], dict[str, Any]]
    back: Callable[[Any], dict[str, Any]] | None = None
    ignored: str = r"$^"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def apply(
    conversion: Conversion, config: Mapping[str, Any], tensors: Mapping[str, Tensor], reverse: bool = False
) -> dict[str, Tensor]:
    """The state dict in the other form.

    Args:
        conversion: its table.
        config: their configuration, as ``config.json`` has it.
        tensors: their state dict, or ours with ``reverse``.

    Raises:
        ConversionError: parameters that are missing, or left over.
    """
    layers = range(config["num_hidden_layers"])
    table = [e.at(i) for e in conversion.entries(config) for i in (layers if "{i}" in e.ours else range(1))]
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    missing: list[str] = []
    for entry in table:
        wanted = (entry.ours,) if reverse else entry.sources
        absent = [name for name in wanted if name not in tensors]
        if absent:
            missing += [] if entry.optional else absent
            continue
        used.update(wanted)
        if reverse:
            parts = entry.backward(tensors[entry.ours])
            made.update(zip(entry.sources, [parts] if isinstance(parts, Tensor) else parts, strict=True))
        else:
            made[entry.ours] = entry.forward(*(tensors[name] for name in wanted))
    if missing:
        raise ConversionError(f"the checkpoint has no {_listed(missing)}")
    if left := [name for name in tensors if name not in used and not re.search(conversion.ignored, name)]:
        raise ConversionError(f"nothing is known to do with {_listed(left)}")
    return made
