# SPDX-License-Identifier: MIT
"""The Triton side of the losses over classes: cross entropy, and divergence of two softmaxes."""
