# SPDX-License-Identifier: MIT
"""Parser, command table and the translation of failures into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO

import fla
from fla.cli._output import CliError

# Name -> one line of help. The module `fla.cli.<name>`, with _ for -, offers `add_arguments(parser)` and
# `run(args) -> int`; only that of the command that was typed is imported, which keeps `fla --help` fast.
COMMANDS: dict[str, str] = {
    "demo": "train a small language model on this machine and let it talk",
    "doctor": "what is installed, which devices there are, what will run on them and why not",
    "backends": "list backends, explain a choice, write a report",
    "settings": "every FLA_* setting with its value, default and origin",
    "ops": "list public ops, layers, modules and models",
    "smoke": "build and run tiny instances of every model family",
    "convert": "turn Llama, Mistral, Qwen2 and RWKV-6 checkpoints into models of ours",
    "warmup": "compile the kernels of ops before the first call needs them",
    "new-backend": "write a plugin package for an op, which passes its own tests as written",
}

# Distribution to install when an import fails, where its name is not the import name.
_EXTRAS = {
    "torch": "flash-linear-attention[cpu]",
    "rich": "flash-linear-attention[cli]",
    "matplotlib": "flash-linear-attention[cli]",
}


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """The whole parser; arguments are filled in for `command` only (`None`: for none)."""
    parser = argparse.ArgumentParser(
        prog="fla",
        description="Linear attention for PyTorch, with every op open to separately installed backends.",
        epilog="`fla COMMAND --help` describes a command. Every command takes --json.",
    )
    parser.add_argument("--version", action="version", version=f"fla {fla.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == command:
            _module(name).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (130 after Ctrl-C).

    Args:
        argv: the arguments after the program name; `None` takes them from `sys.argv`.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((w for w in words if not w.startswith("-")), None)
    parser = build_parser(command)
    args = parser.parse_args(words)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return int(_module(args.command).run(args))
    except CliError as error:
        return _fail(args.command, str(error), error.code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing == "fla":
            raise
        wanted = _EXTRAS.get(missing, missing)
        return _fail(args.command, f"{missing} is not installed; try: pip install '{wanted}'", 1)
    except KeyboardInterrupt:
        return _fail(args.command, "interrupted", 130)
    except BrokenPipeError:
        # The reader (`| head`) went away. Python would complain again while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"fla.cli.{command.replace('-', '_')}")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """One line without the place in our sources, which means nothing to a user of the command line."""
    print(f"warning: {message}", file=file or sys.stderr)


def _fail(command: str, message: str, code: int) -> int:
    print(f"fla {command}: {message}", file=sys.stderr)
    return code
