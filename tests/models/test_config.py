# SPDX-License-Identifier: MIT
"""Configurations: fields of release 0.6.0, checks, round trips; the hybrid attention plan."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from fla.models import KDAConfig
from fla.models._index import FAMILIES
from fla.models.configuration_utils import get_attention_spec, parse_attention_config, validate_attnres_config
from fla.models.hybrid import get_hybrid_attention_spec, normalize_hybrid_attention_config

SPEC = {"layers": [1], "num_heads": 2}


def row(entry: Any) -> Any:
    import importlib

    return importlib.import_module(f"fla.models.{entry.package}").FAMILY


@pytest.mark.parametrize("entry", FAMILIES, ids=lambda e: e.stem)
def test_constructor_is_that_of_the_reference_release(entry: Any):
    family = row(entry)
    assert (family.model_type, family.package, family.stem) == entry
    api = json.loads((Path(__file__).parents[1] / "data" / "api-0.6.0.json").read_text())
    listed = api["fla.models"][f"{entry.stem}Config"]["class"]["__init__"]
    wanted = [tuple(text.replace("float('inf')", "inf") for text in p) for p in listed]
    signature = inspect.signature(family.get(f"{entry.stem}Config"))
    constants = {
        name: text for name, text in wanted[:-1] if text.startswith("_")
    }  # a name that says nothing of the value
    parameters = [p for p in signature.parameters.values() if p.name != "kwargs"]
    given = [(p.name, constants.get(p.name, repr(p.default))) for p in parameters]
    assert [*given, ("**kwargs",)] == wanted
    assert [*inspect.signature(family.get(f"{entry.stem}Config").__init__).parameters][1:] == [*signature.parameters]


def test_fields_by_position_and_by_name():
    config = KDAConfig("fused_recurrent", 64, expand_v=2.0)
    assert (config.attn_mode, config.hidden_size, config.expand_v, config.num_heads) == ("fused_recurrent", 64, 2.0, 16)
    with pytest.raises(TypeError, match="attn_mode"):
        KDAConfig("chunk", attn_mode="chunk")
    with pytest.raises(TypeError, match="positional"):
        KDAConfig(*range(40))


def test_round_trip_keeps_fields_and_unknown_ones(tmp_path: Path):
    config = KDAConfig(hidden_size=64, num_hidden_layers=3, attn=SPEC, my_own_field=[1, 2], pad_token_id=0)
    config.save_pretrained(tmp_path)
    for back in (KDAConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(back) is KDAConfig
        assert {**back.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}
        assert back.my_own_field == [1, 2]
        assert back.attn["layers"] == [1]
    assert KDAConfig.from_pretrained(tmp_path, attn=None).attn is None
    assert KDAConfig.from_pretrained(tmp_path, attn={"layers": (0,), "num_heads": 4}).attn["layers"] == [0]
    assert set(KDAConfig().to_dict()) >= set(KDAConfig.fields)


def test_configs_are_copied_pickled_and_subclassed():
    config = KDAConfig(hidden_size=48)
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other.to_dict() == config.to_dict()

    class Mine(KDAConfig):
        model_type = "mine"

    mine = Mine(hidden_size=32, extra=1)
    assert (mine.hidden_size, mine.num_heads, mine.extra) == (32, 16, 1)
    assert KDAConfig.__module__ == "fla.models.kda.configuration_kda"
    assert "hidden_size = 2048" in (KDAConfig.__doc__ or "")


def test_caches_are_ignored_at_inference():
    assert "past_key_values" in KDAConfig.keys_to_ignore_at_inference


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"safe_gate": True}, "lower_bound"),
        ({"fuse_linear_cross_entropy": True, "fuse_cross_entropy": True}, None),
        ({"attnres_block_size": 3}, "attnres_block_size"),
        ({"attnres_block_size": True}, "attnres_block_size"),
        ({"attn": {"layers": [24], "num_heads": 1}}, "layers"),
    ],
)
def test_wrong_values_are_named(kwargs: dict, match: str | None):
    if match is None:  # KDA has no such field: an unknown one is kept and means nothing
        KDAConfig(**kwargs)
        return
    with pytest.raises(ValueError, match=match):
        KDAConfig(**kwargs)


@pytest.mark.parametrize("size", [None, 1, 2, 8])
def test_attnres_block_sizes(size: int | None):
    validate_attnres_config(size)


def test_attention_plan_fills_in_defaults_and_copies():
    given = {"layers": (0, 2), "num_heads": 4, "own": "kept"}
    before = copy.deepcopy(given)
    spec = parse_attention_config(given, 4)
    assert given == before
    assert spec == {
        "layers": [0, 2],
        "num_heads": 4,
        "num_kv_heads": 4,
        "qkv_bias": False,
        "window_size": None,
        "rope_theta": 10000.0,
        "own": "kept",
    }
    assert parse_attention_config(None, 4) is None
    assert parse_attention_config([], 4) == []
    assert parse_attention_config({"layers": [], "num_heads": 1}, 4)["layers"] == []
    assert normalize_hybrid_attention_config is parse_attention_config
    assert get_hybrid_attention_spec is get_attention_spec


def test_the_spec_of_a_layer():
    plan = parse_attention_config([{"layers": [0], "num_heads": 1}, {"layers": [2], "num_heads": 2}], 4)
    assert get_attention_spec(plan, 2)["num_heads"] == 2
    assert get_attention_spec(plan, 1) is None
    assert get_attention_spec(None, 0) is None
    config = KDAConfig(num_hidden_layers=4, attn=plan)
    assert get_attention_spec(config, 0)["num_heads"] == 1


def test_assignment_is_checked_too():
    config = KDAConfig(num_hidden_layers=2)
    config.attn = SPEC
    assert config.attn["num_kv_heads"] == 2
    with pytest.raises(ValueError, match="layers"):
        config.attn = {"layers": [2], "num_heads": 1}
    assert config.attn["layers"] == [1]


@pytest.mark.parametrize(
    ("attn", "match"),
    [
        (3, "attn"),
        ([3], "index 0"),
        ({"num_heads": 1}, "missing.*layers"),
        ({"layers": [0]}, "missing.*num_heads"),
        ({**SPEC, "layers": 1}, "layers"),
        ({**SPEC, "layers": ["0"]}, "layers.*'0'"),
        ({**SPEC, "layers": [True]}, "layers.*True"),
        ({**SPEC, "layers": [-1]}, "layers.*-1"),
        ({**SPEC, "layers": [1, 1]}, "layers.*1"),
        ({**SPEC, "num_heads": 0}, "num_heads.*0"),
        ({**SPEC, "num_heads": True}, "num_heads.*True"),
        ({**SPEC, "num_kv_heads": 1.0}, "num_kv_heads.*1.0"),
        ({**SPEC, "qkv_bias": 1}, "qkv_bias.*1"),
        ({**SPEC, "window_size": 0}, "window_size.*0"),
        ({**SPEC, "rope_theta": 0}, "rope_theta.*0"),
        ({**SPEC, "rope_theta": float("inf")}, "rope_theta.*inf"),
        ({**SPEC, "rope_theta": 10**400}, "rope_theta"),
        ({**SPEC, "rope_theta": True}, "rope_theta.*True"),
        ({**SPEC, "rope_theta": "1e4"}, "rope_theta.*1e4"),
        ([SPEC, {"layers": [0, 1], "num_heads": 1}], "conflicting layer.*1.*index 1"),
        ([SPEC, {"layers": [0], "num_heads": -1}], "num_heads.*index 1.*-1"),
    ],
)
def test_malformed_plans_are_named(attn: Any, match: str):
    with pytest.raises(ValueError, match=match):
        parse_attention_config(attn, 4)
