# SPDX-License-Identifier: MIT
from __future__ import annotations

import importlib.util

import pytest
import torch

from fla.cli import _warm
from fla.ops._common.size_classes import SizeClass

DEFAULTS = {
    "dtypes": ["bfloat16"],
    "dims": ["128"],
    "groups": [1],
    "forms": [],
    "flags": {},
    "gates": "both",
    "backward": True,
}


def tasks(*names, **changes):
    return _warm.tasks(names, **{**DEFAULTS, **changes})


def test_list_names_functions_and_their_forms(fla_cli):
    rows = fla_cli("warmup", "gated_delta_rule", "--list", "--json").json
    assert {"function": "gated_delta_rule.chunk_gated_delta_rule", "form": "all_in_kernel"} in rows
    assert {row["function"].partition(".")[0] for row in rows} == {"gated_delta_rule"}


def test_every_function_with_a_triton_path_and_a_row_is_meant_by_default():
    rooms = {task.function.partition(".")[0] for task in tasks()}
    assert {"kda", "gated_delta_rule", "delta_rule", "comba", "gdn2"} <= rooms


def test_every_function_with_a_triton_path_has_a_row():
    """But the helpers of `fla.ops.utils`, each of them one small kernel."""
    import importlib

    from fla.backends.registry import REGISTRY
    from fla.cli.backends import op_modules

    for module in op_modules():
        importlib.import_module(module)
    paths = {
        str(op) for key in REGISTRY.operations() for op in REGISTRY.ops(key)
        if key != "utils" and op.triton_path is not None and op.triton_path.where.startswith("fla.ops.")
    }  # fmt: skip
    assert paths - {task.function for task in tasks()} == set()


def test_forms_that_differ_in_values_only_are_one():
    forms = [task.form for task in tasks("chunk_comba")]
    assert forms == ["plain", "l2norm", "no_beta"]


def test_sizes_and_groups_multiply():
    found = tasks("chunk_kda", forms=["plain"], dims=["64", "64x128"], groups=[1, 2], dtypes=["float16", "float32"])
    assert len(found) == 8
    assert {(task.K, task.V) for task in found} == {(64, 64), (64, 128)}


def test_ops_without_groups_have_none():
    assert {task.group for task in tasks("chunk_delta_rule", groups=[1, 4])} == {1}


def test_forms_without_gradients_are_not_differentiated():
    assert {task.backward for task in tasks("chunk_kda", forms=["intermediate_states"])} == {False}
    assert {task.backward for task in tasks("chunk_kda", forms=["plain"], backward=False)} == {False}


def test_calls_cover_classes_states_gates_and_gradients():
    (task,) = tasks("chunk_kda", forms=["plain"])
    classes = [SizeClass("a", 64, 1), SizeClass("b", 70, 1, (3, 67))]
    found = list(_warm.requests(task, classes))
    assert len(found) == 2 * 2 * 2 * 3
    assert {(r.initial, r.final) for r in found} == {(None, False), (None, True), ("float32", True)}
    assert {r.gates for r in found} == {None, "bfloat16"}
    assert {r.lengths for r in found} == {None, (3, 67)}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["chunk_nothing"], "no function with a Triton path is called 'chunk_nothing'"),
        (["kda", "--dtype", "float64"], "--dtype 'float64' must be one of"),
        (["kda", "--head-dim", "64x"], None),
        (["kda", "--head-dim", "big"], "--head-dim 'big' must be a number"),
        (["kda", "--form", "odd"], "--form 'odd' is not among the forms"),
        (["kda", "--group", "0"], "--group must be at least 1"),
        (["kda", "--arg", "spin=true"], "none of the functions has this parameter"),
    ],
)
def test_what_does_not_exist_is_named(fla_cli, words, text):
    result = fla_cli("warmup", *words, "--list")
    if text is None:
        assert result.code == 0
    else:
        assert result.code == 2
        assert text in result.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_there_is_nothing_to_compile(fla_cli):
    result = fla_cli("warmup", "kda", "--device", "cpu")
    assert result.code == 3
    assert "no driver for cpu" in result.err


@pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="runs in the interpreter"
)
def test_a_task_runs_its_calls_on_triton(monkeypatch):
    monkeypatch.setattr(
        "fla.ops._common.size_classes.size_classes",
        lambda chip: (SizeClass("ragged", 5, 1), SizeClass("packed", 5, 1, (2, 3))),
    )
    told = []
    (task,) = tasks("chunk_gated_delta_rule", forms=["l2norm"], dims=["16"], dtypes=["float32"])
    (outcome,) = _warm.run_tasks([task], "cpu", 1, told.append)
    assert told == [outcome]
    assert not outcome.error
    assert not outcome.refused
    assert outcome.calls == 2 * 2 * 3


@pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="runs in the interpreter"
)
def test_what_the_triton_path_does_not_take_is_told(monkeypatch):
    monkeypatch.setattr("fla.ops._common.size_classes.size_classes", lambda chip: (SizeClass("short", 3, 1),))
    (task,) = tasks("chunk_kda", forms=["plain"], dims=["300"], dtypes=["float32"])
    outcome = _warm.run_task(task, "cpu")
    assert outcome.calls == 0
    assert "256" in outcome.refused


@pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="runs in the interpreter"
)
@pytest.mark.parametrize(
    ("function", "form"),
    [
        ("fused_recurrent_kda_fwd", "l2norm_in_place"),
        ("fused_recurrent_kda_fwd", "plain_pool"),
        ("fused_recurrent_gdn2_fwd", "plain_drafts_int64"),
        ("chunk_gsa", "plain"),
        ("chunk_hgrn", "plain"),
    ],
)
def test_functions_that_the_kit_does_not_call_run_too(monkeypatch, function, form):
    monkeypatch.setattr("fla.ops._common.size_classes.size_classes", lambda chip: (SizeClass("short", 3, 1),))
    (task,) = tasks(function, forms=[form], dims=["16"], dtypes=["float32"])
    outcome = _warm.run_task(task, "cpu")
    assert not outcome.error
    assert not outcome.refused
    assert outcome.calls > 0


def test_compiled_kernels_are_counted_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(_warm, "cache_folder", lambda: tmp_path)
    assert _warm.cached_kernels() == set()
    (tmp_path / "HASH").mkdir()
    (tmp_path / "HASH" / "kernel.json").write_text("{}")
    assert _warm.cached_kernels() == {"HASH"}
