# SPDX-License-Identifier: MIT
"""Documentation is code: Python blocks run, `fla` lines parse, links lead somewhere, op pages name every parameter."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path

import pytest

from fla.cli._app import build_parser

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
OP_PAGES = sorted(p for p in (ROOT / "docs" / "ops").glob("*.md") if p.stem != "README")
# A block that is not run says why: ```python no-run: needs a second distribution
_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(#[^)]*)?\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """`(what follows the language, text)` of every fenced block of one language."""
    return [(info.strip(), text) for lang, info, text in _BLOCK.findall(page.read_text()) if lang == language]


def commands(page: Path) -> list[list[str]]:
    """Every `fla ...` line of the shell blocks, split into words."""
    lines = [line for _, text in blocks(page, "bash") for line in text.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    found = []
    for line in words:
        while line and re.fullmatch(r"[A-Z_]+=.*", line[0]):  # FLA_PLUGINS=... fla ...
            line = line[1:]
        if line and line[0] == "fla":
            found.append(line[1:])
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for number, (info, text) in enumerate(blocks(page, "python"), start=1):
        if info:
            assert info.startswith("no-run: "), f"block {number} of {name(page)}: unknown mark {info!r}"
            continue
        exec(compile(text, f"{name(page)}, block {number}", "exec"), scope)


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=name)
def test_fla_commands_parse(page: Path) -> None:
    for words in commands(page):
        command = next((w for w in words if not w.startswith("-")), None)
        code = 0
        try:
            build_parser(command).parse_args(words)
        except SystemExit as stop:
            code = stop.code
        assert code == 0, f"{name(page)}: fla {shlex.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    for target, _ in _LINK.findall(page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("page", OP_PAGES, ids=lambda p: p.stem)
def test_op_page_names_every_function_and_parameter(page: Path) -> None:
    room = importlib.import_module(f"fla.ops.{page.stem}")
    prose = _BLOCK.sub("", re.sub(r"^```\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    for function in (n for n in room.__all__ if not n.startswith("naive_")):
        assert function in words, f"{function} is not on the page"
        signature = inspect.signature(getattr(room, function))
        missing = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD and p.name not in words]
        assert missing == [], f"parameters of {function} that are not on the page"
