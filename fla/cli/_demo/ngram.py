# SPDX-License-Identifier: MIT
"""Counted byte models, the yardstick beside which the demo reports its neural one.

An order-n model predicts a byte from the n bytes before it. Orders are interpolated by Witten-Bell smoothing
(Witten and Bell 1991, method C), from the longest context down to the uniform distribution:
`p_n(x|c) = (count(c,x) + d(c) p_{n-1}(x|c')) / (count(c) + d(c))`, with `d(c)` the number of different bytes seen
after context `c` and `c'` the context without its first byte.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fla.cli._demo.corpus import Bytes

BIGRAM = 1
ORDER_3 = 3
_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


class NgramModel:
    """Counts of all contexts up to `order` bytes (0 to 7) over `data` `[n]`."""

    def __init__(self, data: Bytes, order: int) -> None:
        if not 0 <= order <= 7:
            raise ValueError(f"order must be between 0 and 7, got {order}")
        self.order = order
        # Per order: the distinct (context, next byte) codes, sorted, with their counts.
        self.tables = [np.unique(_codes(data, n + 1), return_counts=True) for n in range(order + 1)]

    def probabilities(self, data: Bytes) -> _Floats:
        """The probability of each byte of `data` that has a full context: `[n - order]` for input `[n]`."""
        predicted = max(len(data) - self.order, 0)
        result = np.full(predicted, 1.0 / 256.0)
        for n, (codes, counts) in enumerate(self.tables):
            wanted = _codes(data, n + 1)[self.order - n :]
            contexts, starts = np.unique(codes >> 8, return_index=True)
            totals = np.add.reduceat(counts, starts)
            distinct = np.diff(np.append(starts, len(codes)))
            count = _look_up(codes, counts, wanted)
            total = _look_up(contexts, totals, wanted >> 8)
            kinds = _look_up(contexts, distinct, wanted >> 8)
            seen = total > 0
            result[seen] = (count[seen] + kinds[seen] * result[seen]) / (total[seen] + kinds[seen])
        return result

    def bits_per_byte(self, data: Bytes) -> float:
        """Mean of `-log2 p` over the bytes of `data` that have a full context."""
        return float(-np.log2(self.probabilities(data)).mean())


def _codes(data: Bytes, width: int) -> _Ints:
    """Every window of `width` bytes as one integer, oldest byte highest: `[n - width + 1]`."""
    n = max(len(data) - width + 1, 0)
    code = np.zeros(n, np.int64)
    for i in range(width):
        code = (code << 8) | data[i : i + n]
    return code


def _look_up(keys: _Ints, values: _Ints, wanted: _Ints) -> _Ints:
    """`values[i]` where `keys[i] == wanted`, 0 where a key is missing. `keys` is sorted and not empty."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
