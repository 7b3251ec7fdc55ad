# SPDX-License-Identifier: MIT
from __future__ import annotations

import math

import numpy as np
import pytest

from fla.cli._demo.corpus import is_held_out, load_corpus
from fla.cli._demo.ngram import NgramModel


@pytest.fixture
def tree(tmp_path):
    for i in range(64):
        (tmp_path / f"module_{i}.py").write_text(f"value = {i}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("assert True\n")
    (tmp_path / "notes.txt").write_text("no source")
    return tmp_path


def test_corpus_splits_whole_files_by_path_and_skips_tests(tree):
    corpus = load_corpus(tree)
    assert corpus.train_files + corpus.held_out_files == 64
    texts = bytes(corpus.train).split(b"\0") + bytes(corpus.held_out).split(b"\0")
    assert sorted(t for t in texts if t) == sorted(f"value = {i}\n".encode() for i in range(64))
    held_out = {i for i in range(64) if f"value = {i}\n".encode() in bytes(corpus.held_out).split(b"\0")}
    assert held_out == {i for i in range(64) if is_held_out(f"module_{i}.py")}


def test_corpus_is_the_same_twice(tree):
    first, second = load_corpus(tree), load_corpus(tree)
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.held_out, second.held_out)


def test_corpus_without_sources_names_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=tmp_path.name):
        load_corpus(tmp_path)


def test_standard_library_is_there_and_large_enough():
    corpus = load_corpus(limit=2 << 20)
    assert len(corpus.train) > 1 << 20
    assert len(corpus.held_out) > 1 << 14


def witten_bell(history: bytes, context: bytes, byte: int) -> float:
    """The smoothing formula, written out for one prediction."""
    n = len(context)
    followers = [history[i + n] for i in range(len(history) - n) if history[i : i + n] == context]
    lower = witten_bell(history, context[1:], byte) if context else 1 / 256
    kinds = len(set(followers))
    return (followers.count(byte) + kinds * lower) / (len(followers) + kinds) if followers else lower


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_counted_model_equals_the_formula(order):
    train, held_out = b"abracadabra, abacus", b"a cab, abracad\xff"
    got = NgramModel(np.frombuffer(train, np.uint8), order).probabilities(np.frombuffer(held_out, np.uint8))
    want = [witten_bell(train, held_out[i - order : i], held_out[i]) for i in range(order, len(held_out))]
    assert np.allclose(got, want, rtol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_probabilities_of_all_bytes_sum_to_one(order):
    train = np.frombuffer(b"the cat sat on the mat", np.uint8)
    model = NgramModel(train, order)
    for context in (b"the", b"zzz"):
        context = context[3 - order :]
        data = [np.frombuffer(context + bytes([b]), np.uint8) for b in range(256)]
        assert math.isclose(sum(model.probabilities(d)[0] for d in data), 1.0, rel_tol=1e-9)


def test_longer_contexts_predict_source_text_better():
    corpus = load_corpus(limit=1 << 20)
    bits = [NgramModel(corpus.train, order).bits_per_byte(corpus.held_out[:20000]) for order in range(4)]
    assert bits == sorted(bits, reverse=True)
    assert bits[0] < 8.0


def test_text_shorter_than_a_context_gives_no_predictions():
    assert len(NgramModel(np.frombuffer(b"abcdef", np.uint8), 3).probabilities(np.frombuffer(b"ab", np.uint8))) == 0
