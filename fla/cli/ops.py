# SPDX-License-Identifier: MIT
"""`fla ops`: the public ops, layers, modules and models. Reads source files; runs no kernel."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from typing import Any

from fla.cli._inventory import KINDS, Entry, static_entries
from fla.cli._output import CliError, Output, add_json_option, format_markdown, print_json

NO_MATCH = 1
FAILED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", metavar="TEXT", default="", help="regular expression searched in module and name")
    parser.add_argument("--kind", choices=KINDS, action="append", help="what to list; may be repeated (default: ops)")
    parser.add_argument("--signatures", action="store_true", help="print parameters and defaults")
    parser.add_argument("--static", action="store_true", help="read source files only: no torch, no triton, no plugins")
    form = parser.add_mutually_exclusive_group()
    add_json_option(form)  # type: ignore[arg-type]  # a group takes options as a parser does
    form.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.epilog = "Exit codes: 0 something was listed, 1 nothing matches, 2 bad expression or fla cannot be imported."


def run(args: argparse.Namespace) -> int:
    try:
        pattern = re.compile(args.filter, re.IGNORECASE)
    except re.error as error:
        raise CliError(f"--filter {args.filter!r} is not a regular expression: {error}", FAILED) from None
    kinds = tuple(args.kind or ("ops",))
    entries = [e for e in static_entries(kinds) if pattern.search(f"{e.module}.{e.name}")]
    if not args.static:
        _add_live_facts(entries)
    if args.json:
        print_json([e.as_dict() for e in entries])
    elif not entries:
        raise CliError(f"nothing matches {args.filter!r} among {', '.join(kinds)}", NO_MATCH)
    elif args.markdown:
        print("\n".join(format_markdown(*_table(entries, args.signatures))))
    else:
        _print(entries, args.signatures)
    return 0 if entries else NO_MATCH


def _add_live_facts(entries: list[Entry]) -> None:
    """What only the running package knows: import errors, exact signatures and who can take an op over."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise CliError(f"torch cannot be imported ({error}); `fla ops --static` works without it", FAILED) from None
    from fla.backends import DispatchedOp

    for entry in entries:
        try:
            thing = getattr(importlib.import_module(entry.module), entry.name)
            entry.signature = f"{entry.name}{_bare(inspect.signature(thing))}" if entry.signature else None
            op = getattr(thing, "op", None)
            if isinstance(op, DispatchedOp):
                entry.operation = op.operation
                entry.paths = ["torch"] if op.triton_path is None else ["torch", "triton"]
        except (Exception, SystemExit) as error:
            entry.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    candidates = _candidates()
    for entry in entries:
        entry.backends = candidates.get((entry.operation or "", entry.name), [])


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """Without annotations, which make the line unreadable."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _candidates() -> dict[tuple[str, str], list[str]]:
    """(operation, function) -> names of the backends registered for it, in the order in which they are asked."""
    from fla import backends

    found: dict[tuple[str, str], list[str]] = {}
    for row in backends.list_backends():
        for function in row["functions"]:
            found.setdefault((row["operation"], function), []).append(row["backend"])
    return found


def _table(entries: list[Entry], signatures: bool) -> tuple[list[str], list[list[Any]]]:
    if signatures:
        return ["module", "signature"], [[e.module, e.signature or e.name] for e in entries]
    if any(e.kind != "ops" for e in entries):
        return ["kind", "module", "name", "what it is"], [
            [e.kind, e.module, e.name, e.error or e.summary.rstrip(".")] for e in entries
        ]
    columns = ["module", "name", "operation", "core", "backends", "varlen", "state", "cp", "note"]
    return columns, [
        [
            *(e.module, e.name, e.operation, " ".join(e.paths) or None, " ".join(e.backends) or None),
            *(e.varlen, e.state, e.context_parallel, e.error or ""),
        ]
        for e in entries
    ]


def _print(entries: list[Entry], signatures: bool) -> None:
    out = Output()
    if not signatures:
        out.table(*_table(entries, signatures))
        return
    for module in dict.fromkeys(e.module for e in entries):
        out.heading(module)
        for entry in entries:
            if entry.module == module:
                out.line(f"  {entry.signature or entry.name}" + (f"  [{entry.error}]" if entry.error else ""))
