# SPDX-License-Identifier: MIT
from __future__ import annotations

import pytest

from fla.cli import _inventory
from fla.cli._inventory import public_names, resolve, static_entries

SOURCES = {
    "ops/kda/__init__.py": """
from fla.ops.kda.chunk import chunk_kda
from .gate import gate
chunk_other = chunk_kda
__all__ = ["chunk_kda", "chunk_other", "gate"]
""",
    "ops/kda/chunk.py": '''
from fla.backends import dispatch
@dispatch("kda", validate=None, triton="fla.ops._delta.entry:chunk_kda")
def chunk_kda(q: int, k, v, scale=None, initial_state=None, *, cu_seqlens=None, chunk_size=64):
    """Chunked KDA.

    More.
    """
''',
    "ops/kda/gate.py": "def gate(x): return x\n",
    "ops/_delta/__init__.py": "def hidden(): ...\n",
    "ops/bad/__init__.py": "def broken(:\n",
    "layers/__init__.py": '_LAZY = {"KimiDeltaAttention": "fla.layers.kda"}\n__all__ = [*_LAZY]\n',
    "layers/kda.py": """
class KimiDeltaAttention:
    def __init__(self, hidden_size=2048, *, mode='chunk', **kwargs): ...
""",
    "modules/__init__.py": "from fla.modules.norm import RMSNorm, _hidden\n",
    "modules/norm.py": "class RMSNorm: ...\ndef _hidden(): ...\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(_inventory, "ROOT", tmp_path)
    for cached in (_inventory._tree, _inventory._bindings):
        cached.cache_clear()
    yield tmp_path
    for cached in (_inventory._tree, _inventory._bindings):
        cached.cache_clear()


def test_an_op_is_followed_to_its_definition(package):
    entry = next(e for e in static_entries(("ops",)) if e.name == "chunk_kda")
    assert (entry.module, entry.defined_in) == ("fla.ops.kda", "fla.ops.kda.chunk")
    assert entry.operation == "kda"
    assert entry.paths == ["torch", "triton"]
    assert entry.signature == "chunk_kda(q, k, v, scale=None, initial_state=None, *, cu_seqlens=None, chunk_size=64)"
    assert entry.summary == "Chunked KDA."
    assert (entry.varlen, entry.state, entry.context_parallel) == (True, True, False)


def test_another_name_for_an_op_has_the_same_facts(package):
    first, second = (next(e for e in static_entries(("ops",)) if e.name == n) for n in ("chunk_kda", "chunk_other"))
    assert second.operation == first.operation == "kda"
    assert second.varlen


def test_engines_are_not_ops_and_a_broken_module_is_listed_not_fatal(package):
    entries = static_entries(("ops",))
    assert {e.name for e in entries} == {"chunk_kda", "chunk_other", "gate", "*"}
    broken = next(e for e in entries if e.name == "*")
    assert broken.module == "fla.ops.bad"
    assert "SyntaxError" in (broken.error or "")


def test_relative_imports_and_lazy_tables_are_followed(package):
    assert resolve("fla.ops.kda", "gate")[0] == "fla.ops.kda.gate"
    layer = next(e for e in static_entries(("layers",)))
    assert layer.signature == "KimiDeltaAttention(hidden_size=2048, *, mode='chunk', **kwargs)"


def test_private_names_are_left_out_where_there_is_no_list(package):
    assert public_names("fla.modules") == ["RMSNorm"]


def test_model_classes_come_from_the_families():
    names = {e.name: e for e in static_entries(("models",))}
    assert {"KDAConfig", "KDAForCausalLM", "KDAModel"} <= set(names)
    assert "hidden_size=2048" in (names["KDAConfig"].signature or "")
