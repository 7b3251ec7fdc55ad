# SPDX-License-Identifier: MIT
"""Parts are summed in fp32 and rounded once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fla.ops._common.parts import sum_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3), (2, 5, 411), (4, 2, 1024)])
def test_parts_are_summed_and_rounded_once(shape, dtype) -> None:
    x = torch.randn(*shape)
    total = x[0].clone()
    for part in x[1:]:
        total += part
    got = sum_parts(x, dtype)
    assert got.shape == shape[1:]
    assert torch.equal(got, total.to(dtype))
