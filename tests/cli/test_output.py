# SPDX-License-Identifier: MIT
from __future__ import annotations

import io

import pytest

from fla.cli._output import Output, format_markdown, format_table, use_colour


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clean(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    return monkeypatch


def test_plain_table_is_aligned_and_marks_missing_values():
    assert format_table(["name", "on"], [["a", True], ["longer", None]]) == [
        "name    on",
        "------  ---",
        "a       yes",
        "longer  -",
    ]


def test_markdown_escapes_pipes():
    assert format_markdown(["a"], [["x|y"]]) == ["| a |", "| --- |", "| x\\|y |"]


def test_a_file_gets_no_escape_codes(clean):
    stream = io.StringIO()
    Output(stream).table(["state"], [["ok"], ["fail"]])
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_colour(clean):
    pytest.importorskip("rich")
    stream = Terminal()
    assert use_colour(stream)
    Output(stream).table(["state"], [["ok"]])
    assert "\x1b[32m" in stream.getvalue()


def test_no_color_is_honoured(clean):
    clean.setenv("NO_COLOR", "1")
    stream = Terminal()
    assert not use_colour(stream)
    Output(stream).table(["state"], [["ok"]])
    assert "\x1b[3" not in stream.getvalue()


def test_text_with_brackets_is_printed_as_it_is(clean):
    stream = Terminal()
    out = Output(stream)
    out.line("shape [B, T]")
    out.heading("[bold]")
    assert "shape [B, T]" in stream.getvalue()
    assert "[bold]" in stream.getvalue()
