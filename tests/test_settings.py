# SPDX-License-Identifier: MIT
"""The table of settings: grammar, precedence, warnings, the page in docs."""

from __future__ import annotations

import subprocess
import sys
import threading
import timeit
import warnings
from pathlib import Path

import pytest

from fla import settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("FLA_")]:
        monkeypatch.delenv(name)
    settings._said.clear()
    known = dict(settings._known)
    yield
    settings.reset()
    settings._known.clear()
    settings._known.update(known)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", False),
        ("1", True),
        ("true", True),
        ("FALSE", False),
        ("Yes", True),
        ("no", False),
        ("on", True),
        ("Off", False),
    ],
)
def test_one_boolean_grammar(monkeypatch, text, value):
    monkeypatch.setenv("FLA_CHECK_INPUTS", text)
    assert settings.get("FLA_CHECK_INPUTS") is value
    assert settings.origin("FLA_CHECK_INPUTS") == "environment"


@pytest.mark.parametrize("text", ["2", "maybe", "", "truee"])
def test_anything_else_warns_once_and_counts_as_unset(monkeypatch, text):
    monkeypatch.setenv("FLA_BACKEND_STRICT", text)
    with pytest.warns(UserWarning, match="FLA_BACKEND_STRICT.*0/1/true/false/yes/no/on/off"):
        assert settings.get("FLA_BACKEND_STRICT") is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert settings.origin("FLA_BACKEND_STRICT") == "default"


def test_types_of_values(monkeypatch):
    monkeypatch.setenv("FLA_PLUGINS", " tilelang, -flashkda ,,")
    assert settings.get("FLA_PLUGINS") == ("tilelang", "-flashkda")
    monkeypatch.setenv("FLA_TENSOR_CACHE_SIZE", "16")
    assert settings.get("FLA_TENSOR_CACHE_SIZE") == 16
    monkeypatch.setenv("FLA_TENSOR_CACHE_SIZE", "0")
    with pytest.warns(UserWarning, match="an integer >= 1"):
        assert settings.get("FLA_TENSOR_CACHE_SIZE") == 4
    monkeypatch.setenv("FLA_CONV_BACKEND", "metal")
    with pytest.warns(UserWarning, match="one of cuda, triton"):
        assert settings.get("FLA_CONV_BACKEND") is None


def test_precedence_and_origin(monkeypatch):
    name = "FLA_BACKEND_STRICT"
    assert (settings.get(name), settings.origin(name)) == (False, "default")
    monkeypatch.setenv(name, "1")
    assert (settings.get(name), settings.origin(name)) == (True, "environment")
    settings.set(name, "off")
    assert (settings.get(name), settings.origin(name)) == (False, "set")
    with settings.override(FLA_BACKEND_STRICT=True):
        assert (settings.get(name), settings.origin(name)) == (True, "context")
        with settings.override(FLA_BACKEND_STRICT=None):
            assert (settings.get(name), settings.origin(name)) == (False, "default")
    settings.reset(name)
    assert settings.origin(name) == "environment"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLA_CHECK_INPUTS", "maybe"),
        ("FLA_CHECK_INPUTS", 2),
        ("FLA_TENSOR_CACHE_SIZE", -1),
        ("FLA_PLUGINS", [1]),
        ("FLA_PLUGINS", 7),
        ("FLA_CONV_BACKEND", "metal"),
        ("FLA_TENSOR_CACHE_SIZE", True),
    ],
)
def test_wrong_value_from_python_raises_and_changes_nothing(name, value):
    before = settings.get(name)
    with pytest.raises(ValueError, match=name):
        settings.set(name, value)
    with pytest.raises(ValueError, match=name), settings.override(**{name: value}):
        pass
    assert settings.get(name) == before
    assert settings.origin(name) == "default"


def test_unknown_name_raises_with_the_nearest():
    for call in (settings.get, settings.origin, settings.reset):
        with pytest.raises(KeyError, match="did you mean FLA_PLUGINS"):
            call("FLA_PLUGIN")
    with pytest.raises(KeyError), settings.override(FLA_NOPE=1):
        pass


def test_unknown_and_meaningless_variables_of_the_environment_warn_once(monkeypatch):
    monkeypatch.setenv("FLA_TILELNAG", "1")
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    monkeypatch.setenv("FLA_TILELANG", "1")
    with pytest.warns(UserWarning, match="FLA_") as caught:
        settings.check_environment()
    texts = [str(w.message) for w in caught]
    assert len(texts) == 2
    assert any("FLA_TILELNAG" in text and "did you mean FLA_TILELANG?" in text for text in texts)
    assert any("FLA_CACHE_MODE has no effect" in text for text in texts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings.check_environment()
    assert sorted(settings.unrecognised()) == ["FLA_CACHE_MODE", "FLA_TILELNAG"]


OLD_NAMES = """
DISABLE_BACKEND_DISPATCH TILELANG GLUON CE_GLUON CONV_GLUON ATTNRES_GLUON FLASH_KDA FLASH_QLA INTRACARD_CP
INTRACARD_MAX_SPLITS CONV_BACKEND TRIL_PRECISION USE_FAST_OPS USE_TMA USE_COMPILE CACHE_MODE CACHE_RESULTS CONFIG_DIR
GPU_NAME DISABLE_TENSOR_CACHE TENSOR_CACHE_SIZE CI_ENV BENCH_OP_WARMUP_ITERS BENCH_WARMUP_MS BENCH_REP_MS
BENCH_COOLDOWN_SEC NPU_XDIST
"""


def test_every_variable_of_the_060_series_is_known():
    names = [f"FLA_{name}" for name in OLD_NAMES.split()]
    missing = [name for name in names if name not in settings.names() and name not in settings.INERT]
    assert not missing


def test_override_is_the_threads_own():
    found = []
    with settings.override(FLA_CHECK_INPUTS=True):
        thread = threading.Thread(target=lambda: found.append(settings.get("FLA_CHECK_INPUTS")))
        thread.start()
        thread.join()
    assert found == [False]


def test_variable_of_a_backend_is_known_once_it_registers(monkeypatch):
    with pytest.raises(KeyError):
        settings.get("FLA_FOREIGN")
    settings.register_variable("FLA_FOREIGN", default=True, meaning="x", owner="foreign")
    assert settings.get("FLA_FOREIGN") is True
    assert settings.explicit("FLA_FOREIGN") is None
    monkeypatch.setenv("FLA_FOREIGN", "0")
    assert settings.explicit("FLA_FOREIGN") == (False, "environment")


def test_describe_has_a_row_for_every_setting(monkeypatch):
    monkeypatch.setenv("FLA_PLUGINS", "a,b")
    rows = {row["name"]: row for row in settings.describe()}
    assert set(rows) == set(settings.names())
    assert rows["FLA_PLUGINS"]["value"] == ["a", "b"]
    assert rows["FLA_PLUGINS"]["origin"] == "environment"
    assert all(row["meaning"] and row["read"] for row in rows.values())


def test_environment_is_read_cheaply():
    # os.environ.get takes about 0.8 us for a miss, as long as several of these.
    count = 20_000
    slow = min(timeit.repeat(lambda: __import__("os").environ.get("FLA_X"), number=count, repeat=5))
    key = settings.encode_name("FLA_X")
    fast = min(timeit.repeat(lambda: settings.environment_get(key), number=count, repeat=5))
    assert fast < slow


def test_import_brings_neither_torch_nor_plugins():
    code = "import sys, fla.settings; sys.exit(bool({'torch', 'triton', 'transformers', 'pluggy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_page_shows_the_table():
    page = (Path(__file__).parents[1] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert settings.markdown() in page, "docs/settings.md drifted; paste the output of fla.settings.markdown()"
