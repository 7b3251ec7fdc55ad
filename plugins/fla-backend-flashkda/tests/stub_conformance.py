# SPDX-License-Identifier: MIT
"""fla's kit against the adapter with the stub in the place of the wheel, on the CPU; `test_kit.py` runs this file.

Not collected by itself: the backend registered here must not be seen by other tests of the process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path

from fla.backends import register
from fla.testing import BackendConformance

if importlib.util.find_spec("fla_backend_flashkda") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import stub_flash_kda
from fla_backend_flashkda import probe
from fla_backend_flashkda.plugin import FlashKDA

sys.modules["flash_kda"] = stub_flash_kda


class OnTheCPU(FlashKDA):
    backend_type = "flash_kda_stub"
    capability = dataclasses.replace(FlashKDA.capability, device_types=("cpu",), compute_capability=None)

    def probe(self):
        import torch

        return probe.check(self.chunk_kda, torch.device("cpu"))


register("kda", OnTheCPU())


class TestConformance(BackendConformance):
    backend_type = "flash_kda_stub"
    require = True
