# SPDX-License-Identifier: MIT
"""Where core's own Triton kernels are faster, the plugin declines (code `slower`) unless the user asks for it."""

from __future__ import annotations

from fla.backends import Measured, Point

#: Inference, everything in the kernel, no states; both in one run of ``benchmarks/overhead.py``, cold L2.
MEASURED = Measured(
    (
        Point(length=8192, chains=96, backend_ms=1.456, core_ms=1.021),
        Point(length=2048, chains=64, backend_ms=0.330, core_ms=0.203),
        Point(length=32768, chains=16, backend_ms=3.65, core_ms=0.883),
        Point(length=4096, chains=4, backend_ms=0.421, core_ms=0.145),
        Point(length=512, chains=256, backend_ms=0.219, core_ms=0.190),
        Point(length=128, chains=512, backend_ms=0.121, core_ms=0.108),
        Point(length=512, chains=8, backend_ms=0.0685, core_ms=0.0376),
        Point(length=64, chains=2, backend_ms=0.0205, core_ms=0.0236),
    ),
    card="H200",
    versions="torch 2.11, triton 3.6",
    core="1.0.0.dev0",
)
