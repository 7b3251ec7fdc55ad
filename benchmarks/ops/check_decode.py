# SPDX-License-Identifier: MIT
# ruff: noqa: B023  (closures are called before the loop goes on)
"""Check and time decoding on a GPU; part of check_delta.py."""

from __future__ import annotations

import sys
import time

import torch
from check_delta import BF, F32, HF, L, median_ms
from delta_reference import ratio


def check_decode() -> list[tuple[str, float, float]]:
    """The public recurrent ops on Triton against their PyTorch path in float64: what, worst error, limit."""
    results = []
    import torch.nn.functional as F

    from fla.backends import last_decision, use_backend
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    for dtype in (BF, HF, F32):
        for T, K, V, vf in ((1, 128, 128, False), (1, 128, 128, True), (5, 60, 100, False), (3, 256, 64, True)):
            B, H, HV = 3, 2, 4
            rn = lambda *s: torch.randn(*s, device="cuda")
            q, k, v = rn(B, T, H, K).to(dtype), F.normalize(rn(B, T, H, K), dim=-1).to(dtype), rn(B, T, HV, V).to(dtype)
            h0 = rn(B, HV, *((V, K) if vf else (K, V)))
            beta, g, gk = rn(B, T, HV), rn(B, T, HV), rn(B, T, HV, K)
            common = {
                "initial_state": h0,
                "output_final_state": True,
                "use_qk_l2norm_in_kernel": True,
                "state_v_first": vf,
            }
            gate = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "A_log": rn(HV) * 0.5}
            calls = [
                (fused_recurrent_gated_delta_rule, (q, k, v, g), {"beta": beta, **common, **gate, "dt_bias": rn(HV)}),
                (
                    fused_recurrent_kda,
                    (q, k, v, gk, beta),
                    {**common, **gate, "dt_bias": rn(HV * K), "lower_bound": -5.0},
                ),
                (fused_recurrent_kda, (q, k, v, gk, beta), {**common, **gate}),
            ]
            if not vf:
                c = {n: common[n] for n in ("output_final_state", "use_qk_l2norm_in_kernel")}
                calls.append(
                    (fused_recurrent_delta_rule, (q, k, v[:, :, :H].contiguous(), beta[:, :, :H].sigmoid()), c)
                )
            worst = 0.0
            for fn, args, kw in calls:
                with torch.no_grad(), use_backend("triton"):
                    got = fn(*args, **kw)
                    assert "triton" in str(last_decision()), last_decision()
                dbl = lambda x: x.double() if isinstance(x, torch.Tensor) else x
                with torch.no_grad():
                    ref = fn(*map(dbl, args), **{n: dbl(x) for n, x in kw.items()})
                worst = max(worst, *(ratio(a, b) for a, b in zip(got, ref, strict=True)))
            results.append((f"{str(dtype)[6:]} T{T} K{K} V{V} v_first {vf}", worst, 1e-4 if dtype == F32 else 5e-3))
    return results


def time_decode() -> None:
    import torch.nn.functional as F

    from fla.ops._delta.decode import recurrent
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.kda import fused_recurrent_kda

    B, H, D = 64, 32, 128
    rn = lambda *s: torch.randn(*s, device="cuda")
    q, k, v = (rn(B, 1, H, D).to(BF) for _ in range(3))
    h0, beta = rn(B, H, D, D), rn(B, 1, H).sigmoid().to(BF)
    g, gk = F.logsigmoid(rn(B, 1, H)), F.logsigmoid(rn(B, 1, H, D))
    kw = {"initial_state": h0, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    with torch.no_grad():
        for name, fn in (
            ("gdn", lambda: fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, **kw)),
            ("kda", lambda: fused_recurrent_kda(q, k, v, gk, beta, **kw)),
        ):
            t = median_ms(fn, 31)
            torch.cuda.synchronize()
            t0 = time.time()
            for _ in range(200):
                fn()
            host = (time.time() - t0) / 200
            torch.cuda.synchronize()
            print(
                f"decode {name}: kernel {t:.4f} ms, as called {median_ms(fn, 31, 0):.4f}, host {host * 1e3:.4f}",
                flush=True,
            )
        for vf in (False, True):
            row = []
            for bv, w in ((8, 1), (16, 1), (16, 2), (32, 2), (64, 4)):
                for name, decay in (("gdn", {"g": g}), ("kda", {"gk": gk})):
                    f = lambda bv=bv, w=w, decay=decay: recurrent(
                        q, k, v, **decay, beta=beta, state=h0, norm=True, final=True, v_first=vf, launch=(bv, L(w))
                    )
                    row.append(f"{name} {bv}w{w} {median_ms(f, 31):.4f}")
            print(f"decode v_first {vf}: " + "  ".join(row), flush=True)


def main() -> None:
    worst = max(check_decode(), key=lambda r: r[1] / r[2])
    print("decode, worst against its limit:", worst, flush=True)
    if worst[1] > worst[2]:
        sys.exit("no timing: a check failed")
    time_decode()
