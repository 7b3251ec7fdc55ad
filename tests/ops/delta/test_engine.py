# SPDX-License-Identifier: MIT
"""The PyTorch engine against the token recurrence in float64, for every row that the table can express."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fla.ops._delta.rows import ROWS, Decay, DeltaRow, Operands, ReadTime
from fla.ops._delta.torch_chunk import chunk_delta, fitting_chunk
from fla.ops._delta.torch_recurrent import recurrent_delta

COEFFICIENTS = ["scalar", "vector", "none"]


def arguments(delta, decay, coefficient, T=37, dtype=torch.float64):
    B, H, HV, K, V = 2, 2, 4, 6, 5
    x = delta.inputs(
        B, T, H, HV, K, V, gate=None if decay is Decay.NONE else "mild", vector=decay is Decay.VECTOR, states=B
    )
    x = {name: t.double() for name, t in x.items() if name != "beta"}
    x["p"] = F.normalize(torch.randn(B, T, H, K, dtype=torch.float64), dim=-1)
    if coefficient != "none":
        x["erase"] = torch.rand(B, T, HV, *([K] if coefficient == "vector" else []), dtype=torch.float64)
        x["gain"] = torch.randn(B, T, HV, *([V] if coefficient == "vector" else []), dtype=torch.float64)
    return {name: t.to(dtype) for name, t in x.items()}


@pytest.mark.parametrize("engine", ["chunk", "loop"])
@pytest.mark.parametrize("coefficient", COEFFICIENTS)
@pytest.mark.parametrize("read_time", ReadTime)
@pytest.mark.parametrize("decay", Decay)
def test_every_axis_of_the_table_equals_the_recurrence(delta, decay, read_time, coefficient, engine) -> None:
    row = DeltaRow("any", decay, read_time, read_key="p", erase="b", gain="w")

    def run(x):
        operands = Operands(x["q"], x["p"], x["k"], x["v"], x.get("g"), x.get("erase"), x.get("gain"))
        if engine == "loop":
            return recurrent_delta(row, operands, scale=0.3, initial_state=x["h0"])
        return chunk_delta(row, operands, scale=0.3, initial_state=x["h0"], chunk_size=16)[:2]

    def truth(x):
        g = x.get("g")
        decays = {"gk" if decay is Decay.VECTOR else "g": g}
        rest = {name: x.get(name) for name in ("p", "erase", "gain", "h0")}
        return delta.recurrence(
            x["q"], x["k"], x["v"], **decays, **rest, scale=0.3, exclusive=read_time is ReadTime.EXCLUSIVE
        )

    delta.compare(run, truth, arguments(delta, decay, coefficient, T=37 if engine == "chunk" else 9))


@pytest.mark.parametrize("chunk", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("op", ["kda", "gated_delta_rule", "delta_rule"])
def test_results_do_not_depend_on_the_chunk_size(delta, op, chunk) -> None:
    row = ROWS[op]
    x = delta.inputs(
        1, 70, 1, 2, 8, 6, gate=None if row.decay is Decay.NONE else "mild", vector=row.decay is Decay.VECTOR
    )

    def run(x):
        operands = Operands(x["q"], x["k"], x["k"], x["v"], x.get("g"), x["beta"], x["beta"])
        return chunk_delta(row, operands, scale=0.3, chunk_size=chunk)[:2]

    delta.compare(run, lambda x: delta.truth(x, scale=0.3), x)


def test_short_sequences_get_short_chunks() -> None:
    assert [fitting_chunk(T) for T in (0, 1, 2, 3, 17, 64, 65)] == [1, 1, 2, 4, 32, 64, 64]
    assert fitting_chunk(40, torch.tensor([0, 3, 20, 40])) == 32


@pytest.mark.parametrize("engine", [recurrent_delta, chunk_delta])
def test_a_second_backward_through_the_gradient_is_refused(delta, engine) -> None:
    x = {name: t.requires_grad_() for name, t in delta.inputs(1, 20, 1, 1, 4, 4).items()}
    operands = Operands(x["q"], x["k"], x["k"], x["v"], x["g"], x["beta"], x["beta"])
    o = engine(ROWS["kda"], operands, scale=1.0)[0]
    (dq,) = torch.autograd.grad(o.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dq.sum().backward()
