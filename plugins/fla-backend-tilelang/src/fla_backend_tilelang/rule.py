# SPDX-License-Identifier: MIT
"""Where core's own Triton kernels are faster, the plugin declines (code `slower`) unless the user asks for it."""

from __future__ import annotations

from fla.backends import Measured, Point

_WITH = {"card": "H200", "versions": "torch 2.11, triton 3.6, tilelang 0.1.15", "core": "1.0.0.dev0"}

#: Inference, norms in the kernel, no states; both sides in one run of ``benchmarks/table.py``, cold L2.
GATED_DELTA_RULE = Measured(
    (
        Point(length=8192, chains=96, backend_ms=0.514, core_ms=0.614),
        Point(length=2048, chains=64, backend_ms=0.108, core_ms=0.113),
        Point(length=32768, chains=16, backend_ms=0.990, core_ms=0.583),
        Point(length=8192, chains=16, backend_ms=0.262, core_ms=0.180),
        Point(length=4096, chains=4, backend_ms=0.120, core_ms=0.0791),
        Point(length=512, chains=256, backend_ms=0.103, core_ms=0.114),
        Point(length=128, chains=512, backend_ms=0.0637, core_ms=0.0746),
        Point(length=512, chains=8, backend_ms=0.0266, core_ms=0.0293),
        Point(length=64, chains=2, backend_ms=0.0132, core_ms=0.0154),
    ),
    **_WITH,
)
#: The same with gate and sigmoid in the kernel too.
KDA = Measured((Point(length=8192, chains=96, backend_ms=1.206, core_ms=1.021),), **_WITH)
