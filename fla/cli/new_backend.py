# SPDX-License-Identifier: MIT
"""`fla new-backend NAME --op OP`: a plugin package that passes its own tests, to put a kernel into."""

from __future__ import annotations

import argparse
import datetime
import inspect
import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fla
from fla.cli._output import CliError, Output, add_json_option, print_json

_TEMPLATES = Path(__file__).parent / "_templates" / "backend"
# Template -> where it goes; @PACKAGE@ is filled in here too.
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "LICENSE.txt": "LICENSE",
    "README.md.txt": "README.md",
    "gitignore.txt": ".gitignore",
    "workflow.yml.txt": ".github/workflows/tests.yml",
    "init.py.txt": "src/@PACKAGE@/__init__.py",
    "plugin.py.txt": "src/@PACKAGE@/plugin.py",
    "kernel.py.txt": "src/@PACKAGE@/kernel.py",
    "typed.txt": "src/@PACKAGE@/py.typed",
    "test_backend.py.txt": "tests/test_backend.py",
}
_TAKEN = ("triton", "torch", "core")
# What an annotation of an op may consist of; anything else is written as Any.
_KNOWN_WORDS = frozenset({"Tensor", "None", "bool", "int", "float", "str", "object", "tuple", "list"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the backend, e.g. my_kda; its variable will be FLA_MY_KDA")
    parser.add_argument("--op", required=True, metavar="OP", help="the function it takes over, e.g. kda.chunk_kda")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="folder to make (default: ./fla-backend-NAME)")
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    names = Names.of(args.name)
    folder: Path = args.dir if args.dir is not None else Path(names.distribution)
    files = render(names, args.op)
    write(folder, files)
    if args.json:
        print_json({"folder": str(folder), "distribution": names.distribution, "files": sorted(files)})
        return 0
    out = Output()
    out.line(f"{names.distribution} is in {folder}: {len(files)} files")
    out.line(f"the kernel goes into {folder / 'src' / names.package / 'kernel.py'}, what it can do into plugin.py\n")
    out.line(f"  cd {folder}")
    out.line("  pip install -e '.[test]'")
    out.line("  pytest")
    return 0


@dataclass(frozen=True)
class Names:
    """All that follows from the backend's name."""

    type: str

    @classmethod
    def of(cls, text: str) -> Names:
        """Raises CliError where the name cannot be that of a backend."""
        name = re.sub(r"[-.]+", "_", text).removeprefix("fla_backend_")
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
            raise CliError(
                f"{text!r} is no name for a backend: lower-case letters, digits and single _ or -, e.g. my_kda", 2
            )
        if name in _TAKEN or keyword.iskeyword(name):
            raise CliError(f"a backend cannot be called {name!r}", 2)
        return cls(name)

    @property
    def entry(self) -> str:
        return self.type

    @property
    def package(self) -> str:
        return f"fla_backend_{self.type}"

    @property
    def distribution(self) -> str:
        return self.package.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"FLA_{self.type.upper()}"

    @property
    def class_name(self) -> str:
        return "".join(part.capitalize() for part in self.type.split("_"))


def render(names: Names, op_name: str) -> dict[str, str]:
    """The files of the package by their path.

    Raises:
        CliError: no such op, it is not open to backends, or the variable belongs to something else.
    """
    from fla import settings
    from fla.backends import DispatchedOp
    from fla.cli._arguments import find_function

    function = find_function(op_name)
    op = getattr(function, "op", None)
    if not isinstance(op, DispatchedOp):
        raise CliError(f"{op_name} is not open to backends, it always runs as it is")
    if names.variable in settings.names():
        raise CliError(f"{names.variable} is a setting already; choose another name", 2)
    values = {
        "CLASS": names.class_name,
        "CORE": fla.__version__,
        "DISTRIBUTION": names.distribution,
        "ENTRY": names.entry,
        "FUNCTION": op.name,
        "MODULE": _public_module(function),
        "OPERATION": op.operation,
        "PACKAGE": names.package,
        "TYPE": names.type,
        "VARIABLE": names.variable,
        "YEAR": str(datetime.date.today().year),
        **_signature_text(op.signature),
    }
    return {fill(target, values): fill(_template(source), values) for source, target in _FILES.items()}


def _template(name: str) -> str:
    path = _TEMPLATES / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def fill(text: str, values: dict[str, str]) -> str:
    """`text` with each `@KEY@` replaced. An unknown key is a KeyError."""
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)


def _public_module(function: Callable[..., Any]) -> str:
    """Where users import it from: `fla.ops.kda`, not `fla.ops.kda.chunk`."""
    import importlib

    parts = function.__module__.split(".")
    for n in range(3, len(parts) + 1):
        module = ".".join(parts[:n])
        if getattr(importlib.import_module(module), function.__name__, None) is function:
            return module
    return function.__module__


def _signature_text(signature: inspect.Signature) -> dict[str, str]:
    """The op's parameters as source, for the places in which the templates need them."""
    parameters = list(signature.parameters.values())
    method = [_plain_default(p) for p in parameters]
    arguments = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters]
    return {
        "KERNEL_ARGUMENTS": _lines(arguments, 8),
        "PLUGIN_ARGUMENTS": _lines(arguments, 12),
        "FIRST": parameters[0].name,
        "FIRST_ANNOTATION": _annotation(parameters[0]),
        "KERNEL_IMPORTS": "".join(f"{line}\n" for line in _imports(parameters)),
        "PLUGIN_IMPORTS": "".join(f"    {line}\n" for line in _imports(method) or ["pass"]),
        "KERNEL_PARAMETERS": _lines(_parameters(parameters), 4),
        "PLUGIN_PARAMETERS": _lines(_parameters(method), 8),
    }


def _imports(parameters: list[inspect.Parameter]) -> list[str]:
    """What the annotations and defaults of `parameters` need."""
    text = ", ".join(_parameters(parameters))
    plain = ["import torch"] if "torch." in text else []
    return plain + (["from torch import Tensor"] if re.search(r"(?<!\.)\bTensor\b", text) else [])


def _lines(items: Any, indent: int) -> str:
    return "\n".join(f"{' ' * indent}{item}," for item in items)


def _parameters(parameters: list[inspect.Parameter]) -> list[str]:
    found: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and "*" not in found:
            found.append("*")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        found.append(f"{p.name}: {_annotation(p)}{default}")
    return found


def _plain_default(p: inspect.Parameter) -> inspect.Parameter:
    """A default that needs torch when the method is defined becomes None: core gives every argument anyway."""
    if p.default is p.empty or isinstance(p.default, bool | int | float | str | None):
        return p
    return p.replace(default=None, annotation="Any")


def _annotation(p: inspect.Parameter) -> str:
    text = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
    words = re.findall(r"[A-Za-z_][\w.]*", text)
    return text if words and all(w in _KNOWN_WORDS or w.startswith("torch.") for w in words) else "Any"


def write(folder: Path, files: dict[str, str]) -> None:
    """Write `files` under `folder`, which must not exist or be empty. Nothing is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CliError(f"{folder} exists and is not an empty folder; nothing was written")
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
