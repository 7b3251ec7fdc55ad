# SPDX-License-Identifier: MIT
"""The public wrapper: one signature, one binding, the forms of 0.6.0."""

from __future__ import annotations

import inspect
import traceback
import typing

import pytest
import torch

from fla.backends import BackendRegistry, BackendUnavailable, BaseBackend, dispatch, last_decision, register

from .conftest import make_toy


def test_wrapper_has_the_ops_name_doc_signature_and_annotations(toy):
    fn, _ = toy
    assert fn.__name__ == "toy"
    assert fn.__doc__ == "Says who ran."
    assert list(inspect.signature(fn).parameters) == ["q", "k", "v", "scale", "cu_seqlens", "state_v_first"]
    assert inspect.signature(fn).parameters["scale"].default == 1.0
    assert typing.get_type_hints(fn)["q"] is torch.Tensor
    assert not hasattr(fn, "__wrapped__")


def test_core_runs_without_backends(toy, qkv):
    fn, operation = toy
    assert fn(*qkv, 2.0) == ("torch", 2.0)
    decision = last_decision()
    assert (decision.operation, decision.function, decision.backend, decision.core) == (operation, "toy", "torch", True)


def test_unknown_keyword_raises_type_error(toy, qkv):
    with pytest.raises(TypeError, match="bogus"):
        toy[0](*qkv, bogus=1)


def test_missing_argument_raises_type_error_naming_the_op(toy, qkv):
    with pytest.raises(TypeError, match=r"toy\(\) missing 1 required positional argument: 'v'"):
        toy[0](*qkv[:2])


def test_positional_and_keyword_calls_are_the_same_call_to_a_backend(toy, qkv):
    fn, operation = toy
    seen = []

    class Shuffled(BaseBackend):
        """Takes the parameters in another order, some by keyword only, and one not at all."""

        backend_type = "shuffled"

        def toy(self, v, k, q, *, state_v_first, cu_seqlens=None, scale=1.0):
            seen.append((q, k, v, scale, cu_seqlens, state_v_first))
            return "shuffled"

        def toy_verifier(self, q, *rest, **kwargs):
            seen.append((q, *rest, *kwargs.values()))
            return True

    register(operation, Shuffled())
    q, k, v = qkv
    cu = torch.tensor([0, 4])
    calls = [
        lambda: fn(q, k, v, 0.5, cu, True),
        lambda: fn(state_v_first=True, cu_seqlens=cu, scale=0.5, v=v, k=k, q=q),
        lambda: fn(q, k, state_v_first=True, cu_seqlens=cu, scale=0.5, v=v),
    ]
    for call in calls:
        seen.clear()
        assert call() == "shuffled"
        assert len(seen) == 2
        for got in seen:
            assert [id(x) for x in got[:3]] == [id(q), id(k), id(v)]
            assert got[3] == 0.5
            assert got[4] is cu
            assert got[5] is True


def test_validation_comes_first_and_gets_every_argument_in_order(qkv):
    seen = []

    def check(q, k, v, scale, cu_seqlens, state_v_first):
        seen.append((scale, cu_seqlens, state_v_first))
        if scale < 0:
            raise ValueError("scale must not be negative")

    fn, operation = make_toy(validate=check)

    class Never(BaseBackend):
        backend_type = "never"

        def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
            seen.append("ran")
            return "never"

    register(operation, Never())
    with pytest.raises(ValueError, match="scale"):
        fn(*qkv, scale=-1.0)
    assert seen == [(-1.0, None, False)]


@pytest.fixture
def renamed(qkv):
    return make_toy(renamed={"transpose_state_layout": "state_v_first"}, removed={"head_first": "head_first is gone"})[
        0
    ]


def test_renamed_keyword_warns_and_means_the_new_one(renamed, qkv):
    seen = []

    class Sees(BaseBackend):
        backend_type = "sees"

        def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
            seen.append(state_v_first)

    register(renamed, Sees())
    with pytest.warns(DeprecationWarning, match="transpose_state_layout is called state_v_first now"):
        renamed(*qkv, transpose_state_layout=True)
    renamed(*qkv, transpose_state_layout=False)
    renamed(*qkv, transpose_state_layout=None, state_v_first=True)
    assert seen == [True, False, True]


def test_both_spellings_of_a_renamed_keyword_raise(renamed, qkv):
    with pytest.raises(ValueError, match=r"state_v_first.*transpose_state_layout"):
        renamed(*qkv, state_v_first=True, transpose_state_layout=True)


def test_removed_keyword_raises_whatever_its_value(renamed, qkv):
    for value in (True, False, None):
        with pytest.raises(DeprecationWarning, match="head_first is gone"):
            renamed(*qkv, head_first=value)


def test_exception_of_the_body_reads_well():
    @dispatch("readable")
    def fails(x):
        raise ZeroDivisionError("in the body")

    try:
        fails(1)
    except ZeroDivisionError as error:
        text = "".join(traceback.format_exception(error))
    assert "_fla_core(x)" in text
    assert "fla dispatch readable.fails" in text


def test_body_is_not_replaced_when_it_raises(toy, qkv):
    @dispatch("plain_failure")
    def fails(q):
        raise RuntimeError("core fault")

    with pytest.raises(RuntimeError, match="core fault"):
        fails(qkv[0])


def test_triton_path_must_be_module_and_function():
    with pytest.raises(ValueError, match="module:function"):
        make_toy(triton="fla.nowhere")


# Forms of the 0.6.0 series


def test_bare_dispatch_has_a_registry_of_its_own(qkv):
    @dispatch
    def lonely(q, scale=1.0):
        return "torch"

    @dispatch
    def other(q, scale=1.0):
        return "torch"

    @register(lonely, env_var="FLA_LONELY")
    def fast(q, scale=1.0):
        return "fast"

    assert callable(fast)
    assert lonely(qkv[0]) == "fast"
    assert other(qkv[0]) == "torch"


def test_register_decorates_a_function_with_base_verifier_and_variable(toy, qkv, monkeypatch):
    fn, _ = toy

    class Base(BaseBackend):
        backend_type = "decorated"

    def check(q, k, v, scale=1.0, **kwargs):
        return scale == 1.0, "scale must be 1"

    @register(fn, backend=Base, verifier=check, env_var="FLA_DECORATED")
    def fast(q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
        return "fast"

    assert fn(*qkv) == "fast"
    assert last_decision().backend == "decorated"
    assert fn(*qkv, 2.0) == ("torch", 2.0)
    monkeypatch.setenv("FLA_DECORATED", "0")
    assert fn(*qkv) == ("torch", 1.0)


def test_register_decorates_a_class_for_an_operation_or_a_function(toy, qkv):
    fn, operation = toy

    @register(fn)
    class One(BaseBackend):
        backend_type = "one"
        priority = 2

        def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
            return "one"

    @register(operation)
    class Two(One):
        backend_type = "two"
        priority = 1

        def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
            return "two"

    assert isinstance(One, type)
    assert fn(*qkv) == "two"
    assert [b.backend_type for b in BackendRegistry(operation).backends] == ["two", "one"]


def test_register_refuses_a_class_of_another_type_and_a_function_never_dispatched(toy):
    fn, operation = toy

    class Base(BaseBackend):
        backend_type = "base_type"

    with pytest.raises(ValueError, match=r"other.*base_type"):

        @register(fn, backend=Base)
        class Other(BaseBackend):
            backend_type = "other"

    with pytest.raises(KeyError, match="never dispatched"):
        register(len)
    assert BackendRegistry(operation).backends == ()


def test_two_functions_without_a_base_do_not_replace_each_other(toy, qkv):
    fn, operation = toy

    @register(fn)
    def first(q, k, v, scale=1.0):
        return "first"

    @register(fn)
    def second(q, k, v, scale=1.0):
        return "second"

    assert len(BackendRegistry(operation).backends) == 2
    assert fn(*qkv) == "first"


def test_function_registered_for_an_operation_serves_its_namesake_only(qkv):
    @dispatch("two_functions")
    def first(q, scale=1.0):
        return "torch"

    @dispatch("two_functions")
    def second(q, scale=1.0):
        return "torch"

    @dispatch("two_functions")
    def third(q, other=1.0):
        return "torch"

    def replacement(q, scale=1.0):
        return "replaced"

    replacement.__name__ = "second"
    register("two_functions")(replacement)
    assert [f(qkv[0]) for f in (first, second, third)] == ["torch", "replaced", "torch"]
    BackendRegistry("two_functions").unregister(BackendRegistry("two_functions").backends[0])
    replacement.__name__ = "anything"
    register("two_functions")(replacement)
    assert [f(qkv[0]) for f in (first, second, third)] == ["replaced", "replaced", "torch"]


def test_registry_view_registers_and_unregisters_at_once(toy, qkv):
    fn, operation = toy

    class Mine(BaseBackend):
        backend_type = "mine"

        def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
            return "mine"

        def toy_verifier(self, *args, **kwargs):
            return False, "never"

    BackendRegistry(operation).register(Mine())
    assert BackendRegistry(operation).get_active().backend_type == "mine"
    assert fn(*qkv) == ("torch", 1.0)
    BackendRegistry(operation).unregister("mine")
    assert BackendRegistry(operation).get_active() is None
    with pytest.raises(KeyError):
        BackendRegistry(operation).unregister("mine")


def test_backend_with_its_own_verify_is_asked(toy, qkv):
    fn, operation = toy

    class Old(BaseBackend):
        backend_type = "old"

        def verify(self, func_name, *args, **kwargs):
            return args[3] == 2.0, f"{func_name} wants 2"

        def toy(self, q, k, v, scale=1.0, cu_seqlens=None, state_v_first=False):
            return "old"

    register(operation, Old())
    assert fn(*qkv) == ("torch", 1.0)
    assert fn(*qkv, scale=2.0) == "old"


def test_open_signatures_can_be_dispatched(qkv):
    @dispatch
    def open_op(q, *rest, flag=False, **options):
        return ("torch", rest, flag, options)

    assert open_op(qkv[0], 1, 2, flag=True, extra=3) == ("torch", (1, 2), True, {"extra": 3})

    @register(open_op)
    def mine(q, *rest, flag=False, **options):
        return ("mine", rest, flag, options)

    assert open_op(qkv[0], 1, flag=True, extra=3) == ("mine", (1,), True, {"extra": 3})


def test_names_import_from_the_old_path():
    from fla.ops.backends import BackendRegistry as B
    from fla.ops.backends import BaseBackend, dispatch, register

    assert B is BackendRegistry
    assert callable(dispatch)
    assert callable(register)
    assert BaseBackend(env_var="FLA_X").env_var == "FLA_X"
    assert issubclass(BackendUnavailable, RuntimeError)
