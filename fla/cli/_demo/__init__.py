# SPDX-License-Identifier: MIT
"""The parts of `fla demo`: text, baselines, training, speech, report."""
