# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""The inverse of I + L for strictly lower triangular L: 16 x 16 blocks by substitution in fp32, then merges in fp16.

fp16 has the mantissa of tf32 at twice its rate, and the entries of these inverses are of the order of 1 where keys are
unit vectors. Where the kernel does not norm them (`inverse_wide`) each number is the sum of two in bfloat16, with the
range of fp32 and 16 bits of mantissa.
"""

import tilelang.language as T

F16, BF, F32 = "float16", "bfloat16", "float32"
BLOCK, R = 16, 64


@T.macro
def substitute(D_s, x, row, tx):
    """Thread tx: column tx of the inverses of the 16 x 16 blocks, from the block that this column crosses."""
    for i in T.unroll(BLOCK):
        for j in T.vectorized(BLOCK):
            row[j] = D_s[(tx // BLOCK) * BLOCK + i, j]
        x[i] = T.Select(tx % BLOCK == i, T.float32(1), T.float32(0))
        for j in T.unroll(i):
            x[i] -= row[j] * x[j]


def inverse(C):
    """Macro ``(L, D_s, X_s, M, P, P_s, x, row, tx)``: ``X_s`` becomes the inverse for L ``[64, 64]`` of C x C blocks.

    ``D_s [64, 16]`` holds the 16 x 16 diagonal blocks of L; M (fp16), P and P_s are scratch, x and row 16 numbers of a
    thread, tx its index.
    """

    @T.macro
    def merge(L, X_s, M, P, P_s, half):
        for i, j in T.Parallel(R, R):
            M[i, j] = T.Select((i // (2 * half) == j // (2 * half)) and (i // half > j // half), L[i, j], T.float32(0))
        T.clear(P)
        T.gemm(M, X_s, P, policy=T.GemmWarpPolicy.FullRow)
        T.copy(P, P_s)
        T.clear(P)
        T.gemm(X_s, P_s, P, policy=T.GemmWarpPolicy.FullRow)
        for i, j in T.Parallel(R, R):
            if (i // (2 * half) == j // (2 * half)) and (i // half > j // half):
                X_s[i, j] = -P[i, j]

    @T.macro
    def run(L, D_s, X_s, M, P, P_s, x, row, tx):
        T.clear(X_s)
        T.clear(x)
        T.sync_threads()
        if tx < R:
            substitute(D_s, x, row, tx)
            for i in T.unroll(BLOCK):
                X_s[(tx // BLOCK) * BLOCK + i, tx] = x[i]
        T.sync_threads()
        merge(L, X_s, M, P, P_s, 16)
        if C == 64:
            merge(L, X_s, M, P, P_s, 32)

    return run


def inverse_wide(C):
    """Macro ``(L, D_s, X_s, Y_s, M, N, P, P_s, Q_s, x, row, tx)``: as `inverse`, the result is ``X_s + Y_s``.

    All of ``X_s``, ``Y_s``, M, N, ``P_s`` and ``Q_s`` are bfloat16; M holds the large and N the small parts.
    """

    @T.macro
    def split(P, M, N):
        for i, j in T.Parallel(R, R):
            M[i, j] = P[i, j]
            N[i, j] = P[i, j] - T.cast(T.cast(P[i, j], BF), F32)

    @T.macro
    def merge(L, X_s, Y_s, M, N, P, P_s, Q_s, half):
        for i, j in T.Parallel(R, R):
            P[i, j] = T.Select((i // (2 * half) == j // (2 * half)) and (i // half > j // half), L[i, j], T.float32(0))
        split(P, M, N)
        T.clear(P)
        T.gemm(M, X_s, P, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(M, Y_s, P, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(N, X_s, P, policy=T.GemmWarpPolicy.FullRow)
        split(P, M, N)
        T.copy(M, P_s)
        T.copy(N, Q_s)
        T.clear(P)
        T.gemm(X_s, P_s, P, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(X_s, Q_s, P, policy=T.GemmWarpPolicy.FullRow)
        T.gemm(Y_s, P_s, P, policy=T.GemmWarpPolicy.FullRow)
        split(P, M, N)
        for i, j in T.Parallel(R, R):
            if (i // (2 * half) == j // (2 * half)) and (i // half > j // half):
                X_s[i, j] = -M[i, j]
                Y_s[i, j] = -N[i, j]

    @T.macro
    def run(L, D_s, X_s, Y_s, M, N, P, P_s, Q_s, x, row, tx):
        T.clear(X_s)
        T.clear(Y_s)
        T.clear(x)
        T.sync_threads()
        if tx < R:
            substitute(D_s, x, row, tx)
            for i in T.unroll(BLOCK):
                X_s[(tx // BLOCK) * BLOCK + i, tx] = x[i]
                Y_s[(tx // BLOCK) * BLOCK + i, tx] = x[i] - T.cast(T.cast(x[i], BF), F32)
        T.sync_threads()
        merge(L, X_s, Y_s, M, N, P, P_s, Q_s, 16)
        if C == 64:
            merge(L, X_s, Y_s, M, N, P, P_s, Q_s, 32)

    return run
