# SPDX-License-Identifier: MIT
from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fla.cli._demo.speak import ByteStreamer
from fla.cli._demo.train import Curve, Interrupt, Recipe, _rate
from fla.models._index import FAMILIES


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A small folder of repetitive sources, so that two seconds of training show."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(48):
        lines = "".join(f"def function_{j}(value):\n    return value + {j}\n\n\n" for j in range(i, i + 8))
        (folder / f"module_{i}.py").write_text(lines)
    return folder


@pytest.fixture(scope="module")
def demo(text, tmp_path_factory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One whole run of the tiny model, in a process of its own."""
    out = tmp_path_factory.mktemp("demo") / "run"
    words = ["demo", "--size", "tiny", "--seconds", "3", "--tokens", "40", "--text", str(text), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "fla", *words, "--json", "--seed", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    return done, out


def test_it_exits_cleanly_and_prints_the_metrics_it_wrote(demo):
    done, out = demo
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((out / "metrics.json").read_text())


def test_it_learns_and_measures_beside_the_counted_models(demo):
    metrics = json.loads(demo[0].stdout)
    assert metrics["training"]["steps"] > 1
    assert metrics["training"]["bytes"] == metrics["training"]["steps"] * 4 * 64
    assert metrics["training"]["curve"][0]["bits_per_byte"] == pytest.approx(8.0, abs=0.5)
    held_out = metrics["held_out"]
    assert 0 < held_out["order_3"] < held_out["bigram"] < 8
    assert 0 < held_out["model"] < metrics["training"]["curve"][0]["bits_per_byte"]


def test_it_writes_a_picture(demo):
    assert (demo[1] / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_checkpoint_loads_as_a_hugging_face_model(demo):
    model = AutoModelForCausalLM.from_pretrained(demo[1] / "checkpoint")
    assert type(model).__name__ == "KDAForCausalLM"


def test_it_streams_text_that_it_also_reports(demo):
    done, _ = demo
    generation = json.loads(done.stdout)["generation"]
    assert generation["tokens"] <= 40
    assert generation["tokens_per_second"] > 0
    assert generation["prompt"] + generation["text"] in done.stderr


def test_it_ends_with_ops_calls_and_the_backend_that_ran(demo):
    done, _ = demo
    rows = {row["op"]: row for row in json.loads(done.stdout)["ops"]}
    assert rows["kda.chunk_kda"]["backend"] == "torch"
    assert rows["kda.chunk_kda"]["calls"] >= json.loads(done.stdout)["training"]["steps"]
    assert "Which backend computed what" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to a child on Windows")
@pytest.mark.parametrize("family", [f.model_type for f in FAMILIES])
def test_every_family_can_be_trained_and_talks(fla_cli, text, tmp_path, family):
    words = ["--size", "tiny", "--seconds", "0.3", "--tokens", "6", "--text", str(text), "--out", str(tmp_path)]
    result = fla_cli("demo", "--family", family, *words, "--json")
    assert result.code == 0
    assert result.json["family"] == family
    assert result.json["training"]["steps"] > 0
    assert result.json["generation"]["tokens"] == 6
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").config.model_type == family


def test_ctrl_c_saves_what_exists_and_exits_with_130(text, tmp_path):
    out = tmp_path / "run"
    words = ["demo", "--size", "tiny", "--seconds", "600", "--text", str(text), "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "fla", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "bits/byte" in line:  # it trains
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "Interrupted: what existed was saved." in rest
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["interrupted"] is True
    assert metrics["training"]["steps"] >= 1
    assert metrics["held_out"] is None
    assert (out / "checkpoint" / "config.json").exists()
    assert (out / "loss.png").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--seconds", "0"), 2, "above 0"),
        (("--seconds", "nan"), 2, "above 0"),
        (("--seconds", "soon"), 2, "must be a number"),
        (("--tokens", "2.5"), 2, "must be a number"),
        (("--tokens", "-1"), 2, "negative"),
        (("--device", "warp"), 3, "--device warp cannot be used"),
        (("--text", "/nowhere/at/all"), 1, "no Python source files"),
    ],
)
def test_bad_options_fail_with_one_line(fla_cli, tmp_path, words, code, message):
    result = fla_cli("demo", "--size", "tiny", "--out", str(tmp_path / "x"), *words)
    assert result.code == code
    assert message in result.err


def test_an_output_folder_that_cannot_be_made_fails_with_one_line(fla_cli, tmp_path):
    (tmp_path / "file").write_text("")
    result = fla_cli("demo", "--out", str(tmp_path / "file" / "run"))
    assert result.code == 1
    assert "cannot be created" in result.err


def test_the_rate_warms_up_and_ends_low():
    recipe = Recipe()
    rates = [_rate(i / 100, recipe) for i in range(101)]
    assert rates[0] < 0.01
    assert max(rates) == pytest.approx(1.0, abs=0.01)
    assert rates[-1] == pytest.approx(recipe.final_rate)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_second_interrupt_stops_at_once():
    interrupt = Interrupt()
    with interrupt.listening():
        signal.raise_signal(signal.SIGINT)
        assert interrupt.asked
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_text_is_streamed_in_whole_characters():
    written: list[str] = []
    streamer = ByteStreamer(written.append, lambda: False)
    streamer.put(torch.tensor([list(b"prompt ")]))
    for byte in "é€a".encode():
        streamer.put(torch.tensor([byte]))
    streamer.end()
    assert "".join(written) == "prompt é€a"
    assert (streamer.text, streamer.tokens) == ("é€a", 6)


def test_speed_and_loss_of_a_curve_without_steps():
    curve = Curve()
    assert curve.bytes_per_second == 0.0
    assert math.isnan(curve.smoothed())
