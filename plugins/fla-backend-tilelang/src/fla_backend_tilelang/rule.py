# SPDX-License-Identifier: MIT
"""Where core's own Triton kernels are faster, the plugin declines (code `slower`) unless the user asks for it."""

from __future__ import annotations

from fla.backends import Measured, Point

_WITH = {"card": "H200", "versions": "torch 2.11, triton 3.6, tilelang 0.1.15", "core": "1.0.0.dev0"}

#: Inference, norms in the kernel, no states; both sides in one run of ``benchmarks/table.py``, cold L2.
GATED_DELTA_RULE = Measured((Point(length=8192, chains=96, backend_ms=0.516, core_ms=0.618),), **_WITH)
#: The same with gate and sigmoid in the kernel too.
KDA = Measured((Point(length=8192, chains=96, backend_ms=1.206, core_ms=1.021),), **_WITH)
