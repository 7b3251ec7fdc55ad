# SPDX-License-Identifier: MIT
"""The rows of :mod:`fla.settings`: data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """One variable.

    ``type`` is ``bool``, ``int``, ``str`` or ``list`` (comma-separated). ``read`` says when the value is looked at.
    ``default`` None means that whoever reads it decides. ``owner`` names the plugin or backend whose variable it is.
    """

    name: str
    type: str
    default: Any
    meaning: str
    read: str = "each call"
    choices: tuple[str, ...] = ()
    minimum: int | None = None
    owner: str = "core"


BACKEND_READ = "each call; set, it beats FLA_PLUGINS and the backend's default"

TABLE: tuple[Setting, ...] = (
    Setting(
        "FLA_DISABLE_BACKEND_DISPATCH",
        "bool",
        False,
        "Run the core implementation everywhere; no plugin is discovered or called. Inside a strict pin: an error.",
    ),
    Setting(
        "FLA_PLUGINS",
        "list",
        (),
        "Plugins to admit (`tilelang,flashkda`: only these) or to keep out (`-flashkda`: all but this). "
        "What is kept out is never imported.",
    ),
    Setting(
        "FLA_BACKEND_STRICT",
        "bool",
        False,
        "Raise what a backend or its verifier raises instead of warning and running the next candidate.",
    ),
    Setting(
        "FLA_CHECK_INPUTS",
        "bool",
        False,
        "Check values of GPU tensors too (cu_seqlens content, slot ids). Costs a device synchronisation.",
    ),
    Setting(
        "FLA_CORE_GLUON",
        "bool",
        True,
        "Passes that core has in Gluon as well as in Triton run in Gluon where that is known to work.",
        "first use in the process",
    ),
    Setting("FLA_FLASH_KDA", "bool", None, "The flash_kda backend on or off.", BACKEND_READ, owner="flash_kda"),
    Setting("FLA_TILELANG", "bool", None, "The tilelang backends on or off.", BACKEND_READ, owner="tilelang"),
    Setting("FLA_ASCEND", "bool", None, "The triton_ascend backends on or off.", BACKEND_READ, owner="triton_ascend"),
    Setting(
        "FLA_CONV_BACKEND",
        "str",
        None,
        "Backend of short convolutions whose constructor does not name one.",
        "construction of the module",
        ("cuda", "triton"),
    ),
    Setting(
        "FLA_DISABLE_TENSOR_CACHE",
        "bool",
        False,
        "Recompute index tensors (chunk indices, offsets) at each call instead of remembering the last ones.",
    ),
    Setting("FLA_TENSOR_CACHE_SIZE", "int", 4, "How many results each remembered index function keeps.", minimum=1),
)

# Variables of the 0.6.0 series that mean nothing here, with what took their place.
INERT: dict[str, str] = {
    "FLA_ATTNRES_GLUON": "core ships no Gluon kernels",
    "FLA_BENCH_COOLDOWN_SEC": "benchmark scripts take options",
    "FLA_BENCH_OP_WARMUP_ITERS": "benchmark scripts take options",
    "FLA_BENCH_REP_MS": "benchmark scripts take options",
    "FLA_BENCH_WARMUP_MS": "benchmark scripts take options",
    "FLA_CACHE_MODE": "kernels are not tuned at run time, so there is no configuration cache",
    "FLA_CACHE_RESULTS": "kernels are not tuned at run time",
    "FLA_CE_GLUON": "core ships no Gluon kernels",
    "FLA_CI_ENV": "comparisons are never loosened by the environment",
    "FLA_CONFIG_DIR": "kernels are not tuned at run time, so there is no configuration directory",
    "FLA_CONV_GLUON": "core ships no Gluon kernels",
    "FLA_FLASH_QLA": "core ships no FlashQLA adapter",
    "FLA_GLUON": "core ships no Gluon backend",
    "FLA_GPU_NAME": "kernels are not tuned at run time, so there is no configuration directory",
    "FLA_INTRACARD_CP": "the state pass splits long sequences by a fixed rule",
    "FLA_INTRACARD_MAX_SPLITS": "the state pass splits long sequences by a fixed rule",
    "FLA_NPU_XDIST": "test workers are not mapped to NPUs",
    "FLA_TRIL_PRECISION": "the precision of triangular solves is fixed",
    "FLA_USE_COMPILE": "no part of the package compiles itself",
    "FLA_USE_FAST_OPS": "which intrinsics kernels use is fixed",
    "FLA_USE_TMA": "launch policies decide on tensor descriptors",
}
