# SPDX-License-Identifier: MIT
"""Chunked ops on the CPU against a tight loop over tokens: ``python benchmarks/token_loop.py``.

The loop is float32 with everything unbound beforehand and one small batched product per step, about the best that one
can write token by token. B1 T2048 H4 D64; the ratio of medians is printed with the goal, and the exit code is 1 if an
op misses one. Nothing is printed for an op whose result is wrong.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import last_decision
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.kda import chunk_kda
from fla.ops.simple_gla import chunk_simple_gla

B, T, H, D = 1, 2048, 4, 64
RUNS = 4
BOTH_GOAL = 10.0
# op, forward goal, decay per channel, delta rule
OPS: dict[str, tuple[Callable[..., Any], float, bool, bool]] = {
    "simple_gla": (chunk_simple_gla, 5.0, False, False),
    "gla": (chunk_gla, 2.5, True, False),
    "gated_delta_rule": (chunk_gated_delta_rule, 5.0, False, True),
    "kda": (chunk_kda, 2.5, True, True),
}


def token_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None) -> Tensor:
    """The recurrence token by token; ``beta`` makes it a delta rule. Shapes as for the ops."""
    K, V = q.shape[-1], v.shape[-1]

    def rows(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(B * H, T, -1)

    queries, keys, values = (rows(x).unsqueeze(-2).unbind(1) for x in (q * K**-0.5, k, v))
    decays = rows(g if g.dim() == 4 else g.unsqueeze(-1)).exp().unsqueeze(-1).unbind(1)
    strengths = None if beta is None else rows(beta.unsqueeze(-1)).unsqueeze(-1).unbind(1)
    S = q.new_zeros(B * H, K, V)
    outputs = []
    for t in range(T):
        S = S * decays[t]
        update = values[t]
        if strengths is not None:
            update = (update - torch.bmm(keys[t], S)) * strengths[t]
        S = torch.baddbmm(S, keys[t].transpose(1, 2), update)
        outputs.append(torch.bmm(queries[t], S))
    return torch.stack(outputs, 1).reshape(B, H, T, V).transpose(1, 2)


def forward(fn: Callable[..., Tensor], x: list[Tensor]) -> None:
    with torch.no_grad():
        fn(*x)


def forward_and_backward(fn: Callable[..., Tensor], x: list[Tensor]) -> None:
    fn(*(t.clone().requires_grad_() for t in x)).sum().backward()


def ratio(run: Callable[..., None], fn: Callable[..., Tensor], x: list[Tensor]) -> float:
    """Median time of the loop over that of ``fn``, taken in turns; the first turn warms up."""
    times: dict[str, list[float]] = {"op": [], "loop": []}
    for _ in range(RUNS):
        for name, timed in (("op", fn), ("loop", token_loop)):
            start = time.perf_counter()
            run(timed, x)
            times[name].append(time.perf_counter() - start)
    op, loop = (statistics.median(times[name][1:]) for name in ("op", "loop"))
    return loop / op


def main() -> int:
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor() or platform.machine()}")
    missed = 0
    for name, (op, goal, per_channel, delta) in OPS.items():
        q, k, v = (torch.randn(B, T, H, D) for _ in range(3))
        g = F.logsigmoid(torch.randn(B, T, H, D) if per_channel else torch.randn(B, T, H))
        x = [q, F.normalize(k, dim=-1), v, g, *([torch.rand(B, T, H)] if delta else [])]
        truth = token_loop(*(t.double() for t in x))
        error = float((op(*x)[0] - truth).norm() / truth.norm())
        decision = last_decision()
        if error > 1e-5:
            print(f"{name}: WRONG, error {error:.1e}")
            missed += 1
            continue

        def output(*args: Tensor, op: Callable[..., Any] = op) -> Tensor:
            o: Tensor = op(*args)[0]
            return o

        one, both = ratio(forward, output, x), ratio(forward_and_backward, output, x)
        missed += one < goal or both < BOTH_GOAL
        print(
            f"{name}: forward {one:.1f}x (goal {goal:g}), forward + backward {both:.1f}x (goal {BOTH_GOAL:g}), "
            f"error {error:.1e}, ran on {getattr(decision, 'backend', decision)}"
        )
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
