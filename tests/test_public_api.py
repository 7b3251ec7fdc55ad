# SPDX-License-Identifier: MIT
"""Our public names against those of release 0.6.0 of the reference package: same order, same names, same defaults.

`tests/data/api-0.6.0.json` holds the reference. Names that do not exist here yet stand in `tests/data/api-missing.txt`,
so that nothing is forgotten silently; `python tests/test_public_api.py` rewrites that list.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"
REFERENCE: dict[str, dict[str, dict[str, Any]]] = json.loads((DATA / "api-0.6.0.json").read_text())
MISSING_FILE = DATA / "api-missing.txt"
HEADER = """\
# Public names of 0.6.0 that do not exist here yet, one `module:name` a line.
# Rewritten by `python tests/test_public_api.py`; tests/test_public_api.py fails when the list is wrong.
"""
# Optional parameters that we take beyond 0.6.0 on purpose.
EXTENSIONS = {
    "fla.backends:register": ("instance", "override"),
    "fla.ops.hgrn:chunk_hgrn": ("cu_seqlens",),
    "fla.modules.activations:logsigmoid": ("output_dtype",),
}
_NO_VALUE = object()


def listed_missing() -> set[str]:
    lines = MISSING_FILE.read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def find(module: str, name: str) -> Any:
    """The object, or `None` where the module or the name does not exist. A broken module is an error, not a miss."""
    try:
        room = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            return None
        raise
    return getattr(room, name, None)


def actually_missing() -> set[str]:
    return {f"{m}:{n}" for m, names in REFERENCE.items() for n in names if find(m, n) is None}


def default_of(text: str) -> Any:
    """The value of a default as 0.6.0 spells it; `_NO_VALUE` where it names a constant we cannot see."""
    import torch

    try:
        return eval(text, {"torch": torch, "float": float, "__builtins__": {}})
    except NameError:
        return _NO_VALUE


def same_default(wanted: str, ours: Any) -> bool:
    value = default_of(wanted)
    return value is _NO_VALUE or (value == ours and type(value) is type(ours))


def differences(
    wanted: list[list[str]], ours: inspect.Signature, *, first: int, kind: str, extensions: tuple[str, ...] = ()
) -> Iterator[str]:
    """Every way in which a signature differs from the reference's.

    Args:
        wanted: `[name]` or `[name, default]` in order; `*` starts the keyword-only part.
        first: leading parameters of ours to leave out (`self`, `ctx`).
        kind: an "op" refuses unknown keywords with `TypeError`; a "method" ignores them where 0.6.0 does; a "function"
            is free to do either.
        extensions: optional parameters that 0.6.0 does not have.
    """
    parameters = [p for p in list(ours.parameters.values())[first:] if p.name not in extensions or p.default is p.empty]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [entry[0] for entry in wanted]
    split = names.index("*") if "*" in names else len(names)
    wanted_positional = [entry for entry in wanted[:split] if not entry[0].startswith("*")]
    wanted_keyword = [entry for entry in wanted[split + 1 :] if not entry[0].startswith("*")]
    takes_more = any(name.startswith("**") for name in names)

    if [p.name for p in positional] != [entry[0] for entry in wanted_positional]:
        yield f"positional parameters are {[p.name for p in positional]}, not {[e[0] for e in wanted_positional]}"
        return
    for entry, p in [*zip(wanted_positional, positional, strict=True)] + [
        (entry, keyword[entry[0]]) for entry in wanted_keyword if entry[0] in keyword
    ]:
        if len(entry) == 1 and p.default is not p.empty:
            yield f"{p.name} has a default, 0.6.0 has none"
        elif len(entry) == 2 and (p.default is p.empty or not same_default(entry[1], p.default)):
            yield f"{p.name} defaults to {p.default!r}, not {entry[1]}"
    yield from (f"keyword {entry[0]} is missing" for entry in wanted_keyword if entry[0] not in keyword)
    more = set(keyword) - {entry[0] for entry in wanted_keyword}
    yield from (
        f"new keyword {name} has no default" for name in sorted(more) if keyword[name].default is inspect._empty
    )
    if more and not takes_more:
        yield f"keywords {sorted(more)} are not in 0.6.0"
    if kind == "op" and any_keyword and wanted_positional:  # without parameters it exists only to raise
        yield "takes **kwargs: unknown keywords must raise TypeError"
    if kind == "method" and takes_more and not any_keyword:
        yield "does not take **kwargs, clients pass keywords that it must ignore"


def check(module: str, name: str) -> Iterator[str]:
    thing = find(module, name)
    if thing is None:
        return
    for kind, wanted in REFERENCE[module][name].items():
        if kind == "function":
            if not callable(thing):
                yield f"{module}.{name} is not callable"
                continue
            # Layers and models ignore unknown keywords; functions raise TypeError (architecture, section 4).
            signature = inspect.signature(thing)
            call = "op" if module.startswith("fla.ops") else "function"
            extensions = EXTENSIONS.get(f"{module}:{name}", ())
            for text in differences(wanted, signature, first=0, kind=call, extensions=extensions):
                yield f"{module}.{name}: {text}"
        elif not inspect.isclass(thing):
            yield f"{module}.{name} is not a class"
        else:
            for method, parameters in wanted.items():
                # A class may show its constructor's parameters in another way than through `__init__`.
                built = method == "__init__"
                signature = inspect.signature(thing if built else getattr(thing, method))
                for text in differences(parameters, signature, first=0 if built else 1, kind="method"):
                    yield f"{module}.{name}.{method}: {text}"


def test_the_list_of_missing_names_is_exact() -> None:
    listed, missing = listed_missing(), actually_missing()
    assert sorted(missing - listed) == [], "public names that vanished or were never listed"
    assert sorted(listed - missing) == [], "names that exist now: take them off tests/data/api-missing.txt"


@pytest.mark.parametrize("module", REFERENCE)
def test_signatures_equal_those_of_0_6_0(module: str) -> None:
    assert [text for name in REFERENCE[module] for text in check(module, name)] == []


def some_op(q, k, v, scale=None, *, chunk_size=64):
    """The object of the self-tests below."""


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([["q"], ["k"], ["v"], ["scale", "None"], ["**kwargs"]], []),
        ([["q"], ["k"], ["v"], ["scale", "None"]], ["keywords ['chunk_size'] are not in 0.6.0"]),
        ([["q"], ["k"], ["v"], ["scale", "1.0"], ["**kwargs"]], ["scale defaults to None, not 1.0"]),
        ([["q"], ["k"], ["v"], ["scale"], ["**kwargs"]], ["scale has a default, 0.6.0 has none"]),
        ([["q"], ["k"], ["v"], ["scale", "None"], ["*"], ["chunk_size", "64"]], []),
        ([["q"], ["k"], ["v"], ["scale", "None"], ["*"], ["other", "1"], ["**kwargs"]], ["keyword other is missing"]),
    ],
)
def test_comparison_sees_each_kind_of_difference(wanted: list[list[str]], expected: list[str]) -> None:
    assert list(differences(wanted, inspect.signature(some_op), first=0, kind="op")) == expected


def test_comparison_sees_order_and_unknown_keywords() -> None:
    swapped = [["k"], ["q"], ["v"], ["scale", "None"], ["**kwargs"]]
    assert "positional parameters" in next(differences(swapped, inspect.signature(some_op), first=0, kind="op"))
    loose = inspect.signature(lambda q, **kwargs: None)
    assert "TypeError" in next(differences([["q"], ["**kwargs"]], loose, first=0, kind="op"))
    assert same_default("True", True)
    assert not same_default("1", True)


if __name__ == "__main__":
    MISSING_FILE.write_text(HEADER + "".join(f"{name}\n" for name in sorted(actually_missing())))
