# SPDX-License-Identifier: MIT
"""Installed plugins: stages, failures, order, processes. The plugins are real dist-info folders."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import threading
import warnings

import pytest

from fla import backends, settings
from fla.backends import BaseBackend, add_builtin, explain, last_decision, list_plugins, refresh, register, report
from fla.backends.discovery import DISCOVERY
from fla.backends.registry import REGISTRY

from .conftest import GOOD, make_toy

HALF = """
from fla.backends import BaseBackend, hookimpl

class Half(BaseBackend):
    backend_type = "half"
    priority = 0
    def toy(self, q, k, v):
        return "half"

@hookimpl
def register_backends(registry):
    registry.register("toyop", Half())
    registry.register("otherop", Half())
    raise RuntimeError("half-way")
"""

SIGNATURE = (
    GOOD.replace('"good"', '"wrong_signature"').replace("scale=1.0", "scaling=1.0").replace("scale)", "scaling)")
)

PROBE = GOOD.replace('"good"', '"unprobed"').replace(
    "    def toy", "    priority = 1\n    def probe(self):\n        return False, 'wrong numbers'\n    def toy"
)

RUNTIME = (
    GOOD.replace('"good"', '"crashes"')
    .replace("    def toy", "    priority = 2\n    def toy")
    .replace("return (", "raise OSError('no kernel')\n        return (")
)


@pytest.fixture
def toyop():
    """The op for which the plugins of this file are written."""
    return make_toy("toyop")[0]


def quietly(fn, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fn(*args, **kwargs)


def test_plugin_is_found_at_the_first_call_and_serves_it(site, toyop, qkv):
    site.install("good", GOOD)
    assert "plugin_good" not in sys.modules
    assert toyop(*qkv, 3.0) == ("good", 3.0)
    row = site.plugin("good")
    assert row["state"] == "registered"
    assert row["ok"]
    assert row["distribution"] == "fla-backend-good"
    assert row["version"] == "1.0"
    assert row["entry_point"] == "good = plugin_good"
    assert row["backends"] == [{"operation": "toyop", "backend": "good"}]
    assert row["load_ms"] > 0
    assert row["file"].endswith("plugin_good.py")
    assert explain(toyop, *qkv).verdict("good").distribution == "fla-backend-good"


def test_scan_happens_once(site, toyop, qkv, monkeypatch):
    import importlib_metadata

    site.install("good", GOOD)
    scans = []
    real = importlib_metadata.entry_points
    monkeypatch.setattr(importlib_metadata, "entry_points", lambda **k: scans.append(k) or real(**k))
    for _ in range(3):
        toyop(*qkv)
        list_plugins()
    assert scans == [{"group": "fla.backends"}]


@pytest.mark.parametrize("form", ["module", "object", "class"])
def test_value_of_an_entry_point_may_be_module_object_or_class(site, toyop, qkv, form):
    source = GOOD
    value = "plugin_good"
    if form == "object":
        source = GOOD.split("@hookimpl")[0] + textwrap.dedent(
            """
            class Plugin:
                @hookimpl
                def register_backends(self, registry):
                    registry.register("toyop", Good)
            plugin = Plugin()
            """
        )
        value = "plugin_good:plugin"
    elif form == "class":
        source = GOOD.split("@hookimpl")[0] + '\nGood.operations = ("toyop",)\n'
        value = "plugin_good:Good"
    site.install("good", source, value=value)
    assert toyop(*qkv) == ("good", 1.0)


def test_six_broken_plugins_beside_a_good_one(site, toyop, qkv):
    site.install("a_nometa", GOOD.replace('"good"', '"nometa"'), metadata=False)
    site.install("b_import", "raise ImportError('libmissing.so.1')")
    site.install("c_half", HALF)
    site.install("d_signature", SIGNATURE)
    site.install("e_probe", PROBE)
    site.install("f_runtime", RUNTIME)
    site.install("good", GOOD)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert toyop(*qkv) == ("good", 1.0)
        assert toyop(*qkv) == ("good", 1.0)
    states = {p.name: site.plugin(p.name) for p in DISCOVERY.plugins.values()}
    expected = {
        "a_nometa": ("found", "metadata"),
        "b_import": ("found", "ImportError: libmissing.so.1"),
        "c_half": ("imported", "RuntimeError: half-way"),
        "d_signature": ("imported", "scaling"),
        "e_probe": ("probed", "wrong numbers"),
    }
    for name, (state, reason) in expected.items():
        assert states[name]["state"] == state, states[name]
        assert reason in states[name]["reason"], states[name]
        assert not states[name]["ok"]
    assert "Traceback" in states["b_import"]["error"]
    assert states["good"]["ok"]
    for name in expected:  # each is said once, not at every call
        mark = "unprobed" if name == "e_probe" else name
        assert sum(mark in str(w.message) for w in caught) == 1, name
    assert sum("crashes" in str(w.message) for w in caught) == 1
    codes = {v.backend: v.code for v in last_decision().rejections}
    assert codes == {"unprobed": "unavailable", "crashes": "error"}
    assert [row["reason"] for row in report()["plugins"] if row["name"] == "c_half"] == ["RuntimeError: half-way"]


def test_plugin_that_registers_by_half_leaves_the_registry_equal(site, toyop, qkv):
    site.install("good", GOOD)
    toyop(*qkv)
    # Optional backends of core come with the next look where another test has imported their rooms.
    plugins = lambda: {
        (op, r.name)
        for op, rows in REGISTRY.snapshot().items()
        for r in rows
        if not type(r.backend).__module__.startswith("fla.")
    }
    names = plugins()
    assert names
    site.install("half", HALF)
    site.refresh()
    assert plugins() == names
    assert toyop(*qkv) == ("good", 1.0)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise SystemExit(7)", "SystemExit: 7"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("def register_backends(registry): pass", "marked with fla.backends.hookimpl"),
        ("x = 1", "marked with fla.backends.hookimpl"),
        (GOOD + "\napi_version = 99", "written for api_version 99, this core has api_version 1"),
        (GOOD + "\napi_version = '1'", "must be an integer"),
        (GOOD.replace("(registry)", "(registry, more)"), "more"),
        (GOOD.replace("Good())", "object())"), "instance of BaseBackend"),
        (GOOD.replace('"toyop"', "None"), "operation must be a name"),
        (GOOD.replace("registry.register", "raise KeyError('x') or registry.register"), "KeyError: 'x'"),
    ],
)
def test_failure_is_kept_for_display_and_the_call_goes_on(site, toyop, qkv, source, reason):
    site.install("broken", source)
    with pytest.warns(RuntimeWarning, match="fla plugin broken of fla-backend-broken 1.0 is ignored"):
        assert toyop(*qkv) == ("torch", 1.0)
    row = site.plugin("broken")
    assert reason in row["reason"]
    assert "Traceback" in row["error"]
    assert not row["ok"]


def test_attribute_that_the_module_lacks_is_a_failure_of_import(site, toyop, qkv):
    site.install("broken", GOOD, value="plugin_broken:Nothing")
    assert quietly(toyop, *qkv) == ("torch", 1.0)
    assert "Nothing" in site.plugin("broken")["reason"]


def test_current_api_version_is_accepted(site, toyop, qkv):
    site.install("good", GOOD + f"\napi_version = {backends.API_VERSION}")
    assert toyop(*qkv) == ("good", 1.0)


def test_keyboard_interrupt_in_a_plugin_reaches_the_user_and_it_is_tried_again(site, toyop, qkv, tmp_path):
    flag = tmp_path / "flag"
    site.install("good", f"import os\nif not os.path.exists({str(flag)!r}): raise KeyboardInterrupt\n" + GOOD)
    with pytest.raises(KeyboardInterrupt):
        toyop(*qkv)
    flag.touch()
    assert toyop(*qkv) == ("good", 1.0)


def test_warning_turned_into_an_error_leaves_the_others_loaded(site, toyop, qkv):
    site.install("broken", "raise ImportError('x')")
    site.install("good", GOOD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning):
            toyop(*qkv)
        assert toyop(*qkv) == ("good", 1.0)


def test_two_plugins_of_one_type_are_an_error_naming_both_distributions(site, toyop, qkv):
    site.install("one", GOOD)
    site.install("two", GOOD)
    assert quietly(toyop, *qkv) == ("good", 1.0)
    assert site.plugin("one")["ok"]
    reason = site.plugin("two")["reason"]
    assert "fla-backend-one" in reason
    assert "fla-backend-two" in reason


@pytest.mark.parametrize("overrider", ["one", "two"])
def test_plugin_that_overrides_wins_in_either_order(site, toyop, qkv, overrider):
    for name in ("one", "two"):
        source = GOOD.replace('("good", scale)', f'"{name}"')
        if name == overrider:
            source = source.replace("Good())", "Good(), override=True)")
        site.install(name, source)
    assert toyop(*qkv) == overrider
    assert site.plugin("one")["error"] is site.plugin("two")["error"] is None


def test_order_does_not_depend_on_sys_path(site, toyop, qkv, tmp_path):
    folders = []
    for name in ("delta", "alpha", "charlie", "bravo"):
        folder = tmp_path / name
        folder.mkdir()
        folders.append(str(folder))
        site.install(name, GOOD.replace('"good"', f'"{name}"'), folder=folder)
    original = list(sys.path)
    seen = set()
    try:
        for seed in range(8):
            random.Random(seed).shuffle(folders)
            sys.path[:] = folders + original
            refresh()
            assert toyop(*qkv)[0] == "alpha"
            seen.add((tuple(DISCOVERY.plugins), tuple(r.name for r in REGISTRY.of("toyop"))))
    finally:
        sys.path[:] = original
    assert len(seen) == 1


def test_refresh_finds_what_was_installed_since_and_drops_what_is_gone(site, toyop, qkv):
    assert toyop(*qkv) == ("torch", 1.0)
    module = site.install("good", GOOD)
    assert toyop(*qkv) == ("torch", 1.0)
    refresh()
    assert toyop(*qkv) == ("good", 1.0)

    class Mine(BaseBackend):
        backend_type = "mine"
        priority = 9

        def toy(self, q, k, v):
            return "mine"

    register("toyop", Mine())
    for path in (module.parent / "fla_backend_good-1.0.dist-info").iterdir():
        path.unlink()
    (module.parent / "fla_backend_good-1.0.dist-info").rmdir()
    refresh()
    assert toyop(*qkv) == "mine"  # a registration at run time stays


def test_plugin_may_call_an_op_while_it_is_loaded(site, toyop, qkv):
    site.install(
        "good",
        "import torch\nfrom fla.backends.registry import REGISTRY\nx = torch.zeros(1, 1, 1, 8)\n"
        "fn = REGISTRY.ops('toyop')[0]\nresult = fn.run((x, x, x, 1.0, None, False))\n" + GOOD,
    )
    assert toyop(*qkv) == ("good", 1.0)
    assert sys.modules["plugin_good"].result == ("torch", 1.0)


def test_two_threads_making_the_first_call_at_once(site, toyop, qkv, tmp_path):
    log = tmp_path / "imports"
    site.install("slow", f"import time\nopen({str(log)!r}, 'a').write('x')\ntime.sleep(0.2)\n" + GOOD)
    barrier = threading.Barrier(4)
    results = []

    def call():
        barrier.wait()
        results.append(toyop(*qkv))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [("good", 1.0)] * 4
    assert log.read_text() == "x"


def test_builtin_is_loaded_by_the_same_hook_and_not_hidden_by_an_allow_list(site, toyop, qkv, monkeypatch):
    (site.folder / "plugin_builtin.py").write_text(GOOD)
    site.install("other", GOOD.replace('"good"', '"other"'))
    add_builtin("plugin_builtin")
    try:
        monkeypatch.setenv("FLA_PLUGINS", "nothing-else")
        assert quietly(toyop, *qkv) == ("good", 1.0)
        assert site.plugin("plugin_builtin")["builtin"]
        assert site.plugin("other")["state"] == "blocked"
    finally:
        DISCOVERY._builtins.remove("plugin_builtin")


# Blocking: what is kept out is never imported


@pytest.fixture
def marked(site, tmp_path):
    """A plugin whose module writes a file when it is imported."""
    mark = tmp_path / "imported"
    site.install("good", f"open({str(mark)!r}, 'w').close()\n" + GOOD)
    return mark


@pytest.mark.parametrize(
    "value", ["-good", "tilelang", "-fla-backend-good", "-FLA_Backend.Good", "good,-good", "-Good , "]
)
def test_blocked_plugin_is_never_imported(site, toyop, qkv, marked, monkeypatch, value):
    monkeypatch.setenv("FLA_PLUGINS", value)
    assert quietly(toyop, *qkv) == ("torch", 1.0)
    quietly(list_plugins)
    quietly(explain, toyop, *qkv)
    quietly(report)
    assert not marked.exists()
    row = site.plugin("good")
    assert row["state"] == "blocked"
    assert "FLA_PLUGINS=" in row["reason"]


def test_plugin_is_imported_when_the_list_lets_it_in_and_left_out_when_it_does_not(
    site, toyop, qkv, marked, monkeypatch
):
    monkeypatch.setenv("FLA_PLUGINS", "-good")
    assert toyop(*qkv) == ("torch", 1.0)
    monkeypatch.setenv("FLA_PLUGINS", "good")
    assert toyop(*qkv) == ("good", 1.0)
    assert marked.exists()
    monkeypatch.setenv("FLA_PLUGINS", "-good")
    assert toyop(*qkv) == ("torch", 1.0)
    assert explain(toyop, *qkv).verdict("good").code == "disabled"
    monkeypatch.delenv("FLA_PLUGINS")
    assert toyop(*qkv) == ("good", 1.0)


@pytest.mark.parametrize("way", ["variable", "pin", "context"])
def test_what_is_stronger_than_the_list_lets_a_plugin_in(site, toyop, qkv, marked, monkeypatch, way):
    monkeypatch.setenv("FLA_PLUGINS", "-good")
    assert toyop(*qkv) == ("torch", 1.0)
    if way == "variable":
        monkeypatch.setenv("FLA_GOOD", "1")
        assert toyop(*qkv) == ("good", 1.0)
    elif way == "pin":
        with backends.use_backend("good", strict=True):
            assert toyop(*qkv) == ("good", 1.0)
        assert toyop(*qkv) == ("torch", 1.0)
    else:
        with settings.override(FLA_PLUGINS="good"):
            assert toyop(*qkv) == ("good", 1.0)
        assert toyop(*qkv) == ("torch", 1.0)


def test_master_switch_and_reference_import_no_plugin(site, toyop, qkv, marked, monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert toyop(*qkv) == ("torch", 1.0)
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH")
    with backends.reference_only():
        assert toyop(*qkv) == ("torch", 1.0)
    with backends.use_backend("torch"):
        assert toyop(*qkv) == ("torch", 1.0)
    assert not marked.exists()
    assert toyop(*qkv) == ("good", 1.0)


def test_unknown_plugin_name_warns_once_with_the_nearest(site, toyop, qkv, monkeypatch):
    site.install("good", GOOD)
    monkeypatch.setenv("FLA_PLUGINS", "godo,good")
    with pytest.warns(UserWarning, match="FLA_PLUGINS names 'godo'.*did you mean good"):
        assert toyop(*qkv) == ("good", 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("FLA_PLUGINS", "good,godo")
        toyop(*qkv)


def test_variable_of_a_plugin_is_known_once_it_is_registered(site, toyop, qkv, monkeypatch):
    site.install("good", GOOD)
    monkeypatch.setenv("FLA_GOOD", "0")
    monkeypatch.setenv("FLA_GOOOD", "0")
    with pytest.warns(UserWarning, match="FLA_GOOOD.*did you mean FLA_GOOD"):
        assert toyop(*qkv) == ("torch", 1.0)
    assert settings.get("FLA_GOOD") is False
    assert any(row["name"] == "FLA_GOOD" and row["owner"] == "good" for row in settings.describe())


# Other processes

CHILD = """
import sys, torch
from fla.backends import CallFacts, dispatch
@dispatch("toyop", facts=CallFacts())
def toy(q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
    return ("torch", scale)
x = torch.zeros(1, 1, 1, 8)
"""


def child_environment(folder, **env):
    path = os.pathsep.join(filter(None, [str(folder), os.getcwd(), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **env}


def run_child(site, code, **env):
    full = child_environment(site.folder, **env)
    return subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True, timeout=120)


def test_switches_work_in_a_process_of_their_own(site):
    site.install("good", GOOD)
    code = CHILD + "import os\nprint(toy(x, x, x)[0]); os.environ['FLA_GOOD'] = 'off'; print(toy(x, x, x)[0])"
    done = run_child(site, code)
    assert done.stdout.split() == ["good", "torch"], done.stderr
    done = run_child(site, code, FLA_DISABLE_BACKEND_DISPATCH="1")
    assert done.stdout.split() == ["torch", "torch"], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_worker(site, toyop, qkv):
    site.install("good", GOOD)
    read, write = os.pipe()
    # Another thread holds the lock while the process forks: the child must not wait for it.
    held, release = threading.Event(), threading.Event()

    def hold():
        with DISCOVERY.lock, REGISTRY.lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, repr(toyop(*qkv)).encode())
        finally:
            os._exit(0)
    release.set()
    thread.join()
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"('good', 1.0)"
    assert toyop(*qkv) == ("good", 1.0)


def test_spawned_worker(site):
    site.install("good", GOOD)
    script = site.folder / "spawn_main.py"
    script.write_text(
        "import multiprocessing as mp\n"
        "def work(_):\n" + textwrap.indent(CHILD, "    ") + "    return toy(x, x, x)\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(work, [0])[0])\n"
    )
    env = child_environment(site.folder)
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "('good', 1.0)", done.stderr


def test_import_of_fla_scans_nothing_and_brings_no_torch_or_triton(site):
    site.install("good", "open('/dev/null').close()\n" + GOOD)
    code = """
import sys
import importlib.metadata
import importlib_metadata
def refuse(*a, **k): raise AssertionError("entry points were scanned")
importlib.metadata.entry_points = importlib_metadata.entry_points = refuse
before = set(sys.modules)
import fla, fla.settings
assert "torch" not in sys.modules
import fla.backends, fla.ops.backends
heavy = {"torch", "triton", "transformers", "numpy", "plugin_good"} & set(sys.modules)
assert not heavy, heavy
print("clean")
"""
    done = run_child(site, code)
    assert done.stdout.strip() == "clean", done.stderr


def test_first_calls_import_neither_triton_nor_a_plugins_package(site):
    site.install("good", GOOD.replace("    def toy", "    package_name = 'plugin_kernels'\n    def toy"))
    (site.folder / "plugin_kernels.py").write_text("raise ImportError('never import to find out')")
    code = CHILD + "r = toy(x, x, x)\nassert not {'triton', 'plugin_kernels'} & set(sys.modules)\nprint(r[0])"
    done = run_child(site, code)
    assert done.stdout.strip() == "good", done.stderr
