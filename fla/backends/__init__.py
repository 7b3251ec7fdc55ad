# SPDX-License-Identifier: MIT
"""The plugin framework. (Interim: selection is not written yet, every call runs the core implementation.)"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CallFacts:
    """Names of the parameters from which a call's static facts are read (the framework knows no op)."""

    tensors: tuple[str, ...] = ("q", "k", "v")
    key: str = "k"
    value: str = "v"
    heads_dim: int = 2
    initial_state: str | None = "initial_state"
    state_v_first: str | None = "state_v_first"
    cu_seqlens: str | None = "cu_seqlens"


def dispatch(
    operation: str,
    *,
    validate: Callable[..., None] | None = None,
    facts: CallFacts | None = None,
    outputs: Callable[..., Any] | None = None,
    renamed: dict[str, str] | None = None,
    removed: dict[str, str] | None = None,
    triton: str | None = None,
    inplace: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if validate is not None:
                validate(*args, **kwargs)
            return fn(*args, **kwargs)

        return wrapper

    return decorate
