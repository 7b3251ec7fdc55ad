# SPDX-License-Identifier: MIT
"""Tile access of the kernels of the delta engine; see `fla.ops._common.tiles`."""

from fla.ops._common.tiles import load_rows, load_tile, state_offsets, store_rows, store_tile

__all__ = ["load_rows", "load_tile", "state_offsets", "store_rows", "store_tile"]
