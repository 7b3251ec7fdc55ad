# SPDX-License-Identifier: MIT

# mypy: ignore-errors
"""The pass over time of both delta rules: one program a block of V, value head and sequence.

The state is held transposed, ``S^T [BV, K]`` in fp32 registers, so that it and all that follows from it are left
operands of the matrix products. A producer warp group keeps `stages` chunks of tiles on their way to shared memory
while one or two warp groups compute, each on 64 rows of ``S^T`` and neither waiting for the other::

    u^T = v^T T^T - ck (S k^T) T^T;   o^T = cq (S q^T) + u^T A^T;   S <- e^(G_L) S + (cu u^T) kk

With a decay per head (``VECTOR`` False) q and k are the caller's, kk is k, and ck, cq, cu and e^(G_L) are scalars of a
token or chunk. With a decay per channel the first stage wrote scaled tiles, ck = cq = cu = 1, and e^(G_L) is a vector.

float16 has no room for states and what follows from them: there all tiles but those of v and o are bfloat16, and v is
the sum of two numbers in bfloat16, which is exact.

A ragged last chunk is the business of a second launch (``TAIL``) that takes the state up where this one left it: TMA
tiles would reach into the next sequence.
"""

import tilelang.language as T

BF, F32, I32 = "bfloat16", "float32", "int32"


def scan(K, V, BV, C, stages, dtype, vector, varlen, initial, final, tail):
    """The program. initial, final: 0 no state, 1 ``[N, HV, K, V]``, 2 ``[N, HV, V, K]``; tail: ragged chunks only."""
    rows, HQ, HV, NT = (T.dynamic(name) for name in ("rows", "HQ", "HV", "NT"))
    cuts, first_cuts, h0_n, ht_n = (T.dynamic(name) for name in ("cuts", "first_cuts", "h0_n", "ht_n"))
    by_row = T.GemmWarpPolicy.FullRow
    # The first stage cuts sequences into tiles of 64 tokens, which are `split` chunks here.
    split = 64 // C
    keys = (NT, HV, 64, K) if vector else (rows, HQ, K)
    scalars = (NT, HV, split, K) if vector else (NT, HV, 4, C)
    h0_shape = (h0_n, HV, V, K) if initial == 2 else (h0_n, HV, K, V)
    ht_shape = (ht_n, HV, V, K) if final == 2 else (ht_n, HV, K, V)

    @T.macro
    def step(S, Sb, ks, ksb, u, ub, oo, k_s, kk_s, q_s, v_s, t_s, a_s, sc_s):
        T.copy(S, Sb)
        T.clear(ks)
        T.gemm(Sb, k_s, ks, transpose_B=True, policy=by_row)
        T.clear(u)
        if dtype == BF:
            T.gemm(v_s, t_s, u, transpose_A=True, transpose_B=True, policy=by_row)
        else:
            for i, j in T.Parallel(BV, C):
                ub[i, j] = v_s[j, i]
            T.gemm(ub, t_s, u, transpose_B=True, policy=by_row)
            for i, j in T.Parallel(BV, C):
                ub[i, j] = T.cast(v_s[j, i], F32) - T.cast(T.cast(v_s[j, i], BF), F32)
            T.gemm(ub, t_s, u, transpose_B=True, policy=by_row)
        for i, j in T.Parallel(BV, C):
            ksb[i, j] = -ks[i, j] if vector else -ks[i, j] * sc_s[1, j]
        T.gemm(ksb, t_s, u, transpose_B=True, policy=by_row)
        T.clear(oo)
        T.gemm(Sb, q_s, oo, transpose_B=True, policy=by_row)
        if not vector:
            for i, j in T.Parallel(BV, C):
                oo[i, j] *= sc_s[0, j]
        T.copy(u, ub)
        T.gemm(ub, a_s, oo, transpose_B=True, policy=by_row)
        for i, j in T.Parallel(BV, K):
            S[i, j] *= sc_s[j] if vector else sc_s[3, 0]
        if not vector:
            for i, j in T.Parallel(BV, C):
                ub[i, j] = u[i, j] * sc_s[2, j]
        T.gemm(ub, kk_s, S, policy=by_row)

    @T.prim_func
    def delta_scan(
        q: T.Tensor(keys, BF),
        k: T.Tensor(keys, BF),
        kk: T.Tensor(keys, BF),
        v: T.Tensor((rows, HV, V), dtype),
        Tm: T.Tensor((NT, HV, 64, C), BF),
        A: T.Tensor((NT, HV, 64, C), BF),
        SC: T.Tensor(scalars, F32),
        cu: T.Tensor((cuts,), I32),
        offsets: T.Tensor((first_cuts,), I32),
        h0: T.Tensor(h0_shape, F32),
        ht: T.Tensor(ht_shape, F32),
        o: T.Tensor((rows, HV, V), dtype),
        length: T.int32,
        sequences: T.int32,
    ):
        with T.Kernel(V // BV, HV, sequences, threads=2 * BV) as (bv, h, n):
            if vector and BV == 64:
                # Two programs a multiprocessor: 128 threads with 24 registers and 128 with 232 are half of what it has.
                T.annotate_min_blocks_per_sm(2)
                T.annotate_producer_reg_dealloc(24)
                T.annotate_consumer_reg_alloc(232)
            k_s = T.alloc_shared((C, K), BF)
            q_s = T.alloc_shared((C, K), BF)
            v_s = T.alloc_shared((C, BV), dtype)
            t_s = T.alloc_shared((C, C), BF)
            a_s = T.alloc_shared((C, C), BF)
            sc_s = T.alloc_shared((K,) if vector else (4, C), F32)
            o_s = T.alloc_shared((C, BV), dtype)
            S = T.alloc_fragment((BV, K), F32)
            Sb = T.alloc_fragment((BV, K), BF)
            ks = T.alloc_fragment((BV, C), F32)
            ksb = T.alloc_fragment((BV, C), BF)
            u = T.alloc_fragment((BV, C), F32)
            ub = T.alloc_fragment((BV, C), BF)
            oo = T.alloc_fragment((BV, C), F32)
            kk_s = T.alloc_shared((C, K), BF) if vector else k_s
            hq = h if vector else T.truncdiv(h * HQ, HV)
            bos = cu[n] if varlen else n * length
            size = cu[n + 1] - cu[n] if varlen else length
            first = offsets[n] if varlen else n * T.ceildiv(length, 64)
            full = size // C
            if initial == 2:
                for i, j in T.Parallel(BV, K):
                    S[i, j] = h0[n, h, bv * BV + i, j]
            elif initial == 1:
                for i, j in T.Parallel(BV, K):
                    S[i, j] = h0[n, h, j, bv * BV + i]
            else:
                T.clear(S)
            if not tail:
                for t in T.Pipelined(full, num_stages=stages):
                    if vector:
                        T.copy(k[first + t // split, h, (t % split) * C : (t % split) * C + C, :], k_s)
                    else:
                        T.copy(k[bos + t * C : bos + t * C + C, hq, :], k_s)
                    T.copy(v[bos + t * C : bos + t * C + C, h, bv * BV : bv * BV + BV], v_s)
                    T.copy(Tm[first + t // split, h, (t % split) * C : (t % split) * C + C, :], t_s)
                    if vector:
                        T.copy(q[first + t // split, h, (t % split) * C : (t % split) * C + C, :], q_s)
                    else:
                        T.copy(q[bos + t * C : bos + t * C + C, hq, :], q_s)
                    T.copy(A[first + t // split, h, (t % split) * C : (t % split) * C + C, :], a_s)
                    if vector:
                        T.copy(SC[first + t // split, h, t % split, :], sc_s)
                        T.copy(kk[first + t // split, h, (t % split) * C : (t % split) * C + C, :], kk_s)
                    else:
                        T.copy(SC[first + t, h, :, :], sc_s)
                    step(S, Sb, ks, ksb, u, ub, oo, k_s, kk_s, q_s, v_s, t_s, a_s, sc_s)
                    # The store of the last chunk has read the tile by now, long ago.
                    T.tma_store_wait(0)
                    T.sync_threads()
                    for i, j in T.Parallel(BV, C):
                        o_s[j, i] = oo[i, j]
                    T.tma_copy(o_s, o[bos + t * C : bos + t * C + C, h, bv * BV : bv * BV + BV])
                T.tma_store_wait(0)
            else:
                rest = size % C
                if rest > 0:
                    row = bos + full * C
                    # Selected, not multiplied away: the rows behind belong to others and may hold anything.
                    if vector:
                        T.copy(k[first + full // split, h, (full % split) * C : (full % split) * C + C, :], k_s)
                        T.copy(q[first + full // split, h, (full % split) * C : (full % split) * C + C, :], q_s)
                    else:
                        for i, j in T.Parallel(C, K):
                            k_s[i, j] = T.if_then_else(i < rest, k[row + i, hq, j], T.cast(0, BF))
                        for i, j in T.Parallel(C, K):
                            q_s[i, j] = T.if_then_else(i < rest, q[row + i, hq, j], T.cast(0, BF))
                    for i, j in T.Parallel(C, BV):
                        v_s[i, j] = T.if_then_else(i < rest, v[row + i, h, bv * BV + j], T.cast(0, dtype))
                    T.copy(Tm[first + full // split, h, (full % split) * C : (full % split) * C + C, :], t_s)
                    T.copy(A[first + full // split, h, (full % split) * C : (full % split) * C + C, :], a_s)
                    if vector:
                        T.copy(SC[first + full // split, h, full % split, :], sc_s)
                        T.copy(kk[first + full // split, h, (full % split) * C : (full % split) * C + C, :], kk_s)
                    else:
                        T.copy(SC[first + full, h, :, :], sc_s)
                    step(S, Sb, ks, ksb, u, ub, oo, k_s, kk_s, q_s, v_s, t_s, a_s, sc_s)
                    for i, j in T.Parallel(BV, C):
                        o_s[j, i] = oo[i, j]
                    for i, j in T.Parallel(C, BV):
                        if i < rest:
                            o[row + i, h, bv * BV + j] = o_s[i, j]
            if final == 2:
                for i, j in T.Parallel(BV, K):
                    ht[n, h, bv * BV + i, j] = S[i, j]
            elif final == 1:
                for i, j in T.Parallel(BV, K):
                    ht[n, h, j, bv * BV + i] = S[i, j]

    return delta_scan
