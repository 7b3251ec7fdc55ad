# SPDX-License-Identifier: MIT
"""Who decides: contexts, settings, variables, lists, defaults; pins; the core by itself."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fla import settings
from fla.backends import (
    BackendRegistry,
    BackendUnavailable,
    BaseBackend,
    devices,
    explain,
    last_decision,
    reference_only,
    register,
    use_backend,
)

from .conftest import make_toy


def backend(name, **attributes):
    def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        return name

    return type(name, (BaseBackend,), {"backend_type": name, "toy": toy, **attributes})()


@pytest.fixture
def mine(toy):
    """An op with one backend that has a variable."""
    fn, operation = toy
    register(operation, backend("mine", env_var="FLA_MINE"))
    return fn


@pytest.mark.parametrize("word", ["0", "false", "No", "OFF", " off "])
def test_variable_turns_a_backend_off_and_on_again_mid_process(mine, qkv, monkeypatch, word):
    assert mine(*qkv) == "mine"
    monkeypatch.setenv("FLA_MINE", word)
    assert mine(*qkv) == ("torch", 1.0)
    assert explain(mine, *qkv).verdict("mine").code == "disabled"
    monkeypatch.setenv("FLA_MINE", "1")
    assert mine(*qkv) == "mine"
    monkeypatch.delenv("FLA_MINE")
    assert mine(*qkv) == "mine"


def test_value_outside_the_grammar_counts_as_unset(mine, qkv, monkeypatch):
    monkeypatch.setenv("FLA_MINE", "nope")
    with pytest.warns(UserWarning, match="FLA_MINE must be one of 0/1/true/false/yes/no/on/off, got 'nope'"):
        assert mine(*qkv) == "mine"


def test_backend_that_is_off_by_default_is_turned_on_by_its_variable(toy, qkv, monkeypatch):
    fn, operation = toy
    register(operation, backend("shy", env_var="FLA_SHY", default_enable=False))
    assert fn(*qkv) == ("torch", 1.0)
    assert last_decision().rejections[0].reason == "off by default; turn it on with FLA_SHY=1"
    monkeypatch.setenv("FLA_SHY", "yes")
    assert fn(*qkv) == "shy"


def test_context_beats_python_beats_environment(mine, qkv, monkeypatch):
    monkeypatch.setenv("FLA_MINE", "0")
    settings.set("FLA_MINE", True)
    assert mine(*qkv) == "mine"
    with settings.override(FLA_MINE=False):
        assert mine(*qkv) == ("torch", 1.0)
        with use_backend("mine"):
            assert mine(*qkv) == "mine"
    settings.set("FLA_MINE", None)
    assert mine(*qkv) == ("torch", 1.0)


def test_own_is_enabled_is_asked_where_nobody_chose(toy, qkv, monkeypatch):
    fn, operation = toy
    register(operation, backend("picky", env_var="FLA_PICKY", is_enabled=lambda self: False))
    assert fn(*qkv) == ("torch", 1.0)
    monkeypatch.setenv("FLA_PICKY", "1")
    assert fn(*qkv) == "picky"


def test_registration_at_run_time_is_not_hidden_by_the_plugin_list(mine, qkv, monkeypatch):
    monkeypatch.setenv("FLA_PLUGINS", "-somebody")
    with pytest.warns(UserWarning, match="somebody"):
        assert mine(*qkv) == "mine"


def test_master_switch_is_read_at_each_call(mine, qkv, monkeypatch):
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert mine(*qkv) == ("torch", 1.0)
    assert last_decision().rejections == ()
    assert explain(mine, *qkv).verdict("mine").code == "disabled"
    with use_backend("mine"):
        assert mine(*qkv) == ("torch", 1.0)
    with (
        use_backend("mine", strict=True),
        pytest.raises(BackendUnavailable, match="FLA_DISABLE_BACKEND_DISPATCH is on"),
    ):
        mine(*qkv)
    with use_backend("torch", strict=True):
        assert mine(*qkv) == ("torch", 1.0)
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "0")
    assert mine(*qkv) == "mine"


# Pins


def test_pin_goes_before_priority_and_falls_through_when_it_is_soft(toy, qkv):
    fn, operation = toy
    register(operation, backend("first", priority=0))
    register(
        operation, backend("second", priority=9, toy_verifier=lambda self, q, k, v, scale: (scale == 1.0, "scale"))
    )
    assert fn(*qkv) == "first"
    with use_backend("second"):
        assert fn(*qkv) == "second"
        assert fn(*qkv, 2.0) == "first"
    assert fn(*qkv) == "first"


def test_strict_pin_never_runs_anything_else(toy, qkv):
    fn, operation = toy
    register(operation, backend("first", priority=0, toy_verifier=lambda self, *a: pytest.fail("asked")))
    register(operation, backend("second", toy_verifier=lambda self, q, k, v, scale: (scale == 1.0, "scale must be 1")))
    with use_backend("second", strict=True):
        assert fn(*qkv) == "second"
        with pytest.raises(BackendUnavailable, match=r"second is pinned.*scale must be 1") as caught:
            fn(*qkv, 2.0)
        assert [(v.backend, v.code) for v in caught.value.verdicts] == [("second", "unsupported")]
        with pytest.raises(BackendUnavailable):
            fn.op.select((*qkv, 2.0, None, False))
        assert explain(fn, *qkv, 2.0).chosen is None


def test_strict_pin_of_a_backend_that_is_not_registered_or_not_usable(toy, qkv):
    fn, operation = toy
    register(operation, backend("absent", package_name="no_such_module_at_all"))
    with use_backend("absent", strict=True), pytest.raises(BackendUnavailable, match="no_such_module_at_all"):
        fn(*qkv)
    with (
        use_backend("unheard_of", strict=True),
        pytest.raises(BackendUnavailable, match=r"unheard_of.*registered: absent"),
    ):
        fn(*qkv)
    with use_backend("unheard_of"):
        assert fn(*qkv) == ("torch", 1.0)


def test_strict_pin_holds_for_nested_ops(toy, qkv):
    inner, _ = make_toy()
    fn, operation = toy
    register(operation, backend("outer", toy=lambda self, q, k, v: inner(q, k, v)))
    assert fn(*qkv) == ("torch", 1.0)
    with use_backend("outer", strict=True), pytest.raises(BackendUnavailable, match="no backend 'outer' is registered"):
        fn(*qkv)


def test_core_paths_can_be_pinned(mine, qkv):
    with use_backend("torch"):
        assert mine(*qkv) == ("torch", 1.0)
    with use_backend("triton"):
        assert mine(*qkv) == ("torch", 1.0)
    with use_backend("triton", strict=True), pytest.raises(BackendUnavailable, match="no Triton path"):
        mine(*qkv)


def test_cpu_tensors_take_triton_through_a_pin_under_the_interpreter(qkv, monkeypatch):
    fn, _ = make_toy(triton=f"{__name__}:interpreted")
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or type(sys)("x"))
    sys.modules[__name__].interpreted = lambda q, k, v, scale, cu_seqlens, state_v_first: "interpreted"
    monkeypatch.setattr(devices, "has_module", lambda name: True)
    with use_backend("triton", strict=True), pytest.raises(BackendUnavailable, match="no Triton driver for cpu"):
        fn(*qkv)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert fn(*qkv) == ("torch", 1.0)
    with use_backend("triton", strict=True):
        assert fn(*qkv) == "interpreted"
        assert last_decision().backend == "triton"


def test_pin_name_must_be_text():
    with pytest.raises(TypeError, match="name"), use_backend(3):
        pass


def test_pins_do_not_leak_into_other_threads_and_tasks(mine, qkv):
    results = {}

    def elsewhere():
        results["thread"] = mine(*qkv)

    async def task(name, pin):
        with use_backend(pin):
            await asyncio.sleep(0.01)
            results[name] = mine(*qkv)

    async def both():
        await asyncio.gather(task("a", "torch"), task("b", "mine"))

    with use_backend("torch"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    asyncio.run(both())
    assert results == {"thread": "mine", "a": ("torch", 1.0), "b": "mine"}


def test_threads_with_other_contexts_do_not_disturb_each_other(mine, qkv):
    wrong = []

    def work(pin, expected):
        with use_backend(pin):
            for _ in range(300):
                if mine(*qkv) != expected:
                    wrong.append(pin)

    threads = [threading.Thread(target=work, args=a) for a in [("torch", ("torch", 1.0)), ("mine", "mine")] * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_registering_while_other_threads_call_leaves_no_stale_choice(toy, qkv):
    fn, operation = toy
    stop = threading.Event()
    wrong = []

    def call():
        while not stop.is_set():
            result = fn(*qkv)
            if result not in ("late", ("torch", 1.0)):
                wrong.append(result)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        register(operation, backend("late"))
        with_it = fn(*qkv)
        BackendRegistry(operation).unregister("late")
        without = fn(*qkv)
        if (with_it, without) != ("late", ("torch", 1.0)):
            wrong.append((with_it, without))
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_entering_a_pin_again_makes_no_new_plan(mine, qkv):
    for _ in range(3):
        mine(*qkv)
        with use_backend("torch"):
            mine(*qkv)
    assert len(mine.op._plans) == 2


# The core by itself


def test_reference_only_cannot_be_overridden(mine, qkv, monkeypatch):
    monkeypatch.setenv("FLA_MINE", "1")
    monkeypatch.setenv("FLA_BACKEND_STRICT", "1")
    settings.set("FLA_MINE", True)
    with reference_only():
        assert mine(*qkv) == ("torch", 1.0)
        with use_backend("mine"), settings.override(FLA_MINE=True):
            assert mine(*qkv) == ("torch", 1.0)
        with use_backend("mine", strict=True), pytest.raises(BackendUnavailable, match="inside reference_only"):
            mine(*qkv)
        assert explain(mine, *qkv).verdict("mine").reason == "reference_only() is in force"
        assert explain(mine, *qkv).chosen == "torch"
    with use_backend("mine", strict=True):
        assert mine(*qkv) == "mine"
        with reference_only():
            assert mine(*qkv) == ("torch", 1.0)


def test_backend_that_compares_itself_with_core_gets_core(toy, qkv):
    fn, operation = toy

    def toy_(self, q, k, v):
        with reference_only():
            return ("mine", fn(q, k, v))

    register(operation, backend("mine", toy=toy_))
    with use_backend("mine", strict=True):
        assert fn(*qkv) == ("mine", ("torch", 1.0))
