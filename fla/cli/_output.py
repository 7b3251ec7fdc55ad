# SPDX-License-Identifier: MIT
"""What commands print: JSON, rich tables on a terminal, plain aligned text everywhere else."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

# Words that carry a verdict, and the colour they get on a terminal.
_STYLES = {
    "ok": "green",
    "yes": "green",
    "active": "green",
    "selected": "bold green",
    "registered": "green",
    "warning": "yellow",
    "skip": "yellow",
    "rejected": "yellow",
    "disabled": "yellow",
    "blocked": "yellow",
    "fail": "bold red",
    "error": "bold red",
}


class CliError(Exception):
    """A failure the user can act on: printed as one line, without a traceback."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """The option every command has."""
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def print_json(document: Any) -> None:
    """Print `document`; values JSON has no form for (paths, dtypes, devices) are printed as their text."""
    print(json.dumps(document, indent=2, default=str))


def use_colour(stream: TextIO) -> bool:
    """Colour only on a terminal that wants it (https://no-color.org; TERM=dumb)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Output:
    """Text for people. Uses rich on a terminal where it is installed; a pipe or file gets plain aligned columns."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.console: Any = None
        if self.stream.isatty():
            try:
                from rich.console import Console
            except ImportError:
                return
            self.console = Console(file=self.stream, no_color=not use_colour(self.stream), highlight=False)

    def heading(self, text: str) -> None:
        """A section title with an empty line before it."""
        if self.console is not None:
            self.console.print(f"\n[bold]{_escape(text)}[/bold]")
        else:
            print(f"\n{text}", file=self.stream)

    def line(self, text: str = "", *, style: str | None = None) -> None:
        """One line (or paragraph) of text; `style` is a rich style, ignored off the terminal."""
        if self.console is not None:
            self.console.print(text, style=style, markup=False)
        else:
            print(text, file=self.stream)

    def fields(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Aligned `name  value` lines; `None` values are left out."""
        shown = [(name, _text(value)) for name, value in pairs if value is not None]
        width = max((len(name) for name, _ in shown), default=0)
        for name, value in shown:
            self.line(f"  {name:<{width}}  {value}", style=_STYLES.get(value))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """A table; cells that are verdict words are coloured."""
        cells = [[_text(cell) for cell in row] for row in rows]
        if self.console is not None:
            from rich import box
            from rich.table import Table
            from rich.text import Text

            table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
            for row in cells:
                table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
            self.console.print(table)
            return
        for text in format_table(columns, cells):
            print(text, file=self.stream)


def format_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Plain aligned columns, one string a line."""
    cells = [list(columns), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def format_markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The same table in Markdown."""
    body = [[_text(cell).replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [list(columns), ["---"] * len(columns), *body]]


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
