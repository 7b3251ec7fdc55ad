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
        Point(length=8192, chains=96, backend_ms=0.501, core_ms=0.603),
        Point(length=2048, chains=64, backend_ms=0.168, core_ms=0.111),
        Point(length=32768, chains=16, backend_ms=0.913, core_ms=0.576),
        Point(length=8192, chains=16, backend_ms=0.242, core_ms=0.177),
        Point(length=4096, chains=4, backend_ms=0.212, core_ms=0.107),
        Point(length=512, chains=256, backend_ms=0.208, core_ms=0.112),
        Point(length=128, chains=512, backend_ms=0.204, core_ms=0.086),
        Point(length=512, chains=8, backend_ms=0.196, core_ms=0.069),
        Point(length=64, chains=2, backend_ms=0.148, core_ms=0.065),
        Point(length=8192, chains=192, backend_ms=0.762, core_ms=0.829),
    ),
    **_WITH,
)
#: The same with gate and sigmoid in the kernel too.
KDA = Measured(
    (
        Point(length=8192, chains=96, backend_ms=0.766, core_ms=0.912),
        Point(length=2048, chains=64, backend_ms=0.19, core_ms=0.178),
        Point(length=32768, chains=16, backend_ms=1.29, core_ms=0.808),
        Point(length=8192, chains=16, backend_ms=0.339, core_ms=0.246),
        Point(length=4096, chains=4, backend_ms=0.172, core_ms=0.139),
        Point(length=512, chains=256, backend_ms=0.172, core_ms=0.164),
        Point(length=128, chains=512, backend_ms=0.165, core_ms=0.0942),
        Point(length=512, chains=8, backend_ms=0.156, core_ms=0.065),
        Point(length=64, chains=2, backend_ms=0.161, core_ms=0.067),
        Point(length=8192, chains=192, backend_ms=0.944, core_ms=0.938),
    ),
    **_WITH,
)
