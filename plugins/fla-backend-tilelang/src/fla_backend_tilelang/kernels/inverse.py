# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""The inverse of I + L for strictly lower triangular L: 16 x 16 blocks by substitution in fp32, then merges in fp16.

fp16 has the mantissa of tf32 at twice its rate, and the entries of these inverses are of the order of 1.
"""

import tilelang.language as T

F16, F32 = "float16", "float32"
BLOCK = 16


def inverse(C):
    """Macro ``(L, D_s, X_s, M, P, P_s, x, row, tx)``: ``X_s`` becomes the inverse for L ``[64, 64]`` of C x C blocks.

    ``D_s [64, 16]`` holds the 16 x 16 diagonal blocks of L; M (fp16), P and P_s are scratch, x and row 16 numbers of a
    thread, tx its index.
    """
    R = 64

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
            for i in T.unroll(BLOCK):
                for j in T.vectorized(BLOCK):
                    row[j] = D_s[(tx // BLOCK) * BLOCK + i, j]
                x[i] = T.Select(tx % BLOCK == i, T.float32(1), T.float32(0))
                for j in T.unroll(i):
                    x[i] -= row[j] * x[j]
            for i in T.unroll(BLOCK):
                X_s[(tx // BLOCK) * BLOCK + i, tx] = x[i]
        T.sync_threads()
        merge(L, X_s, M, P, P_s, 16)
        if C == 64:
            merge(L, X_s, M, P, P_s, 32)

    return run
