# SPDX-License-Identifier: MIT
from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for folder in ("ops", "modules"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / folder))


@pytest.fixture(autouse=True)
def _gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> Callable[[str], dict[str, dict[str, Any]]]:
    """Results by name of those cases of a check script that the tests of this module ask for, run side by side."""
    import side_by_side
    import torch

    def run(script: str) -> dict[str, dict[str, Any]]:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU")
        items = [item for item in request.session.items if getattr(item, "module", None) is request.module]
        names = [
            item.callspec.params["name"]
            for item in items
            if hasattr(item, "callspec") and "name" in item.callspec.params
        ]
        # Beside other workers, several modules run their cases at once.
        share = 6 if "PYTEST_XDIST_WORKER" in os.environ else None
        return dict(side_by_side.run(script, names, share))

    return run
