# SPDX-License-Identifier: MIT
"""Whether a module may be computed by something else than itself."""

from __future__ import annotations

from torch import nn

__all__ = ["is_plain", "is_plain_linear"]


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling the module does what ``kind`` does with its parameters, and nothing else.

    Not so for adapters, quantised or sharded layers (all of them classes of their own) and under hooks: a kernel that
    took the weight alone would leave out what they add without a word.
    """
    return type(module) is kind and not (
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Whether ``F.linear(x, module.weight, module.bias)`` is all that calling the module would do."""
    return is_plain(module, nn.Linear)
