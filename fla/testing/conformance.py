# SPDX-License-Identifier: MIT
"""What ``pytest --pyargs fla.testing.conformance --fla-backend NAME`` collects."""

from __future__ import annotations

from fla.testing.suite import BackendConformance


class TestConformance(BackendConformance):
    """The backends named on the command line."""
