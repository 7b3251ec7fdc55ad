# SPDX-License-Identifier: MIT
"""The check that both lightning attention ops share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fla.ops._common.checks import ArgumentError, DtypeError

__all__ = ["check_layer"]


def check_layer(values: Mapping[str, Any]) -> None:
    """``num_layers`` is at least 1 and ``layer_idx`` lies in 0 to ``num_layers``, where nothing decays."""
    layer_idx, num_layers = values["layer_idx"], values["num_layers"]
    for name, value in (("layer_idx", layer_idx), ("num_layers", num_layers)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise DtypeError(f"`{name}` must be an int, got {value!r}.")
    if num_layers < 1:
        raise ArgumentError(f"`num_layers` must be at least 1, got {num_layers}.")
    if not 0 <= layer_idx <= num_layers:
        raise ArgumentError(f"`layer_idx` must lie in 0 to num_layers = {num_layers}, got {layer_idx}.")
