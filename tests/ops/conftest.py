# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest
import torch


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN: reading it shows."""
    empty, empty_like, new_empty = torch.empty, torch.empty_like, torch.Tensor.new_empty
    fill = lambda t: t.fill_(float("nan")) if t.is_floating_point() else t.fill_(1 << 20)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: fill(new_empty(*a, **k)))
