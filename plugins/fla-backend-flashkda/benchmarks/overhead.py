# SPDX-License-Identifier: MIT
"""What the plugin adds to `flash_kda.fwd`, and how core's Triton path does on the same inputs. Prints JSON.

Times are of the device, by CUDA events with a cold L2, medians of interleaved calls; `host` is what a call takes until
it returns. Nothing is timed that is not right first.
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import time

import flash_kda
import torch

import fla
from fla.backends import last_decision, use_backend
from fla.ops.kda import chunk_kda

#: Sequences, tokens, heads. The first two are where the plugin must cost nothing; the others fill the table of rule.py.
SHAPES = [
    (1, 8192, 96),
    (4, 2048, 16),
    (1, 32768, 16),
    (1, 4096, 4),
    (8, 512, 32),
    (32, 128, 16),
    (1, 512, 8),
    (1, 64, 2),
]
D, BOUND, CALLS = 128, -5.0, 41


def inputs(B, T, H):
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(B, T, H, device="cuda", dtype=torch.bfloat16)
    A_log = torch.rand(H, device="cuda").add(1).log()
    return q, k, v, g, beta, A_log, torch.randn(H * D, device="cuda") * 0.1


def ways(x):
    q, k, v, g, beta, A_log, dt_bias = x
    out, bias = torch.empty_like(v), dt_bias.view(-1, D)

    def direct():
        flash_kda.fwd(q, k, v, g, beta, D**-0.5, out, A_log, bias, BOUND)
        return out

    def op():
        return chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            lower_bound=BOUND,
            A_log=A_log,
            dt_bias=dt_bias,
        )[0]

    def pinned(name):
        def call():
            with use_backend(name, strict=True):
                return op()

        return call

    def states():
        with use_backend("flash_kda", strict=True):
            return chunk_kda(
                q,
                k,
                v,
                g,
                beta,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=BOUND,
                A_log=A_log,
                dt_bias=dt_bias,
            )[0]

    found = {"direct": direct, "direct again": direct, "plugin": pinned("flash_kda"), "plugin, final state": states}
    if chunk_kda.op.triton_path is not None:
        found["core"] = pinned("triton")
    return found


def measure(calls):
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    times = {name: [] for name in calls}
    host = {name: [] for name in calls}
    for turn in range(CALLS + 5):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(1_000_000)  # the host gets ahead, so that only the device is timed
            start.record()
            began = time.perf_counter()
            call()
            took = time.perf_counter() - began
            end.record()
            end.synchronize()
            if turn >= 5:
                times[name].append(start.elapsed_time(end))
                host[name].append(took * 1e6)
    return {n: {"ms": statistics.median(t), "host_us": statistics.median(host[n])} for n, t in times.items()}


def main():
    versions = {"torch": torch.__version__, "fla": fla.__version__, "card": torch.cuda.get_device_name()}
    for name in ("triton", "tokenspeed-flashkda"):
        versions[name] = importlib.metadata.version(name)
    results = {}
    with torch.no_grad():
        for B, T, H in SHAPES:
            shape = f"B{B} T{T} H{H}"
            calls = ways(inputs(B, T, H))
            want = calls["direct"]().float()
            for name, call in calls.items():
                got = call().float()
                ran = last_decision()
                error = ((got - want).norm() / want.norm()).item()
                assert error < 1e-2, f"{name} at {shape}: {error}"
                if not name.startswith("direct"):
                    assert ran is not None
                    assert ran.backend == ("triton" if name == "core" else "flash_kda"), ran
            results[shape] = measure(calls)
    print(json.dumps({"versions": versions, "results": results}, indent=1))


if __name__ == "__main__":
    main()
