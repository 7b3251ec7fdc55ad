# SPDX-License-Identifier: MIT
from __future__ import annotations

import importlib
import inspect

from fla.backends import BackendRegistry, BaseBackend
from fla.cli._inventory import static_entries


def test_static_listing_equals_what_can_be_imported():
    for entry in static_entries(("ops", "layers", "modules", "models")):
        assert entry.error is None
        thing = getattr(importlib.import_module(entry.module), entry.name)
        assert callable(thing)
        if entry.kind == "ops" and entry.operation is not None:
            assert thing.op.operation == entry.operation


def test_every_public_op_is_listed():
    entries = {(e.module, e.name) for e in static_entries(("ops",))}
    for op in ("kda", "gated_delta_rule", "delta_rule", "gla", "simple_gla", "retention", "linear_attn"):
        room = importlib.import_module(f"fla.ops.{op}")
        assert {(f"fla.ops.{op}", name) for name in room.__all__} <= entries


def test_filter_and_flags(fla_cli):
    result = fla_cli("ops", "--filter", r"kda\.chunk_kda$", "--json")
    (row,) = result.json
    assert result.code == 0
    assert (row["operation"], row["varlen"], row["state"], row["context_parallel"]) == ("kda", True, True, False)
    assert row["paths"][0] == "torch"


def test_live_signatures_are_those_of_the_functions(fla_cli):
    from fla.ops.gla import chunk_gla

    (row,) = fla_cli("ops", "--filter", r"gla\.chunk_gla$", "--json").json
    named = row["signature"].removeprefix("chunk_gla(")
    assert [p.partition("=")[0].strip() for p in named.rstrip(")").split(",") if p.strip() != "*"] == list(
        inspect.signature(chunk_gla).parameters
    )


def test_no_match_exits_with_1(fla_cli):
    result = fla_cli("ops", "--filter", "nothing_like_this")
    assert (result.code, result.out) == (1, "")
    assert "nothing matches" in result.err
    assert fla_cli("ops", "--filter", "nothing_like_this", "--json").code == 1


def test_static_works_without_torch_and_triton_and_the_live_form_says_what_to_do(fresh_fla):
    without = ("torch", "triton", "transformers")
    result = fresh_fla("ops", "--static", "--json", without=without)
    assert result.code == 0, result.err
    assert "chunk_kda" in {row["name"] for row in result.json}
    result = fresh_fla("ops", without=without)
    assert (result.code, result.out) == (2, "")
    assert "fla ops --static" in result.err


def test_markdown_and_signatures(fla_cli):
    lines = fla_cli("ops", "--static", "--markdown").out.splitlines()
    assert lines[0].startswith("| module | name |")
    assert lines[1].startswith("| --- |")
    assert "chunk_kda(q, k, v, g, beta, scale=None" in fla_cli("ops", "--static", "--signatures").out


def test_a_broken_module_is_listed_with_its_error(fla_cli, monkeypatch):
    real = importlib.import_module

    def broken(name: str, package: str | None = None):
        if name == "fla.ops.gla":
            raise RuntimeError("half installed\nmore")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", broken)
    rows = fla_cli("ops", "--json").json
    assert {r["error"] for r in rows if r["module"] == "fla.ops.gla"} == {"RuntimeError: half installed"}
    assert all(r["error"] is None for r in rows if r["module"] == "fla.ops.kda")


def test_backends_that_can_take_an_op_over_are_named(fla_cli):
    class Mine(BaseBackend):
        backend_type = "mine"

        def chunk_gla(self, q, k, v, g):
            raise NotImplementedError

    registry = BackendRegistry("gla")
    registry.register(Mine())
    try:
        rows = {row["name"]: row["backends"] for row in fla_cli("ops", "--filter", r"ops\.gla\.", "--json").json}
    finally:
        registry.unregister("mine")
    assert rows["chunk_gla"] == ["mine"]
    assert rows["fused_recurrent_gla"] == []
