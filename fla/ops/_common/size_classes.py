# SPDX-License-Identifier: MIT
"""Sizes of calls that between them make the launch policies choose everything they can choose. Needs no GPU.

Policies look at the chip, the dtype and the head dimensions, and beyond these only at classes of sizes: whether the
heads fill the chip, whether a long sequence of few heads is cut along time, whether the last chunk is ragged, whether
sequences are packed. `fla warmup` runs one call of each class; a policy with another class needs a row here, which the
tests of the policies check.
"""

from __future__ import annotations

from dataclasses import dataclass

from fla.ops._common.policy import Chip


@dataclass(frozen=True)
class SizeClass:
    """One call: ``T`` tokens of ``heads`` key heads; ``lengths`` of packed sequences or None."""

    name: str
    T: int
    heads: int
    lengths: tuple[int, ...] | None = None


# Long enough that every policy cuts it where it cuts at all, and no more: it is run.
LONG = 16384


def size_classes(chip: Chip) -> tuple[SizeClass, ...]:
    """One call of every class on ``chip``."""
    many = 2 * chip.sms + 1
    return (
        SizeClass("one token", 1, 1),
        SizeClass("one token, many heads", 1, many),
        SizeClass("few heads", 64, 1),
        SizeClass("few heads, ragged", 70, 1),
        SizeClass("few heads, packed", 70, 1, (3, 67)),
        SizeClass("many heads", 64, many),
        SizeClass("many heads, ragged", 70, many),
        SizeClass("many heads, packed", 70, many, (3, 67)),
        SizeClass("long", LONG, 1),
        SizeClass("long, ragged", LONG - 28, 1),
        SizeClass("long, packed", LONG - 28, 1, (LONG - 28,)),
    )
