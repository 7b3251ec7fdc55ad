# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""First stage of the gated delta rule with a decay per head: what a chunk needs besides the caller's q, k and v.

One program a chunk of 64 tokens and value head writes ``T = (I + stril(k k^T ...))^-1``, ``A = tril(q k^T ...)`` in the
dtype of q, with norms, decay, scale and write strength folded in, and four fp32 scalars of each token: what multiplies
q S, k S and the update of the state, and the decay of the chunk. Norms come off the diagonals of k k^T and q q^T: q and
k go from memory to the tensor cores untouched.
"""

import tilelang.language as T

from fla_backend_tilelang.kernels.inverse import BLOCK, F16, F32, inverse

C = 64
LOG2E = 1.4426950408889634
EPS = 1e-6
# e^-104 is 0 in fp32: cutting here changes nothing and keeps sums of decays finite.
LOWEST = -104.0


def scalar_prep(K, dtype, g_dtype, beta_dtype, norm, gate, bias, sigmoid, varlen):
    """The program. gate: 0 no decay, 1 ``g`` is the log decay, 2 ``g`` goes through the gate with ``A_log``."""
    rows, H, HV, NT = (T.dynamic(name) for name in ("rows", "H", "HV", "NT"))
    table_rows, heads_a, heads_b, g_rows = (T.dynamic(name) for name in ("table_rows", "heads_a", "heads_b", "g_rows"))
    by_row = T.GemmWarpPolicy.FullRow
    invert = inverse(C)

    @T.prim_func
    def delta_scalar_prep(
        q: T.Tensor((rows, H, K), dtype),
        k: T.Tensor((rows, H, K), dtype),
        g: T.Tensor((g_rows, HV), g_dtype),
        beta: T.Tensor((rows, HV), beta_dtype),
        A_log: T.Tensor((heads_a,), F32),
        dt_bias: T.Tensor((heads_b,), F32),
        table: T.Tensor((table_rows, 4), "int32"),
        Tm: T.Tensor((NT, HV, C, C), dtype),
        A: T.Tensor((NT, HV, C, C), dtype),
        SC: T.Tensor((NT, HV, 4, C), F32),
        length: T.int32,
        scale: T.float32,
        beta_scale: T.float32,
    ):
        with T.Kernel(HV, NT, threads=128) as (h, it):
            k_s = T.alloc_shared((C, K), dtype)
            q_s = T.alloc_shared((C, K), dtype)
            X_s = T.alloc_shared((C, C), F16)
            P_s = T.alloc_shared((C, C), F16)
            D_s = T.alloc_shared((C, BLOCK), F32)
            o_s = T.alloc_shared((C, C), dtype)
            g_s = T.alloc_shared((C,), F32)
            G_s = T.alloc_shared((C,), F32)
            b_s = T.alloc_shared((C,), F32)
            rk_s = T.alloc_shared((C,), F32)
            rq_s = T.alloc_shared((C,), F32)
            L = T.alloc_fragment((C, C), F32)
            P = T.alloc_fragment((C, C), F32)
            M = T.alloc_fragment((C, C), F16)
            x = T.alloc_local((BLOCK,), F32)
            line = T.alloc_local((BLOCK,), F32)
            tx = T.get_thread_binding()
            per = T.max(T.ceildiv(length, C), 1)
            row = table[it, 0] if varlen else (it // per) * length + (it % per) * C
            valid = table[it, 1] if varlen else T.min(C, length - (it % per) * C)
            hk = T.truncdiv(h * H, HV)
            loaded = T.alloc_barrier(128)
            T.tma_copy(k[row : row + C, hk, :], k_s, barrier=loaded)
            T.tma_copy(q[row : row + C, hk, :], q_s, barrier=loaded)
            T.barrier_arrive(loaded)
            for i in T.Parallel(C):
                b_s[i] = T.if_then_else(i < valid, T.cast(beta[row + i, h], F32), 0.0)
                if sigmoid:
                    b_s[i] = T.if_then_else(i < valid, beta_scale / (1.0 + T.exp(-b_s[i])), 0.0)
                if gate == 0:
                    g_s[i] = 0.0
                else:
                    g_s[i] = T.if_then_else(i < valid, T.cast(g[row + i, h], F32), 0.0)
                if gate == 2:
                    if bias:
                        g_s[i] += dt_bias[h]
                    g_s[i] = -T.exp(A_log[h]) * (T.max(g_s[i], 0.0) + T.log(1.0 + T.exp(-T.abs(g_s[i]))))
                if gate != 0:
                    g_s[i] = T.if_then_else(i < valid, T.max(g_s[i], LOWEST) * LOG2E, 0.0)
            T.cumsum(g_s, G_s, dim=0)
            T.mbarrier_wait_parity(loaded, 0)
            T.clear(L)
            T.gemm(k_s, k_s, L, transpose_B=True, policy=by_row)
            if norm:
                T.clear(P)
                T.gemm(q_s, q_s, P, transpose_B=True, policy=by_row)
                for i, j in T.Parallel(C, C):
                    if i == j:
                        rk_s[i] = T.if_then_else(i < valid, T.rsqrt(L[i, j] + EPS), 0.0)
                        rq_s[i] = T.if_then_else(i < valid, T.rsqrt(P[i, j] + EPS) * scale, 0.0)
            else:
                for i in T.Parallel(C):
                    rk_s[i] = T.if_then_else(i < valid, 1.0, 0.0)
                    rq_s[i] = T.if_then_else(i < valid, scale, 0.0)
            T.clear(P)
            T.gemm(q_s, k_s, P, transpose_B=True, policy=by_row)
            for i in T.Parallel(C):
                SC[it, h, 0, i] = rq_s[i] * T.exp2(G_s[i])
                SC[it, h, 1, i] = rk_s[i] * T.exp2(G_s[i])
                SC[it, h, 2, i] = rk_s[i] * b_s[i] * T.exp2(G_s[C - 1] - G_s[i])
                SC[it, h, 3, i] = T.exp2(G_s[C - 1])
            # Selected, not multiplied away: rows past the end may hold anything.
            for i, j in T.Parallel(C, C):
                P[i, j] = T.if_then_else(
                    (i >= j) and (i < valid), P[i, j] * T.exp2(G_s[i] - G_s[j]) * rq_s[i] * (rk_s[j] * b_s[j]), 0.0
                )
                L[i, j] = T.if_then_else(
                    (i > j) and (i < valid), L[i, j] * T.exp2(G_s[i] - G_s[j]) * rk_s[i] * (rk_s[j] * b_s[j]), 0.0
                )
            for i, j in T.Parallel(C, C):
                if i // BLOCK == j // BLOCK:
                    D_s[i, j % BLOCK] = L[i, j]
            T.copy(P, o_s)
            T.copy(o_s, A[it, h, :, :])
            invert(L, D_s, X_s, M, P, P_s, x, line, tx)
            T.copy(X_s, o_s)
            T.copy(o_s, Tm[it, h, :, :])

    return delta_scalar_prep
