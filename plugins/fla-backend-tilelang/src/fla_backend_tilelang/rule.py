# SPDX-License-Identifier: MIT
"""Where core's own Triton kernels are faster, the plugin declines (code `slower`) unless the user asks for it."""

from __future__ import annotations

from fla.backends import Measured, Point

_WITH = {"card": "H200", "versions": "torch 2.11, triton 3.6, tilelang 0.1.15", "core": "1.0.0.dev0"}

#: Inference, norms in the kernel, no states; all of both tables in one run of ``benchmarks/table.py``. A call among
#: others costs the time of the device (cold L2) or that of the host, whichever is longer. K and V are 128, in the last
#: line 64.
GATED_DELTA_RULE = Measured(
    (
        Point(length=8192, chains=96, backend_ms=0.5, core_ms=0.601),
        Point(length=2048, chains=64, backend_ms=0.171, core_ms=0.11),
        Point(length=32768, chains=16, backend_ms=0.908, core_ms=0.575),
        Point(length=8192, chains=16, backend_ms=0.241, core_ms=0.176),
        Point(length=4096, chains=4, backend_ms=0.211, core_ms=0.105),
        Point(length=512, chains=256, backend_ms=0.214, core_ms=0.112),
        Point(length=128, chains=512, backend_ms=0.198, core_ms=0.086),
        Point(length=512, chains=8, backend_ms=0.211, core_ms=0.092),
        Point(length=64, chains=2, backend_ms=0.219, core_ms=0.09),
        Point(length=8192, chains=192, backend_ms=0.762, core_ms=0.827),
    ),
    **_WITH,
)
#: The same with gate and sigmoid in the kernel too.
KDA = Measured(
    (
        Point(length=8192, chains=96, backend_ms=0.765, core_ms=1),
        Point(length=2048, chains=64, backend_ms=0.175, core_ms=0.197),
        Point(length=32768, chains=16, backend_ms=1.28, core_ms=0.873),
        Point(length=8192, chains=16, backend_ms=0.338, core_ms=0.267),
        Point(length=4096, chains=4, backend_ms=0.223, core_ms=0.144),
        Point(length=512, chains=256, backend_ms=0.215, core_ms=0.185),
        Point(length=128, chains=512, backend_ms=0.18, core_ms=0.105),
        Point(length=512, chains=8, backend_ms=0.187, core_ms=0.077),
        Point(length=64, chains=2, backend_ms=0.188, core_ms=0.075),
        Point(length=8192, chains=192, backend_ms=0.945, core_ms=1.08),
    ),
    **_WITH,
)
