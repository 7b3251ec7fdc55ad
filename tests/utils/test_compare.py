# SPDX-License-Identifier: MIT
"""`assert_close` and the two figures it is made of."""

from __future__ import annotations

import math

import pytest
import torch

from fla.utils import assert_close, get_abs_err, get_err_ratio


def test_figures_are_max_difference_and_rms_ratio():
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert get_abs_err(x, y) == 0.5
    assert get_err_ratio(x, y) == pytest.approx(0.5 / 5)
    assert get_err_ratio(x.to(torch.bfloat16), y) == pytest.approx(0.5 / 5)
    assert get_abs_err(x[:0], y[:0]) == get_err_ratio(x[:0], y[:0]) == 0


def test_small_ratio_or_small_difference_passes():
    x = torch.ones(100)
    assert_close("o", x, x + 1e-3, 5e-3)
    assert_close("o", x.half(), x.double() + 1e-3, 5e-3)
    assert_close("o", x * 0, x * 0 + 5e-7, 1e-9)
    assert_close("o", x * 0, x * 0 + 1e-3, 1e-9, err_atol=1e-2)
    assert_close("o", x[:0], x[:0], 0.0)


def test_ratio_itself_is_not_below_the_ratio():
    x = torch.zeros(4)
    with pytest.raises(AssertionError):
        assert_close("o", x, x + 1e-3, 1e-3 / 1e-8)


def test_miss_names_the_place_and_both_values(monkeypatch):
    for name in ("FLA_CI_ENV", "CI"):  # no environment loosens it
        monkeypatch.setenv(name, "1")
    x = torch.ones(2, 3)
    y = x.clone()
    y[1, 2] = 1.02
    with pytest.raises(AssertionError, match=r"dq: max abs .*first off at \[1, 2\]: 1\.02, the reference has 1$"):
        assert_close("dq", x, y, 5e-3)


def test_miss_warns_only_when_asked():
    x = torch.ones(3)
    with pytest.warns(UserWarning, match="dq: max abs difference"):
        assert_close("dq", x, x * 2, 5e-3, warning=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("warning", [False, True])
@pytest.mark.parametrize("side", ["the reference", "the result", "both"])
def test_values_that_are_not_finite_always_fail(bad, warning, side):
    x = torch.ones(2, 2)
    y = x.clone()
    y[0, 1] = bad
    a, b = (y if side != "the result" else x), (y if side != "the reference" else x)
    who = "the result" if side == "the result" else "the reference"
    with pytest.raises(AssertionError, match=rf"o: {who} is {bad} at \[0, 1\]"):
        assert_close("o", a, b, 1e9, warning, 1e9)


@pytest.mark.parametrize("warning", [False, True])
def test_shapes_that_would_broadcast_fail(warning):
    with pytest.raises(AssertionError, match=r"shape \[1\], the reference has \[3\]"):
        assert_close("o", torch.ones(3), torch.ones(1), 1.0, warning)
