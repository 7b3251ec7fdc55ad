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
        Point(length=8192, chains=96, backend_ms=0.504, core_ms=0.588),
        Point(length=2048, chains=64, backend_ms=0.253, core_ms=0.107),
        Point(length=32768, chains=16, backend_ms=0.908, core_ms=0.568),
        Point(length=8192, chains=16, backend_ms=0.427, core_ms=0.2),
        Point(length=4096, chains=4, backend_ms=0.422, core_ms=0.195),
        Point(length=512, chains=256, backend_ms=0.419, core_ms=0.168),
        Point(length=128, chains=512, backend_ms=0.423, core_ms=0.164),
        Point(length=512, chains=8, backend_ms=0.425, core_ms=0.166),
        Point(length=64, chains=2, backend_ms=0.41, core_ms=0.164),
        Point(length=8192, chains=192, backend_ms=0.765, core_ms=0.793),
    ),
    **_WITH,
)
#: The same with gate and sigmoid in the kernel too.
KDA = Measured(
    (
        Point(length=8192, chains=96, backend_ms=0.767, core_ms=0.913),
        Point(length=2048, chains=64, backend_ms=0.247, core_ms=0.177),
        Point(length=32768, chains=16, backend_ms=1.28, core_ms=0.807),
        Point(length=8192, chains=16, backend_ms=0.391, core_ms=0.246),
        Point(length=4096, chains=4, backend_ms=0.376, core_ms=0.158),
        Point(length=512, chains=256, backend_ms=0.391, core_ms=0.164),
        Point(length=128, chains=512, backend_ms=0.37, core_ms=0.148),
        Point(length=512, chains=8, backend_ms=0.375, core_ms=0.147),
        Point(length=64, chains=2, backend_ms=0.369, core_ms=0.147),
        Point(length=8192, chains=192, backend_ms=0.945, core_ms=0.94),
    ),
    **_WITH,
)
