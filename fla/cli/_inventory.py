# SPDX-License-Identifier: MIT
"""Public names of the package, read from its source files: works without torch and triton, and imports nothing."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import fla
from fla.models._index import FAMILIES

KINDS = ("ops", "layers", "modules", "models")
ROOT = Path(fla.__file__).resolve().parent
# Rooms under fla/ops that hold no op of their own.
_NOT_OPS = frozenset({"backends", "utils", "cp", "common"})
_Definition = ast.FunctionDef | ast.ClassDef


@dataclass
class Entry:
    """One public name. Lists are empty and flags false where the source says nothing."""

    kind: str
    name: str
    module: str  # where users import it from
    defined_in: str | None = None
    operation: str | None = None  # what backends register for; None: not open to backends
    signature: str | None = None
    summary: str = ""
    paths: list[str] = field(default_factory=list)  # core implementations: torch, triton
    varlen: bool = False
    state: bool = False
    context_parallel: bool = False
    backends: list[str] = field(default_factory=list)
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def static_entries(kinds: tuple[str, ...] = KINDS) -> list[Entry]:
    """Every public name of the asked kinds, in order of module and name."""
    entries: list[Entry] = []
    for kind in kinds:
        if kind == "models":
            entries.extend(_model_entries())
            continue
        for room in _rooms(kind):
            try:
                names = public_names(room)
            except (OSError, SyntaxError) as error:
                entries.append(Entry(kind, "*", room, error=f"{type(error).__name__}: {error}"))
                continue
            entries.extend(_entry(kind, room, name) for name in names)
    return entries


def _model_entries() -> Iterator[Entry]:
    """Model classes are built from the rows of families, so these are read instead: data, which imports nothing."""
    for family in FAMILIES:
        room = f"fla.models.{family.package}"
        fields = importlib.import_module(room).FAMILY.fields
        config, causal, base = family.names
        signature = ", ".join(f"{name}={default!r}" for name, default in fields.items())
        yield Entry("models", config, room, room, signature=f"{config}({signature}, **kwargs)", summary="configuration")
        yield Entry("models", causal, room, room, signature=f"{causal}(config)", summary="language model")
        yield Entry("models", base, room, room, signature=f"{base}(config)", summary="decoder without a head")


def _rooms(kind: str) -> Iterator[str]:
    """Modules whose public names make up one kind."""
    if kind == "ops":
        for path in sorted((ROOT / "ops").glob("*/__init__.py")):
            name = path.parent.name
            if not name.startswith("_") and name not in _NOT_OPS:
                yield f"fla.ops.{name}"
    else:
        yield f"fla.{kind}"


def _entry(kind: str, room: str, name: str) -> Entry:
    entry = Entry(kind, name, room)
    found = resolve(room, name)
    if found is None:
        return entry
    entry.defined_in, node = found
    entry.summary = _plain((ast.get_docstring(node) or "").partition("\n")[0])
    function = node
    if isinstance(node, ast.ClassDef):
        inits = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        if not inits:
            return entry
        function = inits[0]
    assert isinstance(function, ast.FunctionDef)
    entry.signature = f"{name}({_parameters(function.args, method=isinstance(node, ast.ClassDef))})"
    parameters = {a.arg for a in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]}
    entry.varlen = "cu_seqlens" in parameters
    entry.state = "initial_state" in parameters
    entry.context_parallel = "cp_context" in parameters and not _refuses_context_parallel(entry.defined_in)
    for decorator in function.decorator_list:
        called = _name_of(decorator.func) if isinstance(decorator, ast.Call) else ""
        if isinstance(decorator, ast.Call) and (called == "dispatch" or called.endswith("_op")):
            # The decorator of an engine takes a row of its table; an operation has the name of its room.
            entry.operation = (_string(decorator.args[0]) if decorator.args else None) or room.rpartition(".")[2]
            entry.paths = ["torch"]
            if any(k.arg == "triton" and _string(k.value) for k in decorator.keywords):
                entry.paths.append("triton")
    return entry


def _plain(text: str) -> str:
    """A docstring line without reStructuredText roles and double back-quotes."""
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", text).replace("``", "`")


def _refuses_context_parallel(module: str) -> bool:
    """Whether the op's checks refuse every `cp_context`: the parameter is there for its place in the signature."""
    return any(isinstance(n, ast.Call) and _name_of(n.func) == "check_no_cp" for n in ast.walk(_tree(module)))


def public_names(module: str) -> list[str]:
    """`__all__` of a module, or its imported and defined names without a leading underscore where it has none."""
    tree = _tree(module)
    listed: list[str] | None = None
    for node in tree.body:
        targets, value = _assignment(node)
        if "__all__" in targets and value is not None:
            listed = [*(listed or []), *_names_in(value, module)]
    if listed is None:
        listed = [n for n in _bindings(module) if not n.startswith("_") and resolve(module, n) is not None]
    return sorted(dict.fromkeys(listed), key=str.lower)


def resolve(module: str, name: str, depth: int = 8) -> tuple[str, _Definition] | None:
    """Follow imports, lazy tables included, to the module and syntax node that define `name`."""
    if depth == 0 or _file(module) is None:
        return None
    for node in _tree(module).body:
        if isinstance(node, _Definition) and node.name == name:
            return module, node
        targets, value = _assignment(node)
        if name in targets and isinstance(value, ast.Name):  # another name for the same thing
            return resolve(module, value.id, depth - 1)
    target = _bindings(module).get(name)
    return None if target is None else resolve(*target, depth - 1)


@functools.cache
def _bindings(module: str) -> dict[str, tuple[str, str]]:
    """Name -> (module, name there) for everything a module imports from inside the package, eagerly or lazily."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            found.update({a.asname or a.name: (source, a.name) for a in node.names if a.name != "*"})
        elif isinstance(node, ast.Dict):
            found.update(_lazy_table(module, node))
    return {name: target for name, target in found.items() if target[0].partition(".")[0] == "fla"}


def _lazy_table(module: str, node: ast.Dict) -> Iterator[tuple[str, tuple[str, str]]]:
    """Rows of a table `{"Name": "module"}` or `{"module": ("Name", ...)}`, the two usual forms of lazy exports."""
    for key, value in zip(node.keys, node.values, strict=True):
        word = _string(key)
        if word is None:
            continue
        place = _string(value)
        if place is not None:
            where, _, name = place.partition(":")
            yield word, (where if where.startswith("fla") else f"{module}.{where.lstrip('.')}", name or word)
        elif isinstance(value, ast.Tuple | ast.List):
            where = word if word.startswith("fla") else f"{module}.{word.lstrip('.')}"
            for element in value.elts:
                name = _string(element) or ""
                if name:
                    yield name, (where, name)


def _names_in(node: ast.expr, module: str) -> list[str]:
    """The strings of an `__all__` value: literals, unpacked tables and sums of these."""
    if isinstance(node, ast.BinOp):
        return [*_names_in(node.left, module), *_names_in(node.right, module)]
    if isinstance(node, ast.Starred):
        return _names_in(node.value, module)
    if isinstance(node, ast.Call) and node.args:  # sorted(...), list(...), tuple(...)
        return _names_in(node.args[0], module)
    if isinstance(node, ast.Dict):
        return [name for name, _ in _lazy_table(module, node)]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [name for element in node.elts for name in _names_in(element, module)]
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Name):
        for statement in _tree(module).body:
            targets, value = _assignment(statement)
            if node.id in targets and value is not None:
                return _names_in(value, module)
    return []


def _parameters(arguments: ast.arguments, *, method: bool) -> str:
    """The parameter list as source text without annotations (and without `self`)."""

    def bare(a: ast.arg | None) -> ast.arg | None:
        return None if a is None else ast.arg(arg=a.arg)

    return ast.unparse(
        ast.arguments(
            posonlyargs=[ast.arg(arg=a.arg) for a in arguments.posonlyargs],
            args=[ast.arg(arg=a.arg) for a in arguments.args[1 if method else 0 :]],
            vararg=bare(arguments.vararg),
            kwonlyargs=[ast.arg(arg=a.arg) for a in arguments.kwonlyargs],
            kw_defaults=arguments.kw_defaults,
            kwarg=bare(arguments.kwarg),
            defaults=arguments.defaults,
        )
    )


@functools.cache
def _tree(module: str) -> ast.Module:
    path = _file(module)
    if path is None:
        raise FileNotFoundError(f"{module} has no source file under {ROOT}")
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def _file(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split(".")[1:])
    for path in (base / "__init__.py", base.with_name(base.name + ".py")):
        if path.is_file():
            return path
    return None


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    path = _file(module)
    package = module if path is not None and path.name == "__init__.py" else module.rpartition(".")[0]
    for _ in range(node.level - 1):
        package = package.rpartition(".")[0]
    return f"{package}.{node.module}" if node.module else package


def _assignment(node: ast.stmt) -> tuple[list[str], ast.expr | None]:
    if isinstance(node, ast.Assign):
        return [t.id for t in node.targets if isinstance(t, ast.Name)], node.value
    if isinstance(node, ast.AnnAssign | ast.AugAssign) and isinstance(node.target, ast.Name):
        return [node.target.id], node.value
    return [], None


def _string(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
