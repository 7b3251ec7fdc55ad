# SPDX-License-Identifier: MIT
"""Shared argument checks: messages, what they let pass, and that they read no values they must not read."""

from __future__ import annotations

import time

import pytest
import torch

from fla import settings
from fla.ops._common import checks
from fla.ops._common.checks import ArgumentError, DtypeError


def test_errors_are_what_callers_catch() -> None:
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentError, AssertionError)
    assert issubclass(DtypeError, TypeError)
    assert issubclass(DtypeError, ArgumentError)


def test_shapes_agree_by_axis_name() -> None:
    q, v, beta = torch.empty(2, 3, 4, 5), torch.empty(2, 3, 8, 6), torch.empty(2, 3, 8)
    sizes = checks.check_shapes(q=(q, "B T H K"), v=(v, "B T HV V"), beta=(beta, "B T HV | B T HV V"), none=(None, "B"))
    assert sizes == {"B": 2, "T": 3, "H": 4, "K": 5, "HV": 8, "V": 6}
    checks.check_shapes(v=(v, "B T HV V"), beta=(v, "B T HV | B T HV V"))
    with pytest.raises(
        ArgumentError, match=r"`v` must have shape \[B, T, HV, V\] with B = 2 from `q`, T = 3 from `q`, got"
    ):
        checks.check_shapes(q=(q, "B T H K"), v=(v[:, :2], "B T HV V"))
    with pytest.raises(
        ArgumentError, match=r"`beta` must have shape \[B, T, HV\] or \[B, T, HV, V\].*got shape \[3, 8\]"
    ):
        checks.check_shapes(v=(v, "B T HV V"), beta=(beta[0], "B T HV | B T HV V"))
    with pytest.raises(ArgumentError, match=r"`q` must have shape \[B, T, H, K\] with B = 3, got shape"):
        checks.check_shapes({"B": 3}, q=(q, "B T H K"))
    with pytest.raises(DtypeError, match="`q` must be a tensor, got list"):
        checks.check_shapes(q=([1], "B"))


def test_dtypes() -> None:
    half, single = torch.empty(1, dtype=torch.half), torch.empty(1)
    assert checks.check_same_dtype(q=half, k=half) == torch.half
    with pytest.raises(DtypeError, match=r"`q`, `k` must share one .*, got q torch\.float16, k torch\.float32"):
        checks.check_same_dtype(q=half, k=single)
    for dtype in (torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(DtypeError, match="must be float16, bfloat16, float32 or float64"):
            checks.check_floating(g=torch.empty(1, dtype=dtype))
    checks.check_floating(g=None, beta=half, state=torch.empty(1, dtype=torch.float64))


def test_heads() -> None:
    for H, HV in ((1, 1), (2, 6), (0, 0)):
        checks.check_heads(H, HV)
    for H, HV in ((2, 3), (4, 2), (0, 1)):
        with pytest.raises(ArgumentError, match="multiple of the number of query heads"):
            checks.check_heads(H, HV)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_count_sequences(dtype) -> None:
    assert checks.check_varlen(None, None, 3, 10) == 3
    cu = torch.tensor([0, 0, 4, 10], dtype=dtype)
    assert checks.check_varlen(cu, cu.long(), 1, 10, torch.empty(3, 1)) == 3
    assert checks.check_varlen(torch.tensor([0, 0]), None, 1, 0) == 1
    assert checks.check_varlen(cu, None, 1, 12, allow_uncovered=True) == 3
    with pytest.raises(ArgumentError, match="must end at the number of tokens, T = 9, got 10"):
        checks.check_varlen(cu, None, 1, 9, allow_uncovered=True)
    with pytest.raises(
        ArgumentError, match="The number of initial states is expected to be equal to the number of sequences, 3"
    ):
        checks.check_varlen(cu, None, 1, 10, torch.empty(2, 1))


def test_offsets_kept_in_a_module_are_read_too() -> None:
    kept = torch.nn.Parameter(torch.tensor([0, 11]), requires_grad=False)
    with pytest.raises(ArgumentError, match="must end at the number of tokens, T = 10, got 11"):
        checks.check_varlen(kept, None, 1, 10)


def test_values_are_not_read_where_they_cannot_be() -> None:
    bad = torch.tensor([5, 1], device="meta", dtype=torch.int64)
    assert checks.check_varlen(bad, None, 1, 10) == 1
    with pytest.raises(ArgumentError, match="`cu_seqlens_cpu` must start at 0"):
        checks.check_varlen(bad, torch.tensor([5, 1]), 1, 10)


def test_values_are_not_read_while_tracing() -> None:
    def count(cu):
        return cu * checks.check_varlen(cu, None, 1, 10)

    good = torch.tensor([0, 4, 10])
    assert torch.equal(torch.compile(count, fullgraph=True, backend="eager")(good), good * 2)


def test_the_switch_that_reads_device_values_is_known() -> None:
    assert settings.get("FLA_CHECK_INPUTS") in (False, True)


def test_state_layouts() -> None:
    checks.check_state("initial_state", None, 2, 3, 4, 5)
    checks.check_state("initial_state", torch.empty(2, 3, 4, 5, dtype=torch.bfloat16), 2, 3, 4, 5)
    checks.check_state("initial_state", torch.empty(2, 3, 5, 4), 2, 3, 4, 5, state_v_first=True)
    with pytest.raises(
        ArgumentError, match=r"= \[2, 3, 4, 5\], got \[2, 3, 5, 4\]\. This looks like .* state_v_first=True"
    ):
        checks.check_state("initial_state", torch.empty(2, 3, 5, 4), 2, 3, 4, 5)
    with pytest.raises(ArgumentError, match=r"`h0` must have shape .* got \[2, 3, 4\]\.$"):
        checks.check_state("h0", torch.empty(2, 3, 4), 2, 3, 4, 5)


def test_choices() -> None:
    for value in (16, 32, 64):
        checks.check_chunk_size(value, (16, 32, 64))
    with pytest.raises(ArgumentError, match=r"^`chunk_size` must be 16, 32 or 64, got 48\.$"):
        checks.check_chunk_size(48, (16, 32, 64))
    with pytest.raises(ArgumentError, match=r"^`chunk_size` must be either 32 or 64, got 16\.$"):
        checks.check_chunk_size(16, (32, 64))
    with pytest.raises(ArgumentError, match=r"^`chunk_size` must be 64, got 16\.$"):
        checks.check_chunk_size(16, (64,))
    for wrong in (True, 64.0, "64"):
        with pytest.raises(DtypeError, match="must be an int"):
            checks.check_chunk_size(wrong, (32, 64))


def test_a_decoding_call_pays_little() -> None:
    q, v, g, beta = torch.empty(1, 1, 4, 64), torch.empty(1, 1, 4, 64), torch.empty(1, 1, 4, 64), torch.empty(1, 1, 4)
    state = torch.empty(1, 4, 64, 64)

    def check() -> None:
        sizes = checks.check_shapes(
            q=(q, "B T H K"), k=(q, "B T H K"), v=(v, "B T HV V"), g=(g, "B T HV K"), beta=(beta, "B T HV | B T HV V")
        )
        checks.check_same_dtype(q=q, k=q, v=v)
        checks.check_floating(g=g, beta=beta)
        checks.check_same_device(q=q, k=q, v=v, g=g, beta=beta, initial_state=state)
        checks.check_heads(sizes["H"], sizes["HV"])
        N = checks.check_varlen(None, None, 1, 1, state)
        checks.check_state("initial_state", state, N, 4, 64, 64)

    def nothing(*args: object) -> int:
        return len(args)

    def calls(fn, count) -> float:
        start = time.process_time()
        for _ in range(count):
            fn()
        return (time.process_time() - start) / count

    base = min(calls(nothing, 20000) for _ in range(5))
    # About 10 us where an empty call takes 40 ns.
    assert min(calls(check, 2000) for _ in range(5)) < 300 * base


def test_known_facts_tell_apart_what_checks_look_at() -> None:
    x = torch.randn(2, 4)
    base = checks.static_facts((x, 1.0, None, x))
    assert base == checks.static_facts((torch.zeros(2, 4), 1.0, None, x))
    others = [
        (x.view(4, 2), 1.0, None, x),
        (x.half(), 1.0, None, x),
        (x, 1, None, x),
        (x, True, None, x),
        (x, 1.0, False, x),
        (x, 1.0, x, None),
        (torch.nn.Parameter(x), 1.0, None, x),
        (x.clone().requires_grad_(), 1.0, None, x),
        (x.to("meta"), 1.0, None, x),
    ]
    assert len({checks.static_facts(o) for o in others} | {base}) == len(others) + 1
    assert checks.static_facts((1.0, None)) != checks.static_facts((1.0, False))
    for values in ((x, "1.0"), (x, [1]), (x.as_subclass(type("Mine", (torch.Tensor,), {})), 1.0)):
        assert checks.static_facts(values) is None
