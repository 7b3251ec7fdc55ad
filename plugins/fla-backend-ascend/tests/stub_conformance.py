# SPDX-License-Identifier: MIT
"""fla's kit against the backend on CPU tensors that stand for an NPU's: core's kernels in Triton's interpreter, under
the NPU's policy. `test_kit.py` runs this file.

Not collected by itself: the backend registered here must not be seen by other tests of the process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

from fla.backends import register
from fla.ops._common import policy
from fla.testing import BackendConformance

if importlib.util.find_spec("fla_backend_ascend") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from fla_backend_ascend import plugin
from fla_backend_ascend.chips import KIB
from fla_backend_ascend.policy import described

# A small buffer, so that blocks are cut.
NPU = described(112 * KIB, 20)
policy.describe_chip("cpu", lambda device: NPU)


class OnTheCPU(plugin.Ascend):
    backend_type = "triton_ascend_stub"
    package_name = None
    env_var = None
    capability = dataclasses.replace(plugin.Ascend.capability, device_types=("cpu",))

    @classmethod
    def unavailable_reason(cls):
        return None

    def probe(self):
        return True


for operation in plugin.COVERED:
    register(operation, OnTheCPU(operation))


class TestConformance(BackendConformance):
    backend_type = "triton_ascend_stub"
    require = True
