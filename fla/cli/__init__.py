# SPDX-License-Identifier: MIT
"""The command line `fla` (= `python -m fla`). One module per command; only that of the typed command is imported."""

from fla.cli._app import main

__all__ = ["main"]
