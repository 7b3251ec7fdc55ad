# SPDX-License-Identifier: MIT
import sys
from pathlib import Path

for folder in ("ops", "modules"):
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / folder))
