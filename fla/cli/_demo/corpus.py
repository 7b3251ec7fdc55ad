# SPDX-License-Identifier: MIT
"""The text of the demo: the source files of Python's own standard library, which every machine has."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Ends every file in the byte stream. Python sources cannot contain it.
END_OF_FILE = 0

# Test suites are left out because some systems ship Python without them; the rest is not the standard library.
_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "turtledemo"}
)
_HELD_OUT_IN_16 = 1


@dataclass(frozen=True)
class Corpus:
    """Two byte streams `[n]` of whole files, each file followed by `END_OF_FILE`."""

    root: Path
    train: Bytes
    held_out: Bytes
    train_files: int
    held_out_files: int


def is_held_out(relative: str) -> bool:
    """Whether a file belongs to the held-out part. Depends on its path only, so runs and machines agree."""
    return hashlib.sha256(relative.encode()).digest()[0] % 16 < _HELD_OUT_IN_16


def load_corpus(root: Path | None = None, *, limit: int = 32 << 20) -> Corpus:
    """Read every `*.py` file under `root` in sorted order and split the files into train and held-out.

    Args:
        root: the folder to read; `None` means the standard library of the running Python.
        limit: stop after this many bytes.

    Raises:
        FileNotFoundError: no source files, or no file on one of the two sides.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED.intersection(relative.parts):
            continue
        try:
            text = path.read_bytes().replace(b"\0", b"")
        except OSError:
            continue
        if not text or total + len(text) > limit:
            continue
        total += len(text)
        parts[is_held_out(relative.as_posix())].append(text)
    if not all(parts):
        raise FileNotFoundError(f"no Python source files to train on under {root}")
    train, held_out = (
        np.frombuffer(b"".join(text + bytes([END_OF_FILE]) for text in side), np.uint8) for side in parts
    )
    return Corpus(root, train, held_out, len(parts[0]), len(parts[1]))
