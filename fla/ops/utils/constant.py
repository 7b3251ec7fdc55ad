# SPDX-License-Identifier: MIT
"""Constants that ops share."""

import math
import struct

__all__ = ["RCP_LN2"]

RCP_LN2: float = struct.unpack("f", struct.pack("f", 1 / math.log(2)))[0]
"""1 / ln 2 rounded to float32: turns a natural logarithm into one of base 2."""
