# SPDX-License-Identifier: MIT
"""How to call the functions that the conformance kit has no row for, so that `fla warmup` can run them too.

A flag that is a function gets the call's other arguments and returns the value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fla.testing.specs import SPECS, Input, OpSpec, Variant


def _slots(dtype: torch.dtype, a_token: bool) -> Any:
    """A slot of the pool for each sequence, or for each token of each."""

    def make(call: dict[str, Any]) -> Tensor:
        pool: Tensor = call["initial_state"]
        slots = torch.arange(pool.shape[0], dtype=dtype, device=pool.device)
        return slots[:, None].expand(-1, call["q"].shape[1]).contiguous() if a_token else slots

    return make


def _accepted(dtype: torch.dtype) -> Any:
    return lambda call: torch.ones(call["initial_state"].shape[0], dtype=dtype, device=call["q"].device)


def _serving(of: str, room: str) -> OpSpec:
    """The serving form of a recurrent function: in place, with a pool of slots, and with draft tokens."""
    base = SPECS[room, of]
    forms = []
    for variant in base.variants:
        if variant.name in ("strong_decay", "beta_per_value"):
            continue
        flags = {**variant.flags, "inplace_final_state": True}
        forms.append(Variant(f"{variant.name}_in_place", flags, variant.inputs, without_grad=True))
        for name, dtype in (("", torch.int32), ("_int64", torch.int64)):
            pool = {**flags, "ssm_state_indices": _slots(dtype, False)}
            forms.append(Variant(f"{variant.name}_pool{name}", pool, variant.inputs, without_grad=True))
            drafts = {**flags, "ssm_state_indices": _slots(dtype, True), "num_accepted_tokens": _accepted(dtype)}
            forms.append(Variant(f"{variant.name}_drafts{name}", drafts, variant.inputs, without_grad=True))
    return OpSpec(
        room, f"{of}_fwd", base.inputs, tuple(forms), "", grouped=True, module=f"fla.ops.{room}.fused_recurrent"
    )


_SLOT = Input("B T H K")
_GSA = {"q": _SLOT, "k": _SLOT, "v": Input("B T H V"), "s": _SLOT, "g": Input("B T H K", "decay", wide=True)}
_HGRN = {"x": Input("B T H*K"), "g": Input("B T H*K", "decay", wide=True)}
_PLAIN = (Variant("plain"),)

ROWS = (
    _serving("fused_recurrent_kda", "kda"),
    _serving("fused_recurrent_gdn2", "gdn2"),
    *(OpSpec("gsa", name, _GSA, _PLAIN, "") for name in ("chunk_gsa", "fused_recurrent_gsa")),
    *(OpSpec("hgrn", name, _HGRN, _PLAIN, "") for name in ("chunk_hgrn", "fused_recurrent_hgrn")),
)
# Their states have other shapes than the kit draws.
STATELESS = frozenset({"gsa", "hgrn"})
EXTRA = {(row.operation, row.name): row for row in ROWS}
