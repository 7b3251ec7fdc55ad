# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""First stage of the delta rule with a decay per channel (KDA) whose gates lie in [-5, 0].

One program takes 64 tokens of a value head as two chunks of 32 and writes, for each chunk, the scaled tiles
``k e^G``, ``k e^(G_L - G)`` and ``scale q e^G`` (normed, G counted from the start of the chunk), ``T diag(beta)`` with
``T = (I + stril(beta_i k_i e^(G_i - G_j) k_j))^-1``, ``tril(q_i e^(G_i - G_j) k_j)`` and ``e^(G_L)``.

32 gates of at least -5 are 230.8 bits: counted from 116 bits below the start of the chunk, both factors of
e^(G_i - G_j) stay inside the exponents of bfloat16, and a chunk needs no smaller blocks. What overflows belongs to
pairs that are selected away. Sums over tokens are matrix products with 0 and 1, gates rounded once to float16.
"""

import tilelang.language as T
from tilelang.layout import make_swizzled_layout

from fla_backend_tilelang.kernels.inverse import BF, BLOCK, F16, F32, inverse, inverse_wide
from fla_backend_tilelang.kernels.scalar_prep import EPS, LOG2E

C, R = 32, 64
SHIFT = 116.0
UNSHIFT = 2.0**-116
LOWEST = -5.0


def vector_prep(K, dtype, g_dtype, beta_dtype, group, norm, gate, rate, bias, sigmoid, fit=3):
    """The program. gate: 1 ``g`` is the log decay, 2 bounded: ``lower * sigmoid(exp(A_log) (g + dt_bias))``.

    group: value heads a key head; rate: there is an ``A_log``; fit: programs that a
    multiprocessor shall hold.
    """
    rows, H, HV, NT = (T.dynamic(name) for name in ("rows", "H", "HV", "NT"))
    heads_a, heads_b = (T.dynamic(name) for name in ("heads_a", "heads_b"))
    by_row = T.GemmWarpPolicy.FullRow
    invert = inverse(C) if norm else inverse_wide(C)
    room = F16 if norm else BF
    # Gates in the dtype of the tiles come with them.
    own = g_dtype == dtype == BF

    @T.prim_func
    def delta_vector_prep(
        q: T.Tensor((rows, H, K), dtype),
        k: T.Tensor((rows, H, K), dtype),
        g: T.Tensor((rows, HV, K), g_dtype),
        beta: T.Tensor((rows, HV), beta_dtype),
        A_log: T.Tensor((heads_a,), F32),
        dt_bias: T.Tensor((heads_b, K), F32),
        table: T.Tensor((NT, 4), "int32"),
        KD: T.Tensor((NT, HV, R, K), BF),
        KU: T.Tensor((NT, HV, R, K), BF),
        QD: T.Tensor((NT, HV, R, K), BF),
        Tm: T.Tensor((NT, HV, R, C), BF),
        A: T.Tensor((NT, HV, R, C), BF),
        SC: T.Tensor((NT, HV, 2, K), F32),
        scale: T.float32,
        beta_scale: T.float32,
        lower: T.float32,
    ):
        with T.Kernel(HV, NT, threads=128) as (h, it):
            T.annotate_min_blocks_per_sm(fit)
            k_s = T.alloc_shared((R, K), dtype)
            q_s = T.alloc_shared((R, K), dtype)
            g_s = T.alloc_shared((R, K), F16)
            kc_s = T.alloc_shared((R, K), BF)
            out_s = T.alloc_shared((R, K), BF)
            # Ends of the two chunks, and write strengths.
            e_s = T.alloc_shared((3, K), F32)
            X_s = T.alloc_shared((R, R), room)
            P_s = T.alloc_shared((R, R), room)
            if not norm:
                Y_s = T.alloc_shared((R, R), room)
                Q_s = T.alloc_shared((R, R), room)
            D_s = T.alloc_shared((R, BLOCK), F32)
            at_s = T.alloc_shared((2, R, C), BF)
            rk_s = T.alloc_shared((R,), F32)
            rq_s = T.alloc_shared((R,), F32)
            d_s = T.alloc_shared((R,), F32)
            k_i = T.alloc_fragment((R,), F32)
            q_i = T.alloc_fragment((R,), F32)
            d_i = T.alloc_fragment((R,), F32)
            b_i = T.alloc_fragment((R,), F32)
            G = T.alloc_fragment((R, K), F32)
            left = T.alloc_fragment((R, K), BF)
            stage = T.alloc_fragment((R, K), BF)
            gates = T.alloc_fragment((R, K), F16)
            L = T.alloc_fragment((R, R), F32)
            P = T.alloc_fragment((R, R), F32)
            M = T.alloc_fragment((R, R), room)
            if not norm:
                ones = T.alloc_fragment((R, R), F16)
                N = T.alloc_fragment((R, R), room)
            x = T.alloc_local((BLOCK,), F32)
            line = T.alloc_local((BLOCK,), F32)
            tx = T.get_thread_binding()
            row = T.alloc_var("int32", init=table[it, 0])
            valid = T.alloc_var("int32", init=table[it, 1])
            last = T.alloc_var("int32", init=T.max(table[it, 1] - 1, 0))
            steep = T.alloc_var(F32, init=-LOG2E)
            write = T.alloc_var(F32, init=0.0)
            T.annotate_layout({out_s: make_swizzled_layout(out_s)})
            if rate:
                steep = -T.exp(A_log[h]) * LOG2E
            gated = T.alloc_barrier(128)
            loaded = T.alloc_barrier(128)
            if own:
                T.tma_copy(g[row : row + R, h, :], out_s, barrier=gated)
                T.barrier_arrive(gated)
            T.tma_copy(k[row : row + R, h // group, :], k_s, barrier=loaded)
            T.tma_copy(q[row : row + R, h // group, :], q_s, barrier=loaded)
            T.barrier_arrive(loaded)
            if own:
                T.mbarrier_wait_parity(gated, 0)
                if gate == 1:
                    for i, j in T.Parallel(R, K):
                        gates[i, j] = T.max(T.cast(out_s[i, j], F32), LOWEST) * LOG2E
                elif bias:
                    for i, j in T.Parallel(R, K):
                        gates[i, j] = (
                            lower * LOG2E / (1.0 + T.exp2(T.cast(out_s[i, j], F32) * steep + dt_bias[h, j] * steep))
                        )
                else:
                    for i, j in T.Parallel(R, K):
                        gates[i, j] = lower * LOG2E / (1.0 + T.exp2(T.cast(out_s[i, j], F32) * steep))
            else:
                # Rows past the end read the last valid one.
                for i, j in T.Parallel(R, K):
                    if gate == 1:
                        gates[i, j] = T.max(T.cast(g[row + T.min(i, last), h, j], F32), LOWEST) * LOG2E
                    elif bias:
                        gates[i, j] = (
                            lower
                            * LOG2E
                            / (1.0 + T.exp2(T.cast(g[row + T.min(i, last), h, j], F32) * steep + dt_bias[h, j] * steep))
                        )
                    else:
                        gates[i, j] = lower * LOG2E / (1.0 + T.exp2(T.cast(g[row + T.min(i, last), h, j], F32) * steep))
            T.copy(gates, g_s)
            if tx < R:
                write = T.cast(beta[row + T.min(tx, last), h], F32)
                if sigmoid:
                    write = beta_scale / (1.0 + T.exp(-write))
                e_s[2, tx] = T.Select(tx < valid, write, T.float32(0))
            T.mbarrier_wait_parity(loaded, 0)
            if valid < R:
                # Cleared, not multiplied away: rows past the end may hold anything.
                for i, j in T.Parallel(R, K):
                    if i >= valid:
                        g_s[i, j] = T.cast(0, F16)
                        k_s[i, j] = T.cast(0, dtype)
                        q_s[i, j] = T.cast(0, dtype)
            if norm:
                T.clear(L)
                T.gemm(k_s, k_s, L, transpose_B=True, policy=by_row)
                T.clear(P)
                T.gemm(q_s, q_s, P, transpose_B=True, policy=by_row)
                for i, j in T.Parallel(R, R):
                    if i == j:
                        rk_s[i] = T.rsqrt(L[i, j] + EPS)
                        rq_s[i] = T.rsqrt(P[i, j] + EPS) * scale
            else:
                for i in T.Parallel(R):
                    rk_s[i] = 1.0
                    rq_s[i] = scale
            # A token's own score has no decay: from the tiles as they came, it is not rounded twice.
            T.clear(P)
            T.gemm(q_s, k_s, P, transpose_B=True, policy=by_row)
            for i, j in T.Parallel(R, R):
                if i == j:
                    d_s[i] = P[i, j]
            T.copy(rk_s, k_i)
            T.copy(rq_s, q_i)
            for i in T.Parallel(R):
                d_i[i] = d_s[i] * (rk_s[i] * rq_s[i])
            for i in T.Parallel(R):
                b_i[i] = e_s[2, i]
            # Up to each token and with it.
            if norm:
                for i, j in T.Parallel(R, R):
                    M[i, j] = T.Select((j <= i) and (i // C == j // C), T.float32(1), T.float32(0))
                T.clear(G)
                T.gemm(M, g_s, G, policy=by_row)
            else:
                for i, j in T.Parallel(R, R):
                    ones[i, j] = T.Select((j <= i) and (i // C == j // C), T.float32(1), T.float32(0))
                T.clear(G)
                T.gemm(ones, g_s, G, policy=by_row)
            for i, j in T.Parallel(R, K):
                if i % C == C - 1:
                    e_s[i // C, j] = T.exp2(G[i, j] + SHIFT)
            # Into registers first: tilelang would put a barrier into every turn of a loop that writes to shared memory
            # beside what it reads there.
            for i, j in T.Parallel(R, K):
                stage[i, j] = T.cast(k_s[i, j], F32) * (k_i[i] * (T.exp2(-SHIFT - G[i, j]) * e_s[i // C, j]))
                left[i, j] = T.cast(k_s[i, j], F32) * (k_i[i] * T.exp2(-SHIFT - G[i, j]))
                G[i, j] = T.exp2(G[i, j] + SHIFT)
            T.copy(left, kc_s)
            T.copy(stage, out_s)
            T.tma_copy(out_s, KU[it, h, :, :])
            for i, j in T.Parallel(R // C, K):
                SC[it, h, i, j] = e_s[i, j] * UNSHIFT
            for i, j in T.Parallel(R, K):
                left[i, j] = T.cast(k_s[i, j], F32) * (k_i[i] * G[i, j])
                stage[i, j] = T.cast(k_s[i, j], F32) * (k_i[i] * G[i, j]) * UNSHIFT
            T.tma_store_wait(0)
            T.sync_threads()
            T.copy(stage, out_s)
            T.tma_copy(out_s, KD[it, h, :, :])
            T.clear(L)
            T.gemm(left, kc_s, L, transpose_B=True, policy=by_row)
            for i, j in T.Parallel(R, K):
                left[i, j] = T.cast(q_s[i, j], F32) * (q_i[i] * G[i, j])
                stage[i, j] = T.cast(q_s[i, j], F32) * (q_i[i] * G[i, j]) * UNSHIFT
            if dtype == BF:
                T.copy(stage, k_s)
                T.tma_copy(k_s, QD[it, h, :, :])
            else:
                T.tma_store_wait(0)
                T.sync_threads()
                T.copy(stage, out_s)
                T.tma_copy(out_s, QD[it, h, :, :])
            T.clear(P)
            T.gemm(left, kc_s, P, transpose_B=True, policy=by_row)
            # What follows may lie where those tiles do.
            T.tma_store_wait(0)
            T.sync_threads()
            for i, j in T.Parallel(R, R):
                if i // C == j // C:
                    at_s[0, i, j % C] = T.Select(i == j, d_i[i], T.Select(i > j, P[i, j], T.float32(0)))
            T.tma_copy(at_s[0, :, :], A[it, h, :, :])
            for i, j in T.Parallel(R, R):
                L[i, j] = T.Select((i > j) and (i // C == j // C), L[i, j] * b_i[i], T.float32(0))
            for i, j in T.Parallel(R, R):
                if i // BLOCK == j // BLOCK:
                    D_s[i, j % BLOCK] = L[i, j]
            if norm:
                invert(L, D_s, X_s, M, P, P_s, x, line, tx)
                for i, j in T.Parallel(R, C):
                    at_s[1, i, j] = T.cast(X_s[i, (i // C) * C + j], F32) * e_s[2, (i // C) * C + j]
            else:
                invert(L, D_s, X_s, Y_s, M, N, P, P_s, Q_s, x, line, tx)
                for i, j in T.Parallel(R, C):
                    at_s[1, i, j] = (
                        T.cast(X_s[i, (i // C) * C + j], F32) + T.cast(Y_s[i, (i // C) * C + j], F32)
                    ) * e_s[2, (i // C) * C + j]
            T.copy(at_s[1, :, :], Tm[it, h, :, :])

    return delta_vector_prep
