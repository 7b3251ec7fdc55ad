# SPDX-License-Identifier: MIT
# mypy: ignore-errors
"""Between the summaries of stretches of time and the scans of them, in both engines of this family."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["segments", "H", "size"])
def merge_stretches(entry, total, segments, H, size, KP: tl.constexpr, BS: tl.constexpr, REVERSE: tl.constexpr):
    """Turn what each stretch adds, in place, into the states in which the stretches begin (REVERSE: end).

    The state before the next stretch is the decay of this one (``total``: one number, or one for each of KP channels)
    times the state before it plus what it adds. The stretch that comes first begins with the caller's state, which its
    summary already holds: its own entry is not read.
    """
    blocks = (size + BS - 1) // BS
    pid = tl.program_id(0)
    c = (pid % blocks) * BS + tl.arange(0, BS)
    h = (pid // blocks) % H
    i = (pid // (blocks * H)).to(tl.int64)
    m = c < size
    S = tl.zeros((BS,), tl.float32)
    for p in tl.range(0, segments, num_stages=1):
        seg = segments - 1 - p if REVERSE else p
        at = (i * segments + seg) * H + h
        more = p < segments - 1
        E = tl.load(entry + at * size + c, mask=m & more, other=0.0)
        left = tl.load(total + at * KP + c % KP, mask=m & more, other=0.0)
        tl.store(entry + at * size + c, S, mask=m)
        S = S * left + E
