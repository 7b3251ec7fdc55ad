# SPDX-License-Identifier: MIT
"""Constants that ops share."""

import math

import torch

__all__ = ["RCP_LN2"]

RCP_LN2: float = torch.tensor(1 / math.log(2), dtype=torch.float32).item()
"""1 / ln 2 rounded to float32: turns a natural logarithm into one of base 2."""
