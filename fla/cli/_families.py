# SPDX-License-Identifier: MIT
"""A small model of any family, for `fla smoke` and `fla demo`."""

from __future__ import annotations

import importlib
from typing import Any

from fla.models._index import Entry

__all__ = ["small_config"]


def small_config(family: Entry, *, hidden_size: int, head_dim: int, num_heads: int, **values: Any) -> Any:
    """A configuration of these sizes, as far as the family has them.

    Args:
        family: row of `fla.models._index.FAMILIES`.
        hidden_size: width `D`.
        head_dim: channels of a head.
        num_heads: heads of families whose heads need not fill `D`; the others have ``hidden_size / head_dim``.
        values: fields such as ``vocab_size``; those that a family does not have are left out.
    """
    package = importlib.import_module(f"fla.models.{family.package}")
    fields = package.FAMILY.fields
    if "head_dim" not in fields:
        num_heads = hidden_size // head_dim
    if fields.get("expand_ratio", 1) > 1:  # channels of a head; where it is 1, a factor of the width
        values["expand_ratio"] = head_dim
    if fields.get("attn"):  # a usual plan, whose heads would not fit
        layers = [i for i in fields["attn"]["layers"] if i < values.get("num_hidden_layers", 0)]
        values["attn"] = {"layers": layers, "num_heads": hidden_size // head_dim}
    values.update(hidden_size=hidden_size, head_dim=head_dim, num_heads=num_heads, num_slots=head_dim, state_size=32)
    return getattr(package, family.names[0])(**{name: value for name, value in values.items() if name in fields})
