# SPDX-License-Identifier: MIT
"""How the dispatcher reads device and dtype off a module function: from its first argument, rows of ``[..., D]``."""

from __future__ import annotations

from fla.backends import CallFacts

ROWS = CallFacts(tensors=("x",), key="x", value="x", initial_state=None, state_v_first=None, cu_seqlens=None)
