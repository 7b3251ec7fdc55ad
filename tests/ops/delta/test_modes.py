# SPDX-License-Identifier: MIT
"""What single delta ops offer beyond the recurrence: states per chunk, graph mode, optional gates, references."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from fla.ops.delta_rule import fused_recurrent_delta_rule
from fla.ops.delta_rule.naive import delta_rule_chunkwise, delta_rule_parallel, delta_rule_recurrence
from fla.ops.delta_rule.parallel import naive_delta_rule_parallel, parallel_delta_rule
from fla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gdn,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    naive_chunk_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("offsets", [None, [0, 0, 70, 100]], ids=str)
def test_states_before_chunks(delta, offsets, chunk_size, v_first) -> None:
    N = 2 if offsets is None else len(offsets) - 1
    x = delta.inputs(2 if offsets is None else 1, 100, 1, 2, 8, 6, states=N, dtype=torch.float16)
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    state = x["h0"].mT if v_first else x["h0"]
    given = {name: t for name, t in x.items() if name != "h0"}
    with torch.inference_mode():
        _, last, h = chunk_kda(
            **given,
            **options,
            initial_state=state,
            chunk_size=chunk_size,
            state_v_first=v_first,
            return_intermediate_states=True,
        )
    assert last is None
    assert h.dtype == torch.float16
    wide = {name: t.double() for name, t in x.items()}
    states = []
    for n, (a, b) in enumerate([(0, 100)] * 2 if offsets is None else itertools.pairwise(offsets)):
        for start in range(a, b, chunk_size):
            row = slice(n, n + 1) if offsets is None else slice(0, 1)
            before = {name: wide[name][row, a:start] for name in given}
            S = delta.truth({**before, "h0": wide["h0"][n : n + 1]})[1]
            states.append(S.mT if v_first else S)
    wanted = torch.cat(states).view(h.shape)
    assert delta.error(h, wanted) < 5e-3


def test_graph_mode_leaves_uncovered_rows_zero(delta) -> None:
    x = delta.inputs(1, 90, 1, 1, 8, 8)
    x = {name: t.requires_grad_() for name, t in x.items()}
    cu = torch.tensor([0, 10, 70, 70, 70])
    o, S = chunk_kda(**x, cu_seqlens=cu, use_graph=True, max_num_seqs=4, output_final_state=True)
    wanted = delta.truth({name: t[:, :70].double() for name, t in x.items()}, offsets=cu.tolist())
    assert delta.error(o[:, :70], wanted[0]) < 1e-5
    assert delta.error(S, wanted[1]) < 1e-5
    assert (o[:, 70:] == 0).all()
    o.sum().backward()
    assert all((t.grad[:, 70:] == 0).all() for t in x.values())


@pytest.mark.parametrize("hint", ["disable_recompute", "safe_gate"])
def test_hints_change_nothing(delta, hint) -> None:
    x = delta.inputs(1, 70, 1, 1, 8, 8)
    assert torch.equal(chunk_kda(**x, **{hint: True})[0], chunk_kda(**x)[0])


@pytest.mark.parametrize("names", [(), ("g",), ("gk",), ("gv",), ("g", "gk"), ("g", "gk", "gv")], ids=str)
@pytest.mark.parametrize("T", [3, 40])
def test_recurrent_gdn_multiplies_the_decays_that_are_given(delta, names, T) -> None:
    x = delta.inputs(2, T, 2, 4, 8, 6, gate=None, states=2)
    for name, shape in (("g", ()), ("gk", (8,)), ("gv", (6,))):
        if name in names:
            x[name] = -torch.rand(2, T, 4, *shape)
    delta.compare(delta.call(fused_recurrent_gated_delta_rule), delta.truth, x)


@pytest.mark.parametrize(
    "op", [fused_recurrent_gated_delta_rule, fused_recurrent_delta_rule], ids=lambda op: op.__name__
)
def test_no_beta_is_one_for_every_value_head(delta, op) -> None:
    """Grouped values too, where the reference package reads out of bounds."""
    HV = 4 if op is fused_recurrent_gated_delta_rule else 2
    for T in (3, 40):
        x = delta.inputs(2, T, 2, HV, 8, 6, gate=None)
        del x["beta"]
        delta.compare(delta.call(op), delta.truth, x)


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize(
    "op",
    [fused_recurrent_kda, fused_recurrent_gated_delta_rule, fused_recurrent_delta_rule],
    ids=lambda op: op.__name__,
)
def test_beta_per_value_channel(delta, op, sigmoid) -> None:
    if op is fused_recurrent_delta_rule and sigmoid:
        pytest.skip("no sigmoid")
    vector = op is fused_recurrent_kda
    x = delta.inputs(
        2, 30, 2, 2, 8, 6, gate=None if op is fused_recurrent_delta_rule else "mild", vector=vector, states=2
    )
    x["beta"] = torch.rand(2, 30, 2, 6)
    flags = {"use_beta_sigmoid_in_kernel": True} if sigmoid else {}
    delta.compare(delta.call(op, **flags), functools.partial(delta.truth, **flags), x)
    packed = {name: t[:1] for name, t in x.items() if name != "h0"}
    offsets = [0, 7, 7, 30]
    run = delta.call(op, **flags, cu_seqlens=torch.tensor(offsets))
    delta.compare(run, functools.partial(delta.truth, **flags, offsets=offsets), packed)


def test_aliases() -> None:
    assert chunk_gdn is chunk_gated_delta_rule
    assert fused_recurrent_gdn is fused_recurrent_gated_delta_rule
    assert naive_delta_rule_parallel is delta_rule_parallel


def by_position(naive, *names):
    def run(x):
        return naive(*[x[name] for name in names], initial_state=x["h0"], output_final_state=True)

    return run


@pytest.mark.parametrize("gate", ["mild", "cut"])
@pytest.mark.parametrize(
    ("naive", "names", "vector"),
    [
        (naive_recurrent_kda, "qkv g beta", True),
        (naive_chunk_kda, "qkv g beta", True),
        (naive_recurrent_gated_delta_rule, "qkv beta g", False),
        (naive_chunk_gated_delta_rule, "qkv g beta", False),
    ],
)
def test_gated_references_equal_the_recurrence(delta, naive, names, vector, gate) -> None:
    if gate == "cut" and "chunk" in naive.__name__:
        pytest.skip("infinite gates are beyond a chunk form with cumulative sums")
    x = delta.inputs(2, 64, 1, 2, 8, 6, vector=vector, gate=gate, states=2)
    delta.compare(by_position(naive, *"qkv", *names.split()[1:]), delta.truth, x)


def test_references_take_any_length_or_say_which(delta) -> None:
    x = delta.inputs(1, 70, 1, 1, 8, 6, vector=False, states=1)
    delta.compare(by_position(naive_chunk_gated_delta_rule, *"qkv", "g", "beta"), delta.truth, x)
    x = delta.inputs(1, 70, 1, 1, 8, 6)
    with pytest.raises(AssertionError, match="multiple of chunk_size = 64, got T = 70"):
        naive_chunk_kda(**x)
    with pytest.raises(AssertionError, match="multiple of chunk_size = 32, got T = 70"):
        delta_rule_chunkwise(*[x[name].transpose(1, 2) for name in ("q", "k", "v", "beta")])


def test_delta_rule_references(delta) -> None:
    x = delta.inputs(2, 64, 2, 2, 8, 6, gate=None)
    heads_first = [x[name].transpose(1, 2) for name in ("q", "k", "v", "beta")]
    o, S = delta.truth({name: t.double() for name, t in x.items()})
    for naive in (delta_rule_recurrence, delta_rule_chunkwise):
        got, state = naive(*heads_first)
        assert delta.error(got.transpose(1, 2), o) < 1e-5
        assert delta.error(state, S) < 1e-5
    got, attention = delta_rule_parallel(*heads_first)
    assert delta.error(got.transpose(1, 2), o) < 1e-5
    assert delta.error(attention @ heads_first[2], o.transpose(1, 2)) < 1e-5
    assert delta_rule_recurrence(*heads_first, output_final_state=False)[1] is None


def test_parallel_delta_rule_returns_its_attention(delta) -> None:
    x = delta.inputs(2, 50, 2, 2, 8, 6, gate=None)

    def run(x):
        o, attention = parallel_delta_rule(**x, scale=0.5, output_attentions=True)
        assert torch.allclose(torch.einsum("bhts,bshv->bthv", attention, x["v"]), o, atol=1e-5)
        assert parallel_delta_rule(**x)[1] is None
        return o, attention.sum() * 0

    truth = lambda x: (delta.truth(x, scale=0.5)[0], x["q"].sum() * 0)
    delta.compare(run, truth, x)


def test_parallel_delta_rule_compiles_and_ignores_autocast(delta) -> None:
    x = delta.inputs(2, 10, 2, 2, 8, 6, gate=None)
    wanted = parallel_delta_rule(**x, output_attentions=True)
    compiled = torch.compile(parallel_delta_rule, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        for run in (parallel_delta_rule, compiled):
            got = run(**x, output_attentions=True)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("op", [chunk_kda, fused_recurrent_kda], ids=lambda op: op.__name__)
def test_compiles_whole_with_gradients(delta, op) -> None:
    x = {name: t.requires_grad_() for name, t in delta.inputs(1, 20, 1, 2, 8, 8, states=2).items()}
    cu = torch.tensor([0, 5, 20])

    def step(x, cu):
        o, S = delta.call(op, cu_seqlens=cu)(x)
        return o.square().sum() + S.square().sum()

    eager = torch.autograd.grad(step(x, cu), list(x.values()))
    compiled = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x, cu), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
