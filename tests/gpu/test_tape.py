# SPDX-License-Identifier: MIT
"""What is written out of a call gives, bit for bit, what the call itself gives: views, streams, threads and graphs."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fla.ops._common import served, tape
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

pytestmark = pytest.mark.gpu

OPS = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
DECODE = {"gdn": fused_recurrent_gated_delta_rule, "kda": fused_recurrent_kda}
B, T, H, D = 2, 128, 2, 128


def arguments(name, seed=0, packed=False, state=False):
    gen = torch.Generator(device="cuda").manual_seed(seed)
    b, t = (1, B * T) if packed else (B, T)
    rn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
    q, k, v = (rn(b, t, H, D).bfloat16() for _ in range(3))
    g = F.logsigmoid(rn(b, t, H)) if name == "gdn" else F.logsigmoid(rn(b, t, H, D)).bfloat16()
    x = [q, k, v, g, rn(b, t, H).sigmoid().bfloat16()]
    flags = {"use_qk_l2norm_in_kernel": True}
    if name == "kda":
        flags["safe_gate"] = True
    if packed:
        flags["cu_seqlens"] = torch.tensor([0, 70, 70, b * t], device="cuda")
    if state:
        flags |= {"initial_state": rn(b, H, D, D), "output_final_state": True}
    return x, flags


def step(name, x, flags):
    """Inference, and a training step."""
    with torch.no_grad():
        out = [t for t in OPS[name](*x, **flags) if t is not None]
    x = [t.detach().requires_grad_() for t in x]
    results = [t for t in OPS[name](*x, **flags) if t is not None]
    do = [torch.sin(torch.arange(t.numel(), device="cuda")).view(t.shape).to(t.dtype) for t in results]
    return [*out, *(t.detach() for t in results), *torch.autograd.grad(results, x, do)]


def unwritten(m):
    """Have bodies run instead of what is written out of them."""
    m.setattr(tape, "replayed", lambda tapes, key, device, body, inputs, *static: body(*inputs, *static))
    m.setattr(tape.Known, "first", lambda *call: None)
    m.setattr(served, "_USUAL", "no such body")


def itself(name, x, flags, monkeypatch):
    """The step with nothing written out."""
    with monkeypatch.context() as m:
        unwritten(m)
        return step(name, x, flags)


def written(monkeypatch):
    """Names of the bodies that ran as written out."""
    names = []
    plain = tape.replayed

    def replayed(tapes, key, *rest):
        if callable(tapes.get(key)):
            names.append(key)
        return plain(tapes, key, *rest)

    first = tape.Known.first

    def before_its_node(known, name, inputs):
        made = first(known, name, inputs)
        if made is not None:
            names.append(name)
            # The backward that follows goes straight there.
            if callable(known.tapes.get(served._USUAL)):
                names.append(served._USUAL)
        return made

    monkeypatch.setattr(tape, "replayed", replayed)
    monkeypatch.setattr(tape.Known, "first", before_its_node)
    return names


def same(got, want):
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), (i, float((a.float() - b.float()).abs().max()))


@pytest.mark.parametrize("kind", [{}, {"packed": True}, {"state": True}], ids=["dense", "packed", "states"])
@pytest.mark.parametrize("name", OPS)
def test_new_values_in_new_buffers(name, kind, monkeypatch):
    names = written(monkeypatch)
    kept = []
    for seed in range(5):
        x, flags = arguments(name, seed, **kind)
        kept.append(x)  # so that every call has buffers of its own
        got = step(name, x, flags)
        same(got, itself(name, x, flags, monkeypatch))
    assert len(names) >= 3 * 3, names


def tokens(name, seed):
    """Arguments of one step for three sequences, and states."""
    gen = torch.Generator(device="cuda").manual_seed(seed)
    rn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
    q, k, v = (rn(3, 1, H, D).bfloat16() for _ in range(3))
    g = F.logsigmoid(rn(3, 1, H, D) if name == "kda" else rn(3, 1, H))
    return (q, k, v, g), rn(3, 1, H).sigmoid().bfloat16(), rn(3, H, D, D)


@pytest.mark.parametrize("name", OPS)
def test_decoding_with_new_values_in_new_buffers(name, monkeypatch):
    names = written(monkeypatch)
    kept = []
    for seed in range(5):
        x, beta, state = tokens(name, seed)
        kept.append((x, beta, state))

        def steps(x=x, beta=beta, state=state):
            flags = {"beta": beta, "initial_state": state, "use_qk_l2norm_in_kernel": True}
            out = [*DECODE[name](*x, output_final_state=True, **flags)]
            if name == "kda":
                pool, slots = state.clone(), torch.tensor([2, -1, 0], dtype=torch.int32, device="cuda")
                flags["initial_state"] = pool
                o, back = fused_recurrent_kda_fwd(*x, ssm_state_indices=slots, **flags)
                assert back is pool
                out += [o, pool]
            return out

        with torch.no_grad():
            got = steps()
            with monkeypatch.context() as m:
                unwritten(m)
                want = steps()
        same(got, want)
    assert names.count("step") == (3 if name == "gdn" else 6)


@pytest.mark.parametrize("name", OPS)
def test_views_of_other_strides_and_alignment(name, monkeypatch):
    x, flags = arguments(name)
    for _ in range(3):
        want = step(name, x, flags)
    transposed = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]
    wider = [torch.cat([t, t], 2)[:, :, : t.shape[2]] for t in x]
    shifted = []
    for t in x:
        room = torch.empty(t.numel() + 3, dtype=t.dtype, device="cuda")[3:]
        shifted.append(room.copy_(t.flatten()).view(t.shape))
    for view in (transposed, wider, x):
        same(step(name, view, flags), want)
    # Off a 16-byte boundary other kernels run.
    for view in (shifted, [*x[:2], *shifted[2:]]):
        for a, b in zip(step(name, view, flags), want, strict=True):
            assert (a.float() - b.float()).norm() < 5e-3 * b.float().norm()


@pytest.mark.parametrize("name", OPS)
def test_streams_and_threads(name):
    cases = [arguments(name, seed) for seed in range(4)]
    wants = [step(name, *case) for case in cases]
    for case in cases:
        step(name, *case)
    torch.cuda.synchronize()
    faults = []

    def run(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(20):
                got = step(name, *cases[i])
                stream.synchronize()
                faults.extend(i for a, b in zip(got, wants[i], strict=True) if not torch.equal(a, b))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


@pytest.mark.parametrize("name", OPS)
def test_a_graph_of_a_written_out_step_follows_new_values(name):
    x, flags = arguments(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step(name, x, flags)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(name, x, flags)
    others, _ = arguments(name, 7)
    for a, b in zip(x, others, strict=True):
        a.copy_(b)
    graph.replay()
    torch.cuda.synchronize()
    same(captured, step(name, others, flags))


@pytest.mark.parametrize("name", OPS)
def test_nothing_is_kept_alive(name):
    for _ in range(4):
        step(name, *arguments(name))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for seed in range(4):
        step(name, *arguments(name, seed))
    # Autograd's thread of the device lets go of its last gradients when it next runs.
    for _ in range(100):
        if torch.cuda.memory_allocated() == before:
            break
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before
