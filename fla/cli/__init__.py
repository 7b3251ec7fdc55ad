# SPDX-License-Identifier: MIT
"""The command line `fla` (= `python -m fla`). One module per command; nothing heavy is imported before a command runs."""

from fla.cli._app import main

__all__ = ["main"]
