# SPDX-License-Identifier: MIT
"""Names of the reference package that this version does not have yet, so that importing one says so."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["install", "missing"]

_LAYERS = (
    "ABCAttention BasedLinearAttention BitAttention CyclicFlowAttention DeltaFormerAttention ForgettingAttention "
    "GatedDeltaProduct LightNetAttention LogLinearMamba2 Mamba3 MesaNet MoBA MomAttention MomentumDeltaNet "
    "MultiheadLatentAttention NativeSparseAttention PaTHAttention Parallax PrecondGatedDeltaNet PrecondKDA "
    "RWKV7Attention Raven ReBasedLinearAttention RodimusAttention SlidingWindowSharedKeyAttention "
    "StickBreakingAttention WallAttention YOCOCrossAttention YOCOGatedRetention YOCOSharedKVBuilder"
)
LAYERS = frozenset(_LAYERS.split())
FAMILIES = {
    "abc": "ABC",
    "bitnet": "BitNet",
    "cat": "CAT",
    "cyfa": "CyclicFlowAttention",
    "deltaformer": "DeltaFormer",
    "forgetting_transformer": "ForgettingTransformer",
    "gated_deltaproduct": "GatedDeltaProduct",
    "lightnet": "LightNet",
    "log_linear_mamba2": "LogLinearMamba2",
    "mamba": "Mamba",
    "mamba3": "Mamba3",
    "mesa_net": "MesaNet",
    "mla": "MLA",
    "moba": "MoBA",
    "mom": "Mom",
    "nsa": "NSA",
    "parallax": "Parallax",
    "path_attn": "PaTHAttention",
    "precond_gated_deltanet": "PrecondGatedDeltaNet",
    "precond_kda": "PrecondKDA",
    "raven": "Raven",
    "rodimus": "Rodimus",
    "rwkv7": "RWKV7",
    "stickbreaking_attn": "StickBreakingAttention",
    "wall_transformer": "WallTransformer",
    "yoco": "YOCO",
}
"""Packages under ``fla.models`` and the stems of their classes. An entry that exists by now does no harm."""

_MODULES = (
    "abc based bitattn cyfa deltaformer forgetting_attn gated_deltaproduct lightnet log_linear_mamba2 mamba3 mesa_net "
    "mla moba mom momentum_deltanet nsa parallax path_attn precond_gated_deltanet precond_kda raven rebased rodimus "
    "rwkv7 stickbreaking_attn wall_attn yoco"
)
LAYER_MODULES = frozenset(_MODULES.split())

_MODELS = frozenset(f"{stem}{part}" for stem in FAMILIES.values() for part in ("Config", "ForCausalLM", "Model"))
_WHERE = {
    "fla": LAYERS | {name for name in _MODELS if not name.endswith("Config")},
    "fla.layers": LAYERS,
    "fla.models": _MODELS,
}


def missing(module: str, name: str) -> str:
    """What to say about a name that ``module`` does not have."""
    if name in _WHERE.get(module, ()):
        return f"{module}.{name} exists in the reference package and not in this version of fla yet; see docs/models.md"
    return f"module {module!r} has no attribute {name!r}"


class _Finder:
    """Comes last and finds nothing: turns the end of a search for one of the names into a clear error.

    ``from fla.models import X`` looks for a module ``fla.models.X`` when there is no such attribute.
    """

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: ModuleType | None = None) -> None:
        parent, _, name = fullname.rpartition(".")
        if name in _WHERE.get(parent, ()):
            raise ImportError(missing(parent, name), name=fullname)
        what = f" ({FAMILIES[name]} models)" if parent == "fla.models" and name in FAMILIES else ""
        if what or (parent == "fla.layers" and name in LAYER_MODULES):
            raise ModuleNotFoundError(
                f"{fullname}{what} exists in the reference package and not in this version of fla yet; see "
                "docs/models.md",
                name=fullname,
            )


def install() -> None:
    """Put the finder at the end of ``sys.meta_path``, once."""
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.append(_Finder)
