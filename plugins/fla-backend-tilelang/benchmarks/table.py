# SPDX-License-Identifier: MIT
"""The public ops under a pin of this backend and of core, shape by shape: what the table in `rule.py` is made of.

Times are of the device with a cold L2, launches hidden; `host` is what a call takes until it returns. Nothing is timed
that is not right first.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch

from fla.backends import last_decision, use_backend
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda

#: Sequences, tokens, heads, K = V.
SHAPES = [
    (1, 8192, 96, 128),
    (4, 2048, 16, 128),
    (1, 32768, 16, 128),
    (1, 8192, 16, 128),
    (1, 4096, 4, 128),
    (8, 512, 32, 128),
    (32, 128, 16, 128),
    (1, 512, 8, 128),
    (1, 64, 2, 128),
    (1, 8192, 192, 64),
]
CALLS = 21


def call(op, B, T, H, D):
    torch.manual_seed(0)
    bf = lambda *shape: torch.randn(*shape, device="cuda").bfloat16()
    x = {"q": bf(B, T, H, D), "k": bf(B, T, H, D), "v": bf(B, T, H, D), "use_qk_l2norm_in_kernel": True}
    if op is chunk_kda:
        x |= {"g": bf(B, T, H, D), "beta": bf(B, T, H), "A_log": torch.rand(H, device="cuda").log()}
        x |= {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}
        return x
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, device="cuda"))
    return x | {"g": g, "beta": torch.rand(B, T, H, device="cuda").bfloat16()}


def main() -> None:
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    print(torch.cuda.get_device_name(), torch.__version__)
    ops = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}
    for op in (ops[name] for name in sys.argv[1:] or ops):
        for shape in SHAPES:
            x = call(op, *shape)
            results, times, host = {}, {}, {}
            with torch.no_grad():
                for name in ("tilelang", "triton"):
                    with use_backend(name, strict=True):
                        results[name] = op(**x)[0].float()
                    assert last_decision().backend == name
                off = ((results["tilelang"] - results["triton"]).norm() / results["triton"].norm()).item()
                assert off < 1e-2, (op, shape, off)
                for turn in range(CALLS + 3):
                    for name in ("tilelang", "triton"):
                        with use_backend(name, strict=True):
                            a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                            flush.zero_()
                            torch.cuda._sleep(800_000)
                            a.record()
                            began = time.perf_counter()
                            op(**x)
                            took = time.perf_counter() - began
                            b.record()
                            b.synchronize()
                        if turn >= 3:
                            times.setdefault(name, []).append(a.elapsed_time(b))
                            host.setdefault(name, []).append(took * 1e6)
            row = {n: (round(statistics.median(t), 4), round(statistics.median(host[n]))) for n, t in times.items()}
            print(op.__name__, *shape, row, f"apart {off:.1e}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
