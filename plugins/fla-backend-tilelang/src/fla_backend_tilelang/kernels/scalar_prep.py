# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""First stage of the gated delta rule with a decay per head: what a chunk needs besides the caller's q, k and v.

One program a chunk of 64 tokens and value head writes ``T = (I + stril(k k^T ...))^-1``, ``A = tril(q k^T ...)`` in
bfloat16, with norms, decay, scale and write strength folded in, and four fp32 scalars of each token: what multiplies
q S, k S and the update of the state, and the decay of the chunk. Norms come off the diagonals of k k^T and q q^T: q and
k go from memory to the tensor cores untouched.
"""

import tilelang.language as T

from fla_backend_tilelang.kernels.inverse import BF, BLOCK, F16, F32, inverse, inverse_wide

C = 64
LOG2E = 1.4426950408889634
EPS = 1e-6
# e^-104 is 0 in fp32: cutting here changes nothing and keeps sums of decays finite.
LOWEST = -104.0


def scalar_prep(K, dtype, g_dtype, beta_dtype, group, norm, gate, bias, sigmoid):
    """The program. gate: 0 no decay, 1 ``g`` is the log decay, 2 ``g`` goes through the gate with ``A_log``.

    group: value heads a key head.
    """
    rows, H, HV, NT = (T.dynamic(name) for name in ("rows", "H", "HV", "NT"))
    heads_a, heads_b, g_rows = (T.dynamic(name) for name in ("heads_a", "heads_b", "g_rows"))
    by_row = T.GemmWarpPolicy.FullRow
    invert = inverse(C) if norm else inverse_wide(C)
    room = F16 if norm else BF

    @T.prim_func
    def delta_scalar_prep(
        q: T.Tensor((rows, H, K), dtype),
        k: T.Tensor((rows, H, K), dtype),
        g: T.Tensor((g_rows, HV), g_dtype),
        beta: T.Tensor((rows, HV), beta_dtype),
        A_log: T.Tensor((heads_a,), F32),
        dt_bias: T.Tensor((heads_b,), F32),
        table: T.Tensor((NT, 4), "int32"),
        Tm: T.Tensor((NT, HV, C, C), BF),
        A: T.Tensor((NT, HV, C, C), BF),
        SC: T.Tensor((NT, HV, 4, C), F32),
        scale: T.float32,
        beta_scale: T.float32,
    ):
        with T.Kernel(HV, NT, threads=128) as (h, it):
            T.annotate_min_blocks_per_sm(4)
            k_s = T.alloc_shared((C, K), dtype)
            q_s = T.alloc_shared((C, K), dtype)
            X_s = T.alloc_shared((C, C), room)
            P_s = T.alloc_shared((C, C), room)
            if not norm:
                Y_s = T.alloc_shared((C, C), room)
                Q_s = T.alloc_shared((C, C), room)
            D_s = T.alloc_shared((C, BLOCK), F32)
            a_s = T.alloc_shared((C, C), BF)
            t_s = T.alloc_shared((C, C), BF)
            g_s = T.alloc_shared((C,), F32)
            G_s = T.alloc_shared((C,), F32)
            b_s = T.alloc_shared((C,), F32)
            rk_s = T.alloc_shared((C,), F32)
            rq_s = T.alloc_shared((C,), F32)
            # A factor of a row and one of a column, and the decay of both; in registers, next to the tiles.
            G_i = T.alloc_fragment((C,), F32)
            G_j = T.alloc_fragment((C,), F32)
            q_i = T.alloc_fragment((C,), F32)
            k_i = T.alloc_fragment((C,), F32)
            k_j = T.alloc_fragment((C,), F32)
            L = T.alloc_fragment((C, C), F32)
            P = T.alloc_fragment((C, C), F32)
            E = T.alloc_fragment((C, C), F32)
            M = T.alloc_fragment((C, C), room)
            if not norm:
                N = T.alloc_fragment((C, C), room)
            x = T.alloc_local((BLOCK,), F32)
            line = T.alloc_local((BLOCK,), F32)
            tx = T.get_thread_binding()
            row = T.alloc_var("int32", init=table[it, 0])
            valid = T.alloc_var("int32", init=table[it, 1])
            at = T.alloc_var("int32", init=0)
            gate_x = T.alloc_var(F32, init=0.0)
            rate = T.alloc_var(F32, init=0.0)
            loaded = T.alloc_barrier(128)
            T.tma_copy(k[row : row + C, h // group, :], k_s, barrier=loaded)
            T.tma_copy(q[row : row + C, h // group, :], q_s, barrier=loaded)
            T.barrier_arrive(loaded)
            if tx < C:
                # Rows past the end read the last valid one, and are selected away.
                at = row + T.min(tx, T.max(valid - 1, 0))
                rate = T.cast(beta[at, h], F32)
                if gate != 0:
                    gate_x = T.cast(g[at, h], F32)
                if gate == 2:
                    if bias:
                        gate_x = gate_x + dt_bias[h]
                    gate_x = -T.exp(A_log[h]) * (T.max(gate_x, 0.0) + T.log1p(T.exp(-T.abs(gate_x))))
                if gate != 0:
                    g_s[tx] = T.Select(tx < valid, T.max(gate_x, LOWEST) * LOG2E, T.float32(0))
                else:
                    g_s[tx] = 0.0
                if sigmoid:
                    rate = beta_scale / (1.0 + T.exp(-rate))
                b_s[tx] = T.Select(tx < valid, rate, T.float32(0))
            T.cumsum(g_s, G_s, dim=0)
            T.copy(G_s, G_i)
            T.copy(G_s, G_j)
            for i, j in T.Parallel(C, C):
                E[i, j] = T.exp2(T.Select(i >= j, G_i[i] - G_j[j], -T.infinity(F32)))
            T.mbarrier_wait_parity(loaded, 0)
            T.clear(L)
            T.gemm(k_s, k_s, L, transpose_B=True, policy=by_row)
            if norm:
                T.clear(P)
                T.gemm(q_s, q_s, P, transpose_B=True, policy=by_row)
                for i, j in T.Parallel(C, C):
                    if i == j:
                        rk_s[i] = T.Select(i < valid, T.rsqrt(L[i, j] + EPS), T.float32(0))
                        rq_s[i] = T.Select(i < valid, T.rsqrt(P[i, j] + EPS) * scale, T.float32(0))
            else:
                for i in T.Parallel(C):
                    rk_s[i] = T.Select(i < valid, T.float32(1), T.float32(0))
                    rq_s[i] = T.Select(i < valid, scale, T.float32(0))
            T.clear(P)
            T.gemm(q_s, k_s, P, transpose_B=True, policy=by_row)
            if tx < C:
                SC[it, h, 0, tx] = rq_s[tx] * T.exp2(G_s[tx])
                SC[it, h, 1, tx] = rk_s[tx] * T.exp2(G_s[tx])
                SC[it, h, 2, tx] = rk_s[tx] * b_s[tx] * T.exp2(G_s[C - 1] - G_s[tx])
                SC[it, h, 3, tx] = T.exp2(G_s[C - 1])
            T.copy(rq_s, q_i)
            T.copy(rk_s, k_i)
            for j in T.Parallel(C):
                k_j[j] = rk_s[j] * b_s[j]
            # Selected, not multiplied away: rows past the end may hold anything.
            for i, j in T.Parallel(C, C):
                P[i, j] = T.Select((i >= j) and (i < valid), P[i, j] * E[i, j] * (q_i[i] * k_j[j]), T.float32(0))
                L[i, j] = T.Select((i > j) and (i < valid), L[i, j] * E[i, j] * (k_i[i] * k_j[j]), T.float32(0))
            for i, j in T.Parallel(C, C):
                if i // BLOCK == j // BLOCK:
                    D_s[i, j % BLOCK] = L[i, j]
            T.copy(P, a_s)
            T.copy(a_s, A[it, h, :, :])
            if norm:
                invert(L, D_s, X_s, M, P, P_s, x, line, tx)
            else:
                invert(L, D_s, X_s, Y_s, M, N, P, P_s, Q_s, x, line, tx)
            T.copy(X_s, t_s)
            T.copy(t_s, Tm[it, h, :, :])

    return delta_scalar_prep
