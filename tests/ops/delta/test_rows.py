# SPDX-License-Identifier: MIT
"""Comba and GDN-2, ops that are a row of the table: against the token recurrence in float64, with every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla.ops._common.checks import ArgumentError, DtypeError
from fla.ops.comba import chunk_comba, fused_recurrent_comba, naive_chunk_comba, naive_recurrent_comba
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2, naive_chunk_gdn2, naive_recurrent_gdn2
from fla.ops.gdn2.fused_recurrent import fused_recurrent_gdn2_fwd
from fla.ops.kda import chunk_kda

COMBA = [chunk_comba, fused_recurrent_comba]
GDN2 = [chunk_gdn2, fused_recurrent_gdn2]
OPS = [*COMBA, *GDN2]
PACKED = [[0, 0, 5, 5, 70, 133, 134, 134], [0, 1, 2, 3, 4]]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)

Run = Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]


@pytest.fixture
def make(delta):
    """Arguments for an op."""

    def arguments(op, B, T, H, HV, K, V, **options: Any) -> dict[str, Tensor]:
        x = delta.inputs(B, T, H, HV, K, V, vector=op in GDN2, **options)
        random = torch.Generator().manual_seed(3)
        draw = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
        if op in COMBA:
            x["p"] = F.normalize(draw(B, T, H, K), dim=-1).to(x["q"].dtype)
        else:
            dtype = x.pop("beta").dtype
            x["b"] = (1.5 * draw(B, T, HV, K).sigmoid()).to(dtype)
            x["w"] = draw(B, T, HV, V).to(dtype)
        return x

    return arguments


@pytest.fixture
def truth(delta):
    """What the ops must compute for ``x``."""

    def value(x: Mapping[str, Tensor], *, l2norm: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        flags = {name: options.pop(name) for name in ("use_gate_in_kernel", "lower_bound") if name in options}
        unit = lambda t: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() if l2norm else t
        q, k = unit(x["q"]), unit(x["k"])
        if "b" not in x:
            p = unit(x["p"]) if "p" in x else k
            return delta.recurrence(q, k, x["v"], x.get("beta"), x["g"], h0=x.get("h0"), p=p, exclusive=True, **options)
        g = x["g"]
        if flags:
            raw = g + x["dt_bias"].reshape(g.shape[2:]) if "dt_bias" in x else g
            rate = x["A_log"].exp().view(-1, 1) if "A_log" in x else 1.0
            bound = flags.get("lower_bound")
            g = -rate * F.softplus(raw, threshold=50) if bound is None else bound / (1 + (-rate * raw).exp())
        return delta.recurrence(q, k, x["v"], gk=g, h0=x.get("h0"), erase=x["b"], gain=x["w"], **options)

    return value


@pytest.mark.parametrize("T", [0, 1, 2, 3, 15, 17, 63, 64, 65, 150])
@every_op
def test_any_length(delta, make, truth, op, T) -> None:
    delta.compare(delta.call(op), truth, make(op, 2, T, 2, 4, 12, 9, states=2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@every_op
def test_any_dtype(delta, make, truth, op, dtype) -> None:
    x = make(op, 2, 70, 2, 4, 16, 16, dtype=dtype, states=2)
    o, S = delta.call(op)(x)
    assert (o.dtype, S.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    delta.compare(delta.call(op), truth, x)


@pytest.mark.parametrize("gate", ["strong", "cut", "zero"])
@every_op
def test_any_gate(delta, make, truth, op, gate) -> None:
    delta.compare(delta.call(op), truth, make(op, 1, 90, 2, 2, 16, 16, gate=gate, states=1))


@pytest.mark.parametrize("offsets", PACKED, ids=str)
@every_op
def test_packed_sequences_equal_separate_ones(delta, make, truth, op, offsets) -> None:
    x = make(op, 1, offsets[-1], 1, 2, 8, 8, states=len(offsets) - 1)
    run = delta.call(op, cu_seqlens=torch.tensor(offsets))
    delta.compare(run, functools.partial(truth, offsets=offsets), x)
    stateless = {name: t for name, t in x.items() if name != "h0"}
    delta.compare(run, functools.partial(truth, offsets=offsets), stateless)


@every_op
def test_odd_head_dims_and_scale(delta, make, truth, op) -> None:
    for K, V in ((1, 7), (13, 1), (60, 100)):
        x = make(op, 1, 30, 1, 2, K, V, states=1)
        delta.compare(delta.call(op, scale=-2.0), functools.partial(truth, scale=-2.0), x)


@every_op
def test_the_norm_is_for_queries_and_all_keys(delta, make, truth, op) -> None:
    x = make(op, 1, 70, 2, 2, 8, 8)
    x |= {name: 3 * x[name] for name in ("q", "k", "p") if name in x}
    run = delta.call(op, use_qk_l2norm_in_kernel=True)
    delta.compare(run, functools.partial(truth, l2norm=True), x)


@pytest.mark.parametrize("T", [5, 70])
@every_op
def test_views_and_expanded_inputs(delta, make, truth, op, T) -> None:
    x = make(op, 2, T, 2, 2, 8, 8, states=2)
    q, k, v = torch.cat([x["q"], x["k"], x["v"]], -1).split([8, 8, 8], -1)
    views = {**x, "q": q, "k": k, "v": v, "h0": x["h0"].mT.contiguous().mT, "g": x["g"][:1, :1].expand_as(x["g"])}
    plain = {name: t.contiguous() for name, t in views.items()}
    for got, wanted in zip(delta.call(op)(views), delta.call(op)(plain), strict=True):
        assert torch.equal(got, wanted)


@every_op
def test_two_halves_with_the_state_between_equal_the_whole(delta, make, op) -> None:
    x = make(op, 2, 90, 1, 1, 8, 8, states=2)
    whole, last = delta.call(op)(x)
    cut = lambda a, b: {name: t[:, a:b] for name, t in x.items() if name != "h0"}
    first, state = delta.call(op)({**cut(0, 50), "h0": x["h0"]})
    second, end = delta.call(op)({**cut(50, 90), "h0": state})
    assert delta.error(torch.cat([first, second], 1), whole.double()) < 1e-6
    assert delta.error(end, last.double()) < 1e-6


@every_op
def test_calls_are_bit_identical_and_leave_arguments_alone(delta, make, op) -> None:
    x = {name: t.requires_grad_() for name, t in make(op, 2, 70, 1, 2, 8, 8, states=2).items()}
    before = {name: t.detach().clone() for name, t in x.items()}
    runs = []
    for _ in range(2):
        o, S = delta.call(op)(x)
        runs.append([o, S, *torch.autograd.grad([o.sum() + S.sum()], list(x.values()))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in x.items())
    assert op(**{name: t for name, t in x.items() if name != "h0"})[1] is None


@pytest.mark.parametrize(
    ("op", "naive", "chunked"),
    [(chunk_comba, naive_recurrent_comba, naive_chunk_comba), (chunk_gdn2, naive_recurrent_gdn2, naive_chunk_gdn2)],
)
def test_references_equal_the_recurrence(delta, make, truth, op, naive, chunked) -> None:
    # Comba's token form in 0.6.0 reads the decayed state and disagrees with its chunk form; here they agree.
    for T in (0, 1, 75):
        x = make(op, 2, T, 2, 4, 8, 6, states=2)
        for reference in (naive, functools.partial(chunked, chunk_size=16)):
            delta.compare(delta.call(reference), truth, x)
    bf16 = {name: t.bfloat16() for name, t in x.items() if name != "h0"}
    o, S = naive(**bf16)
    assert o.dtype == torch.float32
    assert S is None


# Comba


@pytest.mark.parametrize("op", COMBA)
def test_comba_without_read_key_reads_with_the_write_key(delta, make, truth, op) -> None:
    x = make(op, 2, 70, 2, 4, 8, 8, states=2)
    del x["p"]
    for l2norm in (False, True):
        run = delta.call(op, p=None, use_qk_l2norm_in_kernel=l2norm)
        delta.compare(run, functools.partial(truth, l2norm=l2norm), x)


@pytest.mark.parametrize("T", [5, 70])
@pytest.mark.parametrize("op", COMBA)
def test_comba_without_beta_writes_with_strength_one_on_every_value_head(delta, make, truth, op, T) -> None:
    x = make(op, 1, T, 2, 4, 8, 8)
    x |= {"k": x["k"] / 2, "p": x["p"] / 2}
    del x["beta"]
    delta.compare(delta.call(op), truth, x)


def test_recurrent_comba_takes_a_strength_per_value_channel(delta, make, truth) -> None:
    x = make(fused_recurrent_comba, 2, 40, 2, 4, 8, 6, states=2)
    x["beta"] = torch.rand(2, 40, 4, 6)
    delta.compare(delta.call(fused_recurrent_comba), truth, x)
    with pytest.raises(ArgumentError, match="`beta` must have shape"):
        chunk_comba(**{name: t for name, t in x.items() if name != "h0"})


def test_comba_with_a_decayed_read_key_is_the_gated_delta_rule(delta, make) -> None:
    x = make(chunk_comba, 2, 70, 2, 2, 8, 8)
    x["p"] = x["g"].exp().unsqueeze(-1) * x["k"]
    o, S = delta.call(chunk_comba)(x)
    del x["p"]
    for got, wanted in zip((o, S), delta.call(chunk_gated_delta_rule)(x), strict=True):
        assert delta.error(got, wanted.double()) < 1e-5


# GDN-2


@pytest.mark.parametrize("op", GDN2)
def test_gdn2_with_one_strength_in_all_channels_is_kda(delta, make, op) -> None:
    x = delta.inputs(2, 70, 2, 4, 8, 6, states=2)
    wanted = delta.call(chunk_kda)(x)
    beta = x.pop("beta").unsqueeze(-1)
    got = delta.call(op)({**x, "b": beta.expand_as(x["g"]), "w": beta.expand_as(x["v"])})
    assert max(delta.error(a, b.double()) for a, b in zip(got, wanted, strict=True)) < 1e-5


@pytest.mark.parametrize("op", GDN2)
def test_gdn2_states_with_values_first_are_transposed(delta, make, truth, op) -> None:
    x = make(op, 2, 40, 2, 4, 8, 8, states=2)
    delta.compare(delta.call(op, state_v_first=True), truth, x)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o, _ = op(**{n: t for n, t in x.items() if n != "h0"}, initial_state=x["h0"].mT, transpose_state_layout=True)
    assert torch.equal(o, delta.call(op)(x)[0])


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("op", GDN2)
def test_gdn2_computes_the_gate_of_kda(delta, make, truth, op, bound) -> None:
    x = make(op, 2, 50, 2, 4, 8, 8, gate_in_kernel=True)
    flags = {"use_gate_in_kernel": True, "lower_bound": bound}
    delta.compare(delta.call(op, **flags), functools.partial(truth, **flags), x)
    if bound is not None:
        del x["A_log"], x["dt_bias"]
        delta.compare(delta.call(op, **flags), functools.partial(truth, **flags), x)


def test_gdn2_returns_the_states_before_chunks(delta, make) -> None:
    x = make(chunk_gdn2, 2, 150, 1, 2, 8, 6, states=2)
    with torch.inference_mode():
        o, _ = delta.call(chunk_gdn2)(x)
        given = {("initial_state" if n == "h0" else n): t for n, t in x.items()}
        o2, last, h = chunk_gdn2(**given, return_intermediate_states=True)
        assert torch.equal(o, o2)
        assert last is None
        assert h.shape == (2, 3, 2, 8, 6)
        assert torch.equal(h[:, 0], x["h0"])
        half = delta.call(chunk_gdn2)({n: t if n == "h0" else t[:, :128] for n, t in x.items()})[1]
        assert delta.error(h[:, 2], half.double()) < 1e-6
    with pytest.raises(ArgumentError, match="inference_mode"):
        chunk_gdn2(**given, return_intermediate_states=True)


def test_gdn2_serves_from_a_pool(delta, make) -> None:
    x = make(fused_recurrent_gdn2, 2, 1, 1, 2, 4, 4)
    pool = torch.randn(5, 2, 4, 4)
    before = pool.clone()
    wanted_o, wanted_S = delta.call(fused_recurrent_gdn2)({**x, "h0": pool[[3, 1]]})
    out = torch.zeros_like(x["v"])
    slots = torch.tensor([3, 1])
    o, S = fused_recurrent_gdn2_fwd(**x, initial_state=pool, ssm_state_indices=slots, out=out, output_final_state=True)
    assert torch.equal(pool, before), "not in place by default"
    assert o is out
    assert torch.allclose(o, wanted_o)
    assert torch.allclose(S, wanted_S)
    fused_recurrent_gdn2_fwd(**x, initial_state=pool, ssm_state_indices=slots, inplace_final_state=True)
    assert torch.allclose(pool[slots], wanted_S)
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])
    with pytest.raises(ArgumentError, match="needs `initial_state`"):
        fused_recurrent_gdn2_fwd(**x, inplace_final_state=True)
    with pytest.raises(ArgumentError, match="no gradients"):
        fused_recurrent_gdn2_fwd(**{**x, "w": x["w"].requires_grad_()})


# Bad input

OWN = {"comba": ("p", "g", "beta"), "gdn2": ("g", "b", "w")}


def refuse(op, x, match, error=ArgumentError, **changes) -> None:
    with pytest.raises(error, match=match):
        op(**{**x, **changes})


@every_op
def test_bad_tensors(make, op) -> None:
    x = make(op, 2, 6, 2, 4, 8, 5)
    op(**x)
    for name in ("q", "k", "v", *OWN[op.op.operation]):
        refuse(op, x, f"`{name}` must have shape", **{name: x[name].unsqueeze(0)})
        refuse(op, x, f"`{name}` must be float16|`q`, `k`, `v` must share", DtypeError, **{name: x[name].long()})
        refuse(op, x, "device", **{name: x[name].to("meta")})
        if name != "q":
            refuse(op, x, f"`{name}` must have shape", **{name: x[name][:, :-1]})
        if name not in ("q", "v"):
            refuse(op, x, f"`{name}` must have shape", **{name: x[name][:, :, :1]})
        if name not in ("p", "beta"):
            refuse(op, x, f"`{name}` must be a tensor, got NoneType", TypeError, **{name: None})
    three = {name: t[:, :, :3] for name, t in x.items() if name not in ("q", "k", "p")}
    refuse(op, x, "multiple of the number of query heads, got HV = 3, H = 2", **three)


@every_op
def test_bad_states_offsets_and_keywords(make, op) -> None:
    x = make(op, 2, 6, 2, 4, 8, 5)
    refuse(op, x, "`initial_state` must have shape", initial_state=torch.zeros(2, 4, 8, 6))
    refuse(op, x, "other layout", initial_state=torch.zeros(2, 4, 5, 8))
    refuse(op, x, "number of initial states", initial_state=torch.zeros(3, 4, 8, 5))
    refuse(op, x, "batch size is expected to be 1 rather than 2", cu_seqlens=torch.tensor([0, 6]))
    one = {name: t[:1] for name, t in x.items()}
    refuse(op, one, "must end at the number of tokens", cu_seqlens=torch.tensor([0, 5]))
    refuse(op, x, "`scale` must be a number", scale="big")
    refuse(op, x, "unknown_option", TypeError, unknown_option=1)


@pytest.mark.parametrize("op", GDN2)
def test_bad_gates_of_gdn2(make, op) -> None:
    x = make(op, 2, 6, 2, 4, 8, 5)
    refuse(op, x, "use_gate_in_kernel=True needs `A_log` or `lower_bound`", use_gate_in_kernel=True)
    refuse(op, x, "`A_log` was given, but", A_log=torch.zeros(4))
    refuse(op, x, "`dt_bias` must have 32 elements", use_gate_in_kernel=True, lower_bound=-5, dt_bias=torch.zeros(4))
    refuse(op, x, "head_first", DeprecationWarning, head_first=True)
    if op is chunk_gdn2:
        gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(4)}
        refuse(op, x, "safe_gate=True needs `lower_bound` in", safe_gate=True, lower_bound=-6.0, **gate)
        refuse(op, x, "`chunk_size` must be 64, got 32", ValueError, chunk_size=32)
        refuse(op, x, "cp_context", NotImplementedError, cp_context=object())
