# SPDX-License-Identifier: MIT
"""Public ops on the Triton engines: the second call that looks the same goes straight to its kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid

from fla.backends import use_backend
from fla.ops._common.policy import CHIPS, describe_chip
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.kda import chunk_kda
from fla.ops.simple_gla import chunk_simple_gla

pytest.importorskip("triton")

B, T, H, D = 1, 32, 1, 16
OPS = {
    "gated delta rule": (chunk_gated_delta_rule, ("q", "k", "v", "g", "beta"), {"use_qk_l2norm_in_kernel": True}),
    "kda": (chunk_kda, ("q", "k", "v", "gk", "beta"), {"use_qk_l2norm_in_kernel": True}),
    "simple gla": (chunk_simple_gla, ("q", "k", "v", "g"), {}),
    "gla": (chunk_gla, ("q", "k", "v", "gk"), {}),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def given(names: tuple[str, ...], grad: bool) -> list[torch.Tensor]:
    x = {n: torch.randn(B, T, H, D) for n in "qkv"}
    x["beta"] = torch.rand(B, T, H)
    x["g"], x["gk"] = logsigmoid(torch.randn(B, T, H)), logsigmoid(torch.randn(B, T, H, D))
    return [x[n].to(DEVICE).requires_grad_(grad) for n in names]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("op", OPS)
def test_the_second_call_asks_nobody_and_gives_the_same(op, grad, monkeypatch) -> None:
    fn, names, kw = OPS[op]
    first, other = given(names, grad), given(names, grad)
    do = torch.randn(B, T, H, D, device=DEVICE)

    def results(x: list[torch.Tensor]) -> list[torch.Tensor]:
        o, ht = fn(*x, output_final_state=True, **kw)
        return [o, ht, *(torch.autograd.grad(o, x, do) if grad else ())]

    with use_backend("triton"):
        fn.op.invalidate()
        wanted = [results(x) for x in (first, other)]
        asked: list[str] = []
        monkeypatch.setattr(fn.op, "choose", lambda *args: asked.append("choose"))
        for x, same in zip((first, other), wanted, strict=True):
            for a, b in zip(results(x), same, strict=True):
                assert torch.equal(a, b)
    assert not asked


@pytest.mark.skipif(DEVICE == "cuda", reason="tensors of the CPU run on Triton in the interpreter only")
def test_what_chip_a_device_stands_for_is_part_of_a_call(monkeypatch) -> None:
    fn, names, _ = OPS["gla"]
    x = [t.cpu() for t in given(names, False)]
    asked: list[str] = []
    choose = fn.op.choose
    monkeypatch.setattr(fn.op, "choose", lambda *args: [asked.append("choose"), choose(*args)][1])
    chip = CHIPS["interpreter"]
    try:
        with use_backend("triton"):
            fn.op.invalidate()
            for sms, times in ((1, 1), (2, 2), (2, 2)):
                # An equal description of its own at each question.
                describe_chip("cpu", lambda device, sms=sms: replace(chip, sms=sms))
                fn(*x)
                assert len(asked) == times
    finally:
        describe_chip("cpu", None)


def test_packed_sequences_are_checked_each_time() -> None:
    fn, names, kw = OPS["simple gla"]
    x = given(names, False)
    with use_backend("triton"):
        o, _ = fn(*x, cu_seqlens=torch.tensor([0, 16, T], device=DEVICE), **kw)
        again, _ = fn(*x, cu_seqlens=torch.tensor([0, 8, T], device=DEVICE), **kw)
        assert not torch.equal(o, again)
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match="cu_seqlens"):
                fn(*x, cu_seqlens=torch.tensor([0, 8, T + 1]), **kw)


def test_flags_given_as_tensors_are_read_each_time() -> None:
    fn, names, _ = OPS["simple gla"]
    x = given(names, False)
    flag = torch.tensor(True)
    with use_backend("triton"):
        assert fn(*x, output_final_state=flag)[1] is not None
        assert fn(*x, output_final_state=torch.tensor(False))[1] is None
        flag.fill_(False)
        assert fn(*x, output_final_state=flag)[1] is None


def test_flags_given_as_tensors_are_checked_each_time() -> None:
    fn, names, _ = OPS["gated delta rule"]
    x = given(names, False)
    on, off = torch.tensor([True]), torch.tensor([False])
    with use_backend("triton"):
        fn(*x, allow_neg_eigval=on, use_beta_sigmoid_in_kernel=on)
        with pytest.raises(ValueError, match="allow_neg_eigval"):
            fn(*x, allow_neg_eigval=on, use_beta_sigmoid_in_kernel=off)
