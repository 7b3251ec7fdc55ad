# SPDX-License-Identifier: MIT
"""fla's kit against the host side of the plugin, with the programs in torch, on the CPU; `test_kit.py` runs this file.

Not collected by itself: the backends registered here must not be seen by other tests of the process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

from fla.backends import register
from fla.testing import BackendConformance

if importlib.util.find_spec("fla_backend_tilelang") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import stub_programs
from fla_backend_tilelang import plugin, scalar, timepass, vector

for module in (scalar, vector, timepass):
    module.program = stub_programs.program
for module in (scalar, vector):
    module.choose_block = lambda *call: 64


class OnTheCPU:
    backend_type = "tilelang_stub"
    package_name = None
    env_var = None
    capability = dataclasses.replace(plugin.TileLang.capability, device_types=("cpu",), compute_capability=None)

    @classmethod
    def is_available(cls):
        return True

    def probe(self):
        return True


class GatedDeltaRule(OnTheCPU, plugin.GatedDeltaRule):
    pass


class KDA(OnTheCPU, plugin.KDA):
    pass


register("gated_delta_rule", GatedDeltaRule())
register("kda", KDA())


class TestConformance(BackendConformance):
    backend_type = "tilelang_stub"
    require = True
