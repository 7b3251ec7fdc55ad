# SPDX-License-Identifier: MIT
"""Elementwise recurrences over time."""
