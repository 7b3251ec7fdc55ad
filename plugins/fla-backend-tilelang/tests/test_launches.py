# SPDX-License-Identifier: MIT
"""What the programs are given, on the CPU with a recorder in their place."""

from __future__ import annotations

import pytest
import torch
from fla_backend_tilelang import scalar, timepass, tokens, vector

H, HV, K, V = 2, 4, 64, 128
SWITCHES = scalar.Switches(norm=True, sigmoid=True, negative=True, gate=True)


@pytest.fixture
def launched(monkeypatch):
    """Name, choices and arguments of each launch."""
    found = []

    def program(module, name, **choices):
        return lambda *args: found.append((name, choices, args))

    for module in (scalar, vector, timepass):
        monkeypatch.setattr(module, "program", program)
    for module in (scalar, vector):
        monkeypatch.setattr(module, "choose_block", lambda *call: 64)
    return found


def off(*shape, dtype=torch.bfloat16):
    """Contiguous, and one element off every boundary."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1, dtype=dtype)[1:].view(shape)


def strided(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, 3, dtype=dtype)[..., 1]


def call(engine, make, B=1, T=70, cu=None, initial=None, final=True, v_first=False, dtype=torch.bfloat16):
    wide = engine is vector
    g = make(B, T, HV, K, dtype=dtype) if wide else make(B, T, HV, dtype=torch.float32)
    x = (make(B, T, H, K, dtype=dtype), make(B, T, H, K, dtype=dtype), make(B, T, HV, V, dtype=dtype), g)
    x += (make(B, T, HV, dtype=dtype),)
    bias = make(HV, K, dtype=torch.float32) if wide else make(1, HV)
    gate = (make(1, 1, HV, 1, dtype=torch.float32), bias, *((-5.0,) if wide else ()))
    return engine.forward(*x, None, initial, final, v_first, cu, *gate, SWITCHES)


@pytest.mark.parametrize("engine", [scalar, vector], ids=["gdn", "kda"])
@pytest.mark.parametrize("make", [off, strided])
@pytest.mark.parametrize("cu", [None, torch.tensor([0, 3, 3, 70]), torch.tensor([0, 70], dtype=torch.int32)], ids=str)
def test_every_tensor_is_contiguous_and_aligned(launched, engine, make, cu):
    N = 1 if cu is None else cu.numel() - 1
    initial = make(N, HV, V, K, dtype=torch.float16)
    o, final = call(engine, make, cu=cu, initial=initial, v_first=True)
    assert o.shape == (1, 70, HV, V)
    assert final.shape == (N, HV, V, K)
    assert final.dtype == torch.float32
    assert [name.rpartition("_")[2] for name, _, _ in launched] == ["prep", "scan", "scan"]
    for _, _, args in launched:
        for i, x in enumerate(args):
            if isinstance(x, torch.Tensor):
                assert x.is_contiguous(), i
                assert x.data_ptr() % 16 == 0, i
        assert not any(isinstance(x, torch.Tensor) and x.dtype == torch.int64 for x in args)
    prep = launched[0][2]
    assert 2.0 in [x for x in prep if isinstance(x, float)]  # the factor of the sigmoid
    assert launched[0][1]["group"] == HV // H


@pytest.mark.parametrize("engine", [scalar, vector], ids=["gdn", "kda"])
def test_float16_is_in_the_inputs_and_outputs_alone(launched, engine):
    """It has no room for states and what follows from them."""
    o, _ = call(engine, strided, dtype=torch.float16)
    assert o.dtype == torch.float16
    prep, *scans = launched
    assert prep[1]["dtype"] == "float16"
    written = [x for x in prep[2] if isinstance(x, torch.Tensor) and x.shape[1:2] == (HV,) and x.dim() > 3]
    assert {x.dtype for x in written} == {torch.bfloat16, torch.float32}
    for _, choices, (q, k, kk, v, Tm, A, *_) in scans:
        assert choices["dtype"] == "float16"
        assert v.dtype == torch.float16
        assert {x.dtype for x in (q, k, kk, Tm, A)} == {torch.bfloat16}


@pytest.mark.parametrize("engine", [scalar, vector], ids=["gdn", "kda"])
@pytest.mark.parametrize("cu", [None, torch.tensor([0])], ids=["batch", "packed"])
def test_nothing_is_launched_without_sequences_or_tokens(launched, engine, cu):
    for B, T in ((1, 0), (0, 8)) if cu is None else ((1, 0),):
        o, final = call(engine, strided, B=B, T=T, cu=cu)
        assert o.shape == (B, T, HV, V)
        assert final.shape == (B if cu is None else 0, HV, K, V)
        assert not final.any()
    assert not launched


def test_states_are_handed_on_without_tokens(launched):
    state = torch.randn(2, HV, V, K, dtype=torch.float16)
    _, final = call(scalar, strided, B=2, T=0, initial=state, v_first=True)
    assert torch.equal(final, state.float())
    assert final.data_ptr() != state.data_ptr()


def test_tables_of_a_batch():
    rows = tokens.Tokens.of(2, 70, 64, None).table(torch.device("cpu"))
    assert rows[:, :2].tolist() == [[0, 64], [64, 6], [70, 64], [134, 6]]


def test_tables_made_under_capture_are_not_kept(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(tokens, "_rows", lambda device, *sizes: made.append(device) or torch.zeros(1, 4))
    device = torch.device("cuda", 0)
    for _ in range(2):
        tokens._batch_table(device, 1, 64, 1, 64)
    assert made == [device, device]
