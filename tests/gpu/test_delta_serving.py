# SPDX-License-Identifier: MIT
"""Serving forms of the delta family on a GPU: pools of states, slots of -1, drafts, updates in place, graph mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from fla.backends import last_decision, use_backend
from fla.ops.gdn2.fused_recurrent import fused_recurrent_gdn2_fwd
from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

pytestmark = pytest.mark.gpu

OPS = {"kda": fused_recurrent_kda_fwd, "gdn2": fused_recurrent_gdn2_fwd}
SLOTS = {
    "a slot a sequence": [5, -1, 2],
    "a slot a token": [[1, 2], [3, -1], [-1, 0]],
    "drafts": [[1, 2], [3, 4], [5, 0]],
}


def inputs(op: str, B: int, T: int, slots: int, K: int = 60, V: int = 100, H: int = 2, HV: int = 4, v_first=False):
    gen = torch.Generator(device="cuda").manual_seed(0)
    rn = lambda *s: torch.randn(*s, generator=gen, device="cuda")
    x = {"q": rn(B, T, H, K), "k": F.normalize(rn(B, T, H, K), dim=-1), "v": rn(B, T, HV, V)}
    x["g"] = F.logsigmoid(rn(B, T, HV, K))
    if op == "kda":
        x["beta"] = rn(B, T, HV).sigmoid()
    else:
        x["b"], x["w"] = rn(B, T, HV, K).sigmoid(), rn(B, T, HV, V).sigmoid()
    return x, rn(slots, HV, *((V, K) if v_first else (K, V)))


def both(op: str, x: dict, pool: torch.Tensor, **kw):
    """Outputs, states and the pool of Triton and of PyTorch."""
    found = []
    for name in ("triton", "torch"):
        states = pool.clone()
        # Rows of skipped sequences keep what was there.
        out = torch.full_like(x["v"], 7.0)
        with torch.no_grad(), use_backend(name):
            o, last = OPS[op](**x, initial_state=states, out=out, **kw)
            assert name in str(last_decision())
        found.append((o, last, states))
    return found


def agree(found, tolerance=1e-4):
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("slots", list(SLOTS))
@pytest.mark.parametrize("op", list(OPS))
def test_pool_of_states(op, slots, in_place, v_first):
    index = torch.tensor(SLOTS[slots], device="cuda")
    x, pool = inputs(op, 3, 1 if index.dim() == 1 else 2, 8, v_first=v_first)
    accepted = torch.tensor([2, 1, 2], device="cuda") if slots == "drafts" else None
    agree(
        both(
            op, x, pool, ssm_state_indices=index, num_accepted_tokens=accepted, inplace_final_state=in_place,
            output_final_state=True, use_qk_l2norm_in_kernel=True, state_v_first=v_first,
        )
    )  # fmt: skip


@pytest.mark.parametrize("op", list(OPS))
def test_drafts_that_were_not_accepted_leave_no_trace(op):
    """Case G20: of 5 draft tokens 2 are accepted; going on from there equals never having drafted the others."""
    x, pool = inputs(op, 1, 5, 8)
    index = torch.arange(1, 6, device="cuda")[None]
    two = torch.tensor([2], device="cuda")
    run = lambda a, b, states, **kw: OPS[op](
        **{n: t[:, a:b] for n, t in x.items()}, initial_state=states, inplace_final_state=True,
        ssm_state_indices=index, **kw,
    )[0]  # fmt: skip
    with torch.no_grad(), use_backend("triton"):
        drafted, plain = pool.clone(), pool.clone()
        run(0, 5, drafted)
        run(0, 2, plain)
        assert torch.equal(drafted[index[0, 1]], plain[index[0, 1]])
        assert torch.equal(
            run(2, 4, drafted, num_accepted_tokens=two), run(2, 4, plain, num_accepted_tokens=two)
        )  # fmt: skip
    assert torch.equal(drafted[index[0, :2]], plain[index[0, :2]])


@pytest.mark.parametrize("op", list(OPS))
def test_packed_sequences_of_a_pool(op):
    x, pool = inputs(op, 1, 7, 6)
    agree(
        both(
            op, x, pool, cu_seqlens=torch.tensor([0, 3, 3, 7], device="cuda"), inplace_final_state=True,
            ssm_state_indices=torch.tensor([4, 1, 2], device="cuda"),
        )
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_16_bits_in_place(dtype):
    x, pool = inputs("kda", 2, 1, 2, K=128, V=128)
    x = {n: t.to(dtype) for n, t in x.items()}
    agree(both("kda", x, pool.to(dtype), inplace_final_state=True), 2e-2)


def test_strided_pools_are_read_and_written_where_they_are():
    x, wide = inputs("kda", 3, 1, 16, K=64, V=64)
    pool = wide[::2]
    before = wide.clone()
    with torch.no_grad(), use_backend("triton"):
        OPS["kda"](
            **x, initial_state=pool, inplace_final_state=True, ssm_state_indices=torch.tensor([5, 0, 2], device="cuda")
        )
    assert torch.equal(wide[1::2], before[1::2])
    changed = [n for n in range(8) if not torch.equal(pool[n], before[::2][n])]
    assert changed == [0, 2, 5]


def test_a_graph_of_a_decoding_step_follows_its_slots():
    x, pool = inputs("kda", 3, 1, 8, K=128, V=128)
    index = torch.tensor([5, -1, 2], device="cuda")
    out = torch.zeros_like(x["v"])
    step = lambda states: OPS["kda"](
        **x, initial_state=states, inplace_final_state=True, ssm_state_indices=index, out=out
    )
    with torch.no_grad(), use_backend("triton"):
        step(pool.clone())
        torch.cuda.synchronize()
        states = pool.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(states)
        states.copy_(pool)
        index.copy_(torch.tensor([1, 7, -1], device="cuda"))
        graph.replay()
        got, after = out.clone(), states.clone()
        out.zero_()
        states.copy_(pool)
        step(states)
    assert torch.equal(after, states)
    assert torch.equal(got[:2], out[:2])


def test_graph_mode_takes_any_number_of_sequences_up_to_the_most():
    from fla.ops.kda import chunk_kda

    x, _ = inputs("kda", 1, 256, 1, K=64, V=64)
    x = {n: t.bfloat16() for n, t in x.items()}
    cu = torch.tensor([0, 100, 200, 256, 256], device="cuda", dtype=torch.int32)
    y = {n: t.requires_grad_() for n, t in x.items()}
    run = lambda: chunk_kda(
        **y, use_qk_l2norm_in_kernel=True, safe_gate=True, cu_seqlens=cu, use_graph=True, max_num_seqs=4,
        output_final_state=True,
    )  # fmt: skip
    do = torch.randn_like(y["v"])

    def step():
        o, ht = run()
        return o, ht, *torch.autograd.grad(o, list(y.values()), do)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for offsets in ([0, 30, 31, 250, 250], [0, 0, 256, 256, 256], [0, 64, 64, 64, 64]):
        cu.copy_(torch.tensor(offsets, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        got = [t.clone() for t in captured]
        want = step()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        end = offsets[-1]
        assert not got[0][:, end:].any()
        assert all(not t[:, end:].any() for t in got[2:])
