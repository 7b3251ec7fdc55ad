# SPDX-License-Identifier: MIT
"""The 16-bit emulation that bounds ill-conditioned cases is the exact algorithm when nothing is rounded."""

from __future__ import annotations

import torch
from delta_emulation import emulate
from delta_reference import make_inputs, ratio, with_gradients


def test_emulation_without_rounding_is_exact():
    x = make_inputs(1, 128, 2, None, 16)
    do, dht = torch.randn_like(x["v"]), torch.randn(1, 2, 16, 16)
    ref = with_gradients(x, do, dht)
    got = emulate(x, do, dht, torch.float32)
    assert max(ratio(got[n], ref[n]) for n in ref) < 1e-5
