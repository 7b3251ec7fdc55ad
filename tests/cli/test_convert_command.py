# SPDX-License-Identifier: MIT
"""`fla convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fla.cli import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=61
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_converts_and_compares(source: Path, tmp_path: Path, capsys: Any):
    assert main(["convert", str(source), str(tmp_path / "out"), "--check", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["model_type"] == "transformer"
    assert document["dtype"] == "float32"
    assert document["logits_error"] < 1e-5
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_says_in_words_what_was_written(source: Path, tmp_path: Path, capsys: Any):
    assert main(["convert", str(source), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out


def test_what_cannot_be_converted_is_one_line(tmp_path: Path, capsys: Any):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "fla convert: `model_type` must be one of" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(LlamaConfig().to_dict(), default=str))
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 1
    assert "config.json" in capsys.readouterr().err
