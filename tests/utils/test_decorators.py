# SPDX-License-Identifier: MIT
"""`input_guard`, `contiguous`, `checkpoint`, autocast, deprecated keywords, version requirements."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import fla
from fla.utils import (
    Action,
    autocast_custom_bwd,
    autocast_custom_fwd,
    checkpoint,
    contiguous,
    decorators,
    deprecate_kwarg,
    input_guard,
    require_version,
)


def strided():
    return torch.arange(6.0).view(2, 3).t()


def layouts(a, b=None, *, c=None, rest=None):
    return [t.is_contiguous() for t in (a, b, c) if t is not None]


def test_tensors_arrive_contiguous_by_place_and_by_name():
    x = strided()
    assert layouts(x, x, c=x) == [False] * 3
    for guarded in (input_guard(layouts), input_guard()(layouts), contiguous(layouts)):
        assert guarded(x, x, c=x) == [True] * 3
        assert guarded.__name__ == "layouts"
    assert not x.is_contiguous()


@pytest.mark.parametrize(
    ("skip", "expected"), [(True, [False] * 3), (["b", "c"], [True, False, False]), ("a", [False, True, True])]
)
def test_named_parameters_keep_their_layout(skip, expected):
    guarded = input_guard(no_guard_contiguous=skip)(layouts)
    x = strided()
    assert guarded(x, x, c=x) == expected
    assert guarded(x, b=x, c=x) == expected


def test_unknown_name_in_the_skip_list_is_refused():
    with pytest.raises(ValueError, match="no_guard_contiguous names d; parameters are a, b, c, rest"):
        input_guard(no_guard_contiguous=["d"])(layouts)


def test_tensors_in_lists_pass_as_they_are():
    x = strided()
    assert not input_guard(lambda xs: xs[0].is_contiguous())([x])


def test_device_of_the_first_tensor_is_current(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def enter(tensor):
        entered.append(tensor)
        yield

    monkeypatch.setattr(decorators, "_device_of", enter)
    x, y = torch.ones(1), torch.ones(2)
    guarded = input_guard(lambda a=None, b=None, c=None: None)
    guarded(1, x, c=y)
    guarded(1, c=y)
    guarded(1)
    assert [t if t is None else t.numel() for t in entered] == [1, 2, None]


def test_cpu_and_meta_tensors_switch_no_device():
    for x in (torch.ones(1), torch.ones(1, device="meta"), None):
        assert isinstance(decorators._device_of(x), contextlib.nullcontext)


def test_guarded_function_compiles_without_a_break():
    guarded = input_guard(lambda x: x * 2)
    x = strided()
    assert torch.equal(torch.compile(guarded, fullgraph=True, backend="eager")(x), x * 2)


def test_checkpoint_computes_twice_and_gives_the_same_gradient():
    runs = []

    @checkpoint
    def f(x, *, power):
        runs.append(1)
        return x.pow(power).sin()

    x = torch.randn(3, requires_grad=True)
    f(x, power=2).sum().backward()
    assert len(runs) == 2
    torch.testing.assert_close(x.grad, x.detach().pow(2).cos() * 2 * x.detach())


def test_autocast_decorators_cast_inputs_of_this_device():
    class Double(torch.autograd.Function):
        @staticmethod
        @autocast_custom_fwd(cast_inputs=torch.float32)
        def forward(ctx, x):
            assert x.dtype == torch.float32
            return x * 2

        @staticmethod
        @autocast_custom_bwd
        def backward(ctx, g):
            return g * 2

    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    if fla.utils.device != "cpu":
        pytest.skip("the tensor is on the CPU")
    with torch.autocast("cpu", torch.bfloat16):
        Double.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2]


# Deprecated keywords


def renamed(version="99", **flags):
    @deprecate_kwarg("old", version, new_name="new", **flags)
    def f(x, new=0, **kwargs):
        return new, kwargs

    return f


def silent(f, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return f(*args, **kwargs)


def test_old_keyword_moves_to_the_new_one_and_warns():
    f = renamed()
    with pytest.warns(FutureWarning, match="f: `old` will be removed in version 99; use `new`"):
        assert f(1, old=5) == (5, {})
    assert silent(f, 1, new=5) == (5, {})


@pytest.mark.parametrize("call", [lambda f: f(1, old=5, new=6), lambda f: f(1, 6, old=5)], ids=["keyword", "place"])
def test_both_names_the_new_one_counts_or_it_is_an_error(call):
    with pytest.warns(FutureWarning, match="both it and `new` are given"):
        assert call(renamed()) == (6, {})
    with pytest.warns(FutureWarning, match="both"):
        assert call(renamed("0.1")) == (6, {})
    with pytest.raises(ValueError, match="both `old` and `new` are given"):
        call(renamed(raise_if_both_names=True))


def test_past_the_version_it_is_silent_unless_asked():
    assert silent(renamed("0.1"), 1, old=5) == (5, {})
    with pytest.warns(FutureWarning, match=r"was removed in version 0\.1"):
        assert renamed("0.1", warn_if_greater_or_equal_version=True)(1, old=5) == (5, {})
    with pytest.raises(ValueError, match="was removed"):
        renamed("0.1", raise_if_greater_or_equal_version=True)(1, old=5)


def test_keyword_without_successor_is_passed_on_with_the_message():
    @deprecate_kwarg("old", "99", additional_message="It did nothing.")
    def f(old=None):
        return old

    with pytest.warns(FutureWarning, match=r"version 99\. It did nothing\."):
        assert f(old=3) == 3
    assert {a.value for a in Action} == {"none", "notify", "notify_always", "raise"}


# Requirements


def test_requirement_that_is_met_lets_the_call_through_contiguous():
    f = require_version("torch>=2.7", "hint")(lambda x: x.is_contiguous())
    assert f(strided())
    assert require_version("python>=3.8", "")(lambda: 1)() == 1


@pytest.mark.parametrize("spec", ["torch>=99", "no-such-distribution"])
def test_requirement_that_is_not_met_says_what_to_do(spec):
    f = require_version(spec, "pip install it")(lambda: 1)
    with pytest.raises(ImportError, match=f"{spec} is required.*pip install it"):
        f()


def test_malformed_requirement_fails_when_decorating():
    with pytest.raises(ValueError, match="version must be a requirement"):
        require_version(">=3", "")
