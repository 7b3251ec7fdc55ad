# SPDX-License-Identifier: MIT
"""Bad input of the linear family: an error that names the argument, before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fla.ops
from fla.ops import (
    chunk_gla,
    chunk_lightning_attn,
    chunk_linear_attn,
    chunk_retention,
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_linear_attn,
    fused_recurrent_retention,
    fused_recurrent_simple_gla,
    parallel_retention,
    parallel_simple_gla,
)

OPS = [
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
    chunk_gla,
    fused_recurrent_gla,
    chunk_retention,
    fused_recurrent_retention,
    parallel_retention,
    chunk_linear_attn,
    fused_recurrent_linear_attn,
    chunk_lightning_attn,
    fused_recurrent_lightning_attn,
]
named = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def good(op: Any, B: int = 2, T: int = 8) -> dict[str, Any]:
    data: dict[str, Any] = {n: torch.randn(B, T, 2, 4) for n in "qk"} | {"v": torch.randn(B, T, 2, 6)}
    if op is chunk_gla:
        data["g"] = -torch.rand(B, T, 2, 4)
    if op in (chunk_lightning_attn, fused_recurrent_lightning_attn):
        data |= {"layer_idx": 0, "num_layers": 4}
    return data


def takes(op: Any, name: str) -> bool:
    return name in inspect.signature(op).parameters


@named
def test_ranks_shapes_dtypes_and_devices(op) -> None:
    data = good(op)
    changes: list[tuple[dict[str, Any], str, type[Exception]]] = [
        ({"q": data["q"][0]}, "`q`", ValueError),
        ({"k": data["k"][:, :, :1]}, "`k`", ValueError),
        ({"k": torch.randn(2, 8, 2, 5)}, "`k`", ValueError),
        ({"v": data["v"][:, :7]}, "`v`", ValueError),
        ({"v": data["v"][:1]}, "`v`", ValueError),
        ({"v": data["v"].half()}, "dtype", TypeError),
        ({n: data[n].long() for n in "qkv"}, "`q`", TypeError),
        ({"v": data["v"].to("meta")}, "device", ValueError),
        ({"q": None}, "`q`", TypeError),
        ({"scale": "1"}, "scale", TypeError),
    ]
    for change, match, error in changes:
        with pytest.raises(error, match=match):
            op(**{**data, **change})
    with pytest.raises(AssertionError):
        op(**{**data, "q": data["q"][0]})


@named
def test_states_of_another_shape_or_layout(op) -> None:
    if not takes(op, "initial_state"):
        assert op in (parallel_simple_gla, parallel_retention)
        return
    data = good(op)
    for shape in ((2, 2, 6, 4), (1, 2, 4, 6), (2, 3, 4, 6), (2, 2, 4), (2, 2, 4, 7)):
        with pytest.raises(ValueError, match="initial_state"):
            op(**data, initial_state=torch.zeros(shape))
    with pytest.raises(TypeError, match="initial_state"):
        op(**data, initial_state=torch.zeros(2, 2, 4, 6, dtype=torch.int64))
    if takes(op, "state_v_first"):
        with pytest.raises(ValueError, match="state_v_first"):
            op(**data, initial_state=torch.zeros(2, 2, 4, 6), state_v_first=True)


@named
def test_offsets_that_do_not_describe_the_tokens(op) -> None:
    data = good(op, B=1)
    for cu, error in (
        ([[0, 8]], ValueError),
        ([0.0, 8.0], TypeError),
        ([1, 8], ValueError),
        ([0, 5, 3, 8], ValueError),
        ([0, 7], ValueError),
        ([0, 9], ValueError),
        ([0], ValueError),
    ):
        with pytest.raises(error, match="cu_seqlens"):
            op(**data, cu_seqlens=torch.tensor(cu))
    with pytest.raises(ValueError, match="cu_seqlens"):
        op(**good(op), cu_seqlens=torch.tensor([0, 8]))
    if takes(op, "cu_seqlens_cpu"):
        with pytest.raises(ValueError, match="cu_seqlens_cpu"):
            op(**data, cu_seqlens=torch.tensor([0, 8]), cu_seqlens_cpu=torch.tensor([0, 3, 8]))
    if takes(op, "initial_state"):
        with pytest.raises(ValueError, match="initial"):
            op(**data, cu_seqlens=torch.tensor([0, 3, 8]), initial_state=torch.zeros(1, 2, 4, 6))
    for dtype in (torch.int32, torch.int64):  # V10
        op(**data, cu_seqlens=torch.tensor([0, 3, 8], dtype=dtype))


@named
def test_unknown_keywords(op) -> None:
    with pytest.raises(TypeError, match="chunksize"):
        op(**good(op), chunksize=64)  # B12


def test_gates_of_another_rank_or_kind() -> None:
    data = good(chunk_simple_gla)
    for op in (chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_simple_gla, parallel_simple_gla):
        with pytest.raises(ValueError, match="`g`"):
            op(**data, g=torch.zeros(2, 8, 2, 4))
        with pytest.raises(TypeError, match="`g`"):
            op(**data, g=torch.zeros(2, 8, 2, dtype=torch.int64))
    for op in (chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_simple_gla):
        with pytest.raises(ValueError, match="`g_gamma`"):
            op(**data, g_gamma=torch.zeros(2, 8, 2))
        with pytest.raises(ValueError, match="exclude"):
            op(**data, g=torch.zeros(2, 8, 2), g_gamma=torch.zeros(2))
        with pytest.raises(NotImplementedError, match="g_gamma"):
            op(**data, g_gamma=torch.zeros(2, requires_grad=True))
    with pytest.raises(AssertionError, match="`g`"):
        chunk_gla(**data, g=torch.zeros(2, 8, 2))
    with pytest.raises(TypeError, match="`g`"):
        chunk_gla(**data, g=None)
    with pytest.raises(ValueError, match="`gv`"):
        fused_recurrent_gla(**data, gv=torch.zeros(2, 8, 2, 4))


@pytest.mark.parametrize("op", [chunk_simple_gla, chunk_retention, chunk_lightning_attn], ids=lambda op: op.__name__)
def test_chunk_sizes_and_head_first(op) -> None:
    for size in (0, 8, 48, 256, -16):
        with pytest.raises(ValueError, match="chunk_size"):
            op(**good(op), chunk_size=size)
    with pytest.raises(TypeError, match="chunk_size"):
        op(**good(op), chunk_size=64.0)
    with pytest.raises(DeprecationWarning, match="head_first"):
        op(**good(op), head_first=False)


@pytest.mark.parametrize(
    "op", [fused_recurrent_simple_gla, fused_recurrent_gla, fused_recurrent_retention], ids=lambda op: op.__name__
)
def test_the_old_name_of_the_state_layout(op) -> None:
    data, state = good(op), torch.randn(2, 2, 6, 4)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        old = op(**data, initial_state=state, transpose_state_layout=True)[0]
    assert torch.equal(old, op(**data, initial_state=state, state_v_first=True)[0])
    with pytest.raises(ValueError, match=r"transpose_state_layout|state_v_first"):
        op(**data, transpose_state_layout=True, state_v_first=True)


@pytest.mark.parametrize("op", [parallel_simple_gla, parallel_retention], ids=lambda op: op.__name__)
def test_scores_of_packed_sequences_do_not_exist(op) -> None:
    with pytest.raises(AssertionError, match="output_attentions"):
        op(**good(op, B=1), output_attentions=True, cu_seqlens=torch.tensor([0, 8]))


@pytest.mark.parametrize("op", [chunk_lightning_attn, fused_recurrent_lightning_attn], ids=lambda op: op.__name__)
def test_layers_that_do_not_exist(op) -> None:
    data = good(op)
    for layer_idx, num_layers, match in ((0, 0, "num_layers"), (-1, 4, "layer_idx"), (5, 4, "layer_idx")):
        with pytest.raises(ValueError, match=match):
            op(**{**data, "layer_idx": layer_idx, "num_layers": num_layers})
    with pytest.raises(TypeError, match="layer_idx"):
        op(**{**data, "layer_idx": 1.5})


def test_every_exported_op_loads_and_planned_ones_say_so() -> None:
    for name in fla.ops.__all__:
        assert callable(getattr(fla.ops, name)), name
    assert not hasattr(fla.ops, "chunk_cyfa")
    with pytest.raises(AttributeError, match="does not exist yet"):
        fla.ops.chunk_cyfa  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute"):
        fla.ops.chunk_nonsense  # noqa: B018
