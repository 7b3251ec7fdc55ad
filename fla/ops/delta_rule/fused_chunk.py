# SPDX-License-Identifier: MIT
"""A name of the reference package that computes nothing there either."""

from __future__ import annotations

from typing import Any, NoReturn


def fused_chunk_delta_rule(**kwargs: Any) -> NoReturn:
    """Raise NotImplementedError: there is no fused chunk form, ``chunk_delta_rule`` computes the same.

    Kept because code that imports the name only to branch on it must still import.
    """
    raise NotImplementedError("fused_chunk_delta_rule does not exist as an algorithm: use chunk_delta_rule.")


__all__ = ["fused_chunk_delta_rule"]
