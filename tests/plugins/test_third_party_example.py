# SPDX-License-Identifier: MIT
"""The example of a third-party backend, installed as its users install it, passes its own tests."""

from __future__ import annotations


def test_the_example_passes_its_own_tests(root, installed, run_tests):
    example = root / "examples" / "third_party_backend"
    done = run_tests(example, installed(example))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "fla conformance" in done.stdout
