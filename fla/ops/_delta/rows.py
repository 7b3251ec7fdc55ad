# SPDX-License-Identifier: MIT
"""The table of the delta family: what distinguishes its ops.

One recurrence serves all of them, per value head with state ``S [K, V]``::

    S_t = diag(exp(decay_t)) S_{t-1}            decay: none, one number, or one per key channel
    e_t = (erase_t * read_t)^T S                S decayed (inclusive read) or before decay (exclusive read)
    S_t = S_t + write_t (gain_t * value_t - e_t)^T
    o_t = scale * q_t^T S_t

A row says which argument of the op plays which part. The engines (PyTorch here, Triton beside it) read the row; the
public functions activate gates, build ``Operands`` and know nothing of the algorithm.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from torch import Tensor


class Decay(enum.Enum):
    """Shape of the log decay: absent, ``[B, T, HV]`` or ``[B, T, HV, K]``."""

    NONE = "none"
    SCALAR = "scalar"
    VECTOR = "vector"


class ReadTime(enum.Enum):
    """Whether the delta rule reads the decayed state or the one before decay."""

    INCLUSIVE = "inclusive"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True)
class DeltaRow:
    """One op of the family.

    Attributes:
        op: operation name, the room under ``fla.ops``.
        decay: shape of the log decay.
        read_time: state that the delta rule reads.
        read_key: argument that is the read key, ``[B, T, H, K]``.
        write_key: argument that is the write key, ``[B, T, H, K]``.
        erase: argument that multiplies the read key, ``[B, T, HV]`` or ``[B, T, HV, K]``.
        gain: argument that multiplies ``v``, ``[B, T, HV]`` or ``[B, T, HV, V]``.
    """

    op: str
    decay: Decay
    read_time: ReadTime = ReadTime.INCLUSIVE
    read_key: str = "k"
    write_key: str = "k"
    erase: str = "beta"
    gain: str = "beta"


DELTA_RULE = DeltaRow("delta_rule", Decay.NONE)
GATED_DELTA_RULE = DeltaRow("gated_delta_rule", Decay.SCALAR)
KDA = DeltaRow("kda", Decay.VECTOR)
COMBA = DeltaRow("comba", Decay.SCALAR, ReadTime.EXCLUSIVE, read_key="p")
GDN2 = DeltaRow("gdn2", Decay.VECTOR, erase="b", gain="w")

ROWS: dict[str, DeltaRow] = {row.op: row for row in (DELTA_RULE, GATED_DELTA_RULE, KDA, COMBA, GDN2)}


@dataclass(frozen=True)
class Operands:
    """Activated tensors of one call, by the part they play.

    ``q, read, write`` are ``[B, T, H, K]``, ``value`` is ``[B, T, HV, V]``. ``erase`` and ``gain`` of ``None`` are
    ones. ``value_decay [B, T, HV, V]`` is a second decay of the state's columns, which only the recurrent engine
    computes.
    """

    q: Tensor
    read: Tensor
    write: Tensor
    value: Tensor
    decay: Tensor | None
    erase: Tensor | None
    gain: Tensor | None
    value_decay: Tensor | None = None

    @property
    def value_wise_erase(self) -> bool:
        """Whether one ``beta [B, T, HV, V]`` scales the whole update per value channel; only the recurrent engine
        can."""
        return self.erase is not None and self.erase is self.gain and self.erase.dim() == 4


def operands(row: DeltaRow, decay: Tensor | None, **arguments: Tensor) -> Operands:
    """Give every argument of a call its part by the row. ``arguments``: ``q``, ``v`` and what the row names."""
    return Operands(
        q=arguments["q"],
        read=arguments[row.read_key],
        write=arguments[row.write_key],
        value=arguments["v"],
        decay=decay,
        erase=arguments.get(row.erase),
        gain=arguments.get(row.gain),
    )


def with_decay(row: DeltaRow, decay: Decay) -> DeltaRow:
    """The row with another decay shape (an op whose gate is optional)."""
    return row if row.decay is decay else replace(row, decay=decay)
