# SPDX-License-Identifier: MIT
"""Lines of the package and how many of them repeat others.

    python benchmarks/redundancy.py
    python benchmarks/redundancy.py fla/models fla/layers --show 5

Counted are lines with code or docstrings, without comments and indentation. A window of eight such lines in one file
that occurs again, in this or another file, is repeated: its lines are ``duplicate`` wherever they stand, and
``redundant`` everywhere but at the first place, which is what would vanish if each window were written once.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tokenize
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 8


class Measure(NamedTuple):
    """Counts over some files."""

    files: int
    lines: int  # as `wc -l` counts
    counted: int  # with code or docstrings
    duplicate: int
    redundant: int

    def share(self, part: int) -> float:
        """``part`` of the counted lines, in per cent."""
        return 100 * part / max(self.counted, 1)


def code_lines(text: str) -> list[tuple[int, str]]:
    """Line numbers and lines that hold more than blanks and comments, stripped of both."""
    rows = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            rows[row - 1] = rows[row - 1][:column]
    return [(i, row.strip()) for i, row in enumerate(rows, 1) if row.strip()]


def find_files(paths: Iterable[Path]) -> list[Path]:
    """Python files under ``paths``, in a fixed order."""
    return sorted({f for p in paths for f in ([p] if p.is_file() else p.rglob("*.py")) if "__pycache__" not in f.parts})


def repeats(files: Sequence[Path], window: int = WINDOW) -> tuple[Measure, dict[Path, set[int]]]:
    """The measure, and for each file the line numbers of redundant lines."""
    seen: dict[tuple[str, ...], tuple[Path, int]] = {}
    duplicate: dict[Path, set[int]] = {f: set() for f in files}
    redundant: dict[Path, set[int]] = {f: set() for f in files}
    lines = counted = 0
    rows = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        lines += text.count("\n")
        rows[file] = code_lines(text)
        counted += len(rows[file])
        for start in range(len(rows[file]) - window + 1):
            part = rows[file][start : start + window]
            key = tuple(row for _, row in part)
            if key not in seen:
                seen[key] = file, start
                continue
            first, at = seen[key]
            duplicate[first].update(number for number, _ in rows[first][at : at + window])
            duplicate[file].update(number for number, _ in part)
            # A window that overlaps its own first occurrence keeps the lines they share.
            own = {n for n, _ in rows[file][at : at + window]} if first == file else set()
            redundant[file].update(number for number, _ in part if number not in own)
    sums = [sum(map(len, found.values())) for found in (duplicate, redundant)]
    return Measure(len(files), lines, counted, *sums), redundant


def measure(*paths: Path | str) -> Measure:
    """Counts over the Python files under ``paths``, which are taken relative to the repository."""
    return repeats(find_files(ROOT / path for path in paths))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="measured together (default: a row for each room and the package)")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="also list the N files with most to save")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    groups = [args.paths] if args.paths else [["fla/models", "fla/layers"], ["fla/modules"], ["fla/ops"], ["fla"]]
    table = {" + ".join(group): measure(*group) for group in groups}
    if args.json:
        print(json.dumps({name: row._asdict() for name, row in table.items()}, indent=1))
        return 0
    print(f"{'':28s}{'files':>7s}{'lines':>8s}{'counted':>9s}{'duplicate':>11s}{'redundant':>11s}")
    for name, row in table.items():
        shares = (f"{row.share(part):.1f} %" for part in (row.duplicate, row.redundant))
        print(f"{name:28s}{row.files:7d}{row.lines:8d}{row.counted:9d}" + "".join(f"{s:>11s}" for s in shares))
    if args.show:
        _, redundant = repeats(find_files(ROOT / path for path in groups[-1]))
        for file, rows in sorted(redundant.items(), key=lambda item: -len(item[1]))[: args.show]:
            runs = ", ".join(f"{a}-{b}" for a, b in _runs(sorted(rows)))
            print(f"{len(rows):5d}  {file.relative_to(ROOT)}: {runs}")
    return 0


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """Ranges of numbers that follow each other, gaps of up to three lines included."""
    out: list[tuple[int, int]] = []
    for n in numbers:
        if out and n - out[-1][1] <= 3:
            out[-1] = out[-1][0], n
        else:
            out.append((n, n))
    return out


if __name__ == "__main__":
    sys.exit(main())
