# SPDX-License-Identifier: MIT
"""How ops describe themselves to the kit: which inputs a call has, in which forms, and what it must compute.

One row per function. Names of states, offsets and layout flags are not repeated here: they come from the op's
``CallFacts``, which is what a backend's capability is compared with as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SPECS", "Input", "OpSpec", "Variant", "add_spec", "functions_of"]

#: RMS error over RMS of the float64 recurrence, by dtype: (outputs and states, gradients). float32 is 1e-4 on a GPU.
TOLERANCES: Mapping[str, tuple[float, float]] = {
    "float64": (1e-10, 1e-10),
    "float32": (1e-5, 1e-5),
    "float16": (5e-3, 1e-2),
    "bfloat16": (5e-3, 1e-2),
}


@dataclass(frozen=True)
class Input:
    """One tensor of a call.

    Attributes:
        shape: axes among ``B T H HV K V``, as in ``"B T HV K"``.
        draw: distribution, a name in :mod:`fla.testing.draw`.
        wide: float32 in 16-bit calls; otherwise the dtype of q.
        grad: whether the op is differentiable in it.
    """

    shape: str
    draw: str = "normal"
    wide: bool = False
    grad: bool = True


@dataclass(frozen=True)
class Variant:
    """A form of a call: flags, and inputs that are added, replaced or (None) left out.

    Attributes:
        without_grad: the op allows it under ``torch.no_grad`` only.
    """

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Input | None] = field(default_factory=dict)
    without_grad: bool = False


@dataclass(frozen=True)
class OpSpec:
    """One function.

    Attributes:
        operation, name: as in ``kda`` and ``chunk_kda``.
        inputs: tensors of every call, in no particular order.
        variants: forms, the plainest first.
        reference: ``(values, flags) -> [results]`` for one unpacked batch in float64, states K-first; see
            :mod:`fla.testing.reference`.
        grouped: value heads may be a multiple of key heads.
        module: where the function is, ``fla.ops.<operation>`` unless given.
        tolerances: as :data:`TOLERANCES`, where an op needs others.
    """

    operation: str
    name: str
    inputs: Mapping[str, Input]
    variants: tuple[Variant, ...]
    reference: str
    grouped: bool = False
    module: str | None = None
    tolerances: Mapping[str, tuple[float, float]] = field(default_factory=lambda: TOLERANCES)

    def __str__(self) -> str:
        return f"{self.operation}.{self.name}"

    @property
    def function(self) -> Callable[..., Any]:
        """The public wrapper, imported now."""
        return getattr(importlib.import_module(self.module or f"fla.ops.{self.operation}"), self.name)

    def compute(self, values: Mapping[str, Any], flags: Mapping[str, Any]) -> list[Any]:
        """The token recurrence."""
        module, _, name = self.reference.partition(":")
        return getattr(importlib.import_module(module), name)(values, flags)

    def inputs_of(self, variant: Variant) -> dict[str, Input]:
        return {name: x for name, x in {**self.inputs, **variant.inputs}.items() if x is not None}


_DELTA, _LINEAR = "fla.testing.reference:delta", "fla.testing.reference:linear"
PLAIN = Variant("plain")
_CHUNKS_OF_16, _CHUNKS_OF_32 = (Variant(f"chunks_of_{size}", {"chunk_size": size}) for size in (16, 32))

# The delta family

_HEADS = {"q": Input("B T H K"), "k": Input("B T H K", "unit"), "v": Input("B T HV V")}
_BETA = Input("B T HV", "unit_interval", wide=True)
_RAW_BETA = Input("B T HV")
_NORM = Variant("l2norm", {"use_qk_l2norm_in_kernel": True}, {"k": Input("B T H K")})
_SIGMOID = {"use_beta_sigmoid_in_kernel": True}
_PARAMETERS = {"A_log": Input("HV", "rate", wide=True)}


def _gate(name: str, raw: Input, bias: str | None, flags: Mapping[str, Any], *, whole: bool = False) -> Variant:
    """The decay from a raw gate; ``whole``: everything else in the kernel too."""
    flags = {"use_gate_in_kernel": True, **flags}
    inputs: dict[str, Input | None] = {"g": raw, **_PARAMETERS}
    if bias is not None:
        inputs["dt_bias"] = Input(bias, wide=True)
    if whole:
        flags = {**_NORM.flags, **_SIGMOID, **flags}
        inputs |= {"k": Input("B T H K"), "beta": _RAW_BETA}
    return Variant(name, flags, inputs)


_SAFE = {"lower_bound": -5.0, "safe_gate": True}
_RAW_KDA, _RAW_GDN = Input("B T HV K"), Input("B T HV")
_KDA = {**_HEADS, "g": Input("B T HV K", "decay", wide=True), "beta": _BETA}
_GDN = {**_HEADS, "g": Input("B T HV", "decay", wide=True), "beta": _BETA}
_WRITE_GATE = (
    Variant("sigmoid", _SIGMOID, {"beta": _RAW_BETA}),
    Variant("neg_eigval", {**_SIGMOID, "allow_neg_eigval": True}, {"beta": _RAW_BETA}),
)
_PER_VALUE = Variant("beta_per_value", {}, {"beta": Input("B T HV V", "unit_interval", wide=True)})
_KDA_VARIANTS = (
    PLAIN,
    _NORM,
    Variant("strong_decay", {}, {"g": Input("B T HV K", "strong_decay", wide=True)}),
    *_WRITE_GATE,
    _gate("gate", _RAW_KDA, "HV*K", {}),
    _gate("bounded_gate", _RAW_KDA, None, {"lower_bound": -3.0}),
)
_DELTA_RULE = {**_HEADS, "v": Input("B T H V"), "beta": Input("B T H", "unit_interval", wide=True)}
_GDN_VARIANTS = (
    PLAIN,
    _NORM,
    Variant("strong_decay", {}, {"g": Input("B T HV", "strong_decay", wide=True)}),
    *_WRITE_GATE,
    _gate("gate", _RAW_GDN, "HV", {}),
    _gate("all_in_kernel", _RAW_GDN, "HV", {}, whole=True),
)
_UNIT_KEY = Input("B T H K", "unit")
_COMBA = {**_GDN, "p": _UNIT_KEY}
_COMBA_VARIANTS = (
    PLAIN,
    Variant("l2norm", _NORM.flags, {"k": Input("B T H K"), "p": Input("B T H K")}),
    Variant("strong_decay", {}, {"g": Input("B T HV", "strong_decay", wide=True)}),
    Variant("no_beta", {}, {"beta": None}),
)
_GDN2 = {
    **_HEADS,
    "g": Input("B T HV K", "decay", wide=True),
    "b": Input("B T HV K", "unit_interval", wide=True),
    "w": Input("B T HV V", "unit_interval", wide=True),
}
_GDN2_VARIANTS = (
    PLAIN,
    _NORM,
    Variant("strong_decay", {}, {"g": Input("B T HV K", "strong_decay", wide=True)}),
    _gate("gate", _RAW_KDA, "HV*K", {}),
    _gate("bounded_gate", _RAW_KDA, None, {"lower_bound": -3.0}),
)

# The linear family

_LINEAR_HEADS = {"q": Input("B T H K"), "k": Input("B T H K"), "v": Input("B T H V")}
_POSITIVE = {"q": Input("B T H K", "positive"), "k": Input("B T H K", "positive")}
_REVERSE = Variant("reverse", {"reverse": True})
_GK, _GV = (Input(f"B T H {axis}", "decay", wide=True) for axis in "KV")
_G = Input("B T H", "decay", wide=True)
_GAMMA = Variant("fixed_decay", {}, {"g": None, "g_gamma": Input("H", "decay", wide=True, grad=False)})
_RWKV6 = {
    "r": Input("B T H K"),
    "k": Input("B T H K"),
    "v": Input("B T H V"),
    "w": _GK,
    "u": Input("H K", wide=True),
}
_STRONG_RWKV6 = Variant("strong_decay", {}, {"w": Input("B T H K", "strong_decay", wide=True)})
_LAYER = {"layer_idx": 1, "num_layers": 4}

_ROWS = (
    OpSpec(
        "kda",
        "chunk_kda",
        _KDA,
        (
            *_KDA_VARIANTS,
            _gate("all_bounded", _RAW_KDA, "HV*K", _SAFE, whole=True),
            _gate("all_bounded_no_bias", _RAW_KDA, None, _SAFE, whole=True),
            _gate("all_in_kernel", _RAW_KDA, "HV*K", {}, whole=True),
            Variant("safe_gate", {"safe_gate": True}),
            Variant("no_recompute", {"disable_recompute": True}),
            _CHUNKS_OF_32,
            Variant("graph", {"use_graph": True}),
            Variant("intermediate_states", {"return_intermediate_states": True}, without_grad=True),
        ),
        _DELTA,
        grouped=True,
    ),
    OpSpec("kda", "fused_recurrent_kda", _KDA, (*_KDA_VARIANTS, _PER_VALUE), _DELTA, grouped=True),
    OpSpec("gated_delta_rule", "chunk_gated_delta_rule", _GDN, (*_GDN_VARIANTS, _CHUNKS_OF_32), _DELTA, grouped=True),
    OpSpec(
        "gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        _GDN,
        (
            *_GDN_VARIANTS,
            _PER_VALUE,
            Variant("no_beta", {}, {"beta": None}),
            Variant("no_decay", {}, {"g": None}),
            Variant("decay_per_key", {}, {"g": None, "gk": Input("B T HV K", "decay", wide=True)}),
            Variant("decay_per_value", {}, {"g": None, "gv": Input("B T HV V", "decay", wide=True)}),
        ),
        _DELTA,
        grouped=True,
    ),
    OpSpec("delta_rule", "chunk_delta_rule", _DELTA_RULE, (PLAIN, _NORM, _CHUNKS_OF_32), _DELTA),
    OpSpec(
        "delta_rule",
        "fused_recurrent_delta_rule",
        _DELTA_RULE,
        (
            PLAIN,
            _NORM,
            Variant("no_beta", {}, {"beta": None}),
            Variant("beta_per_value", {}, {"beta": Input("B T H V", "unit_interval", wide=True)}),
        ),
        _DELTA,
    ),
    *(
        OpSpec("comba", name, _COMBA, _COMBA_VARIANTS, "fla.testing.reference:comba", grouped=True)
        for name in ("chunk_comba", "fused_recurrent_comba")
    ),
    *(
        OpSpec("gdn2", name, _GDN2, _GDN2_VARIANTS, "fla.testing.reference:gdn2", grouped=True)
        for name in ("chunk_gdn2", "fused_recurrent_gdn2")
    ),
    OpSpec(
        "gla",
        "chunk_gla",
        {**_LINEAR_HEADS, "g": _GK},
        (PLAIN, Variant("strong_decay", {}, {"g": Input("B T H K", "strong_decay", wide=True)})),
        _LINEAR,
    ),
    OpSpec(
        "gla",
        "fused_recurrent_gla",
        {**_LINEAR_HEADS, "gk": _GK},
        (
            PLAIN,
            _REVERSE,
            Variant("no_decay", {}, {"gk": None}),
            Variant("decay_per_value", {}, {"gk": None, "gv": _GV}),
            Variant("decay_per_both", {}, {"gv": _GV}),
        ),
        _LINEAR,
    ),
    OpSpec(
        "simple_gla",
        "chunk_simple_gla",
        {**_LINEAR_HEADS, "g": _G},
        (
            PLAIN,
            _GAMMA,
            Variant("no_decay", {}, {"g": None}),
            Variant("strong_decay", {}, {"g": Input("B T H", "strong_decay", wide=True)}),
            _CHUNKS_OF_16,
        ),
        _LINEAR,
    ),
    OpSpec(
        "simple_gla",
        "fused_chunk_simple_gla",
        {**_LINEAR_HEADS, "g": _G},
        (PLAIN, _GAMMA, Variant("no_decay", {}, {"g": None})),
        _LINEAR,
    ),
    OpSpec(
        "simple_gla",
        "fused_recurrent_simple_gla",
        {**_LINEAR_HEADS, "g": _G},
        (PLAIN, _GAMMA, Variant("no_decay", {}, {"g": None}), _REVERSE),
        _LINEAR,
    ),
    OpSpec("simple_gla", "parallel_simple_gla", {**_LINEAR_HEADS, "g": _G}, (PLAIN,), _LINEAR),
    OpSpec("rwkv6", "chunk_rwkv6", _RWKV6, (PLAIN, _STRONG_RWKV6, _CHUNKS_OF_16), "fla.testing.reference:rwkv6"),
    OpSpec("rwkv6", "fused_recurrent_rwkv6", _RWKV6, (PLAIN, _STRONG_RWKV6, _REVERSE), "fla.testing.reference:rwkv6"),
    *(
        OpSpec("retention", name, _LINEAR_HEADS, variants, "fla.testing.reference:retention")
        for name, variants in (
            ("chunk_retention", (PLAIN, _CHUNKS_OF_16)),
            ("fused_chunk_retention", (PLAIN,)),
            ("fused_recurrent_retention", (PLAIN, _REVERSE)),
            ("parallel_retention", (PLAIN,)),
        )
    ),
    *(
        OpSpec(
            "linear_attn",
            name,
            _LINEAR_HEADS,
            (
                Variant("plain", {"normalize": False}),
                Variant("normalized", {"normalize": True}, _POSITIVE),
                *reverse,
            ),
            "fla.testing.reference:linear_attn",
        )
        for name, reverse in (
            ("chunk_linear_attn", ()),
            ("fused_chunk_linear_attn", ()),
            ("fused_recurrent_linear_attn", (Variant("reverse", {"reverse": True, "normalize": False}),)),
        )
    ),
    *(
        OpSpec("lightning_attn", name, _LINEAR_HEADS, variants, "fla.testing.reference:lightning")
        for name, variants in (
            ("chunk_lightning_attn", (Variant("plain", _LAYER), Variant("chunks_of_16", {**_LAYER, "chunk_size": 16}))),
            (
                "fused_recurrent_lightning_attn",
                (Variant("plain", _LAYER), Variant("reverse", {**_LAYER, "reverse": True})),
            ),
        )
    ),
)

#: ``(operation, function) -> row``.
SPECS: dict[tuple[str, str], OpSpec] = {(row.operation, row.name): row for row in _ROWS}


def add_spec(row: OpSpec) -> None:
    """Let the kit test one more op, for packages that bring their own.

    Raises:
        ValueError: there is a row for this function already.
    """
    if (row.operation, row.name) in SPECS:
        raise ValueError(f"the kit has a row for {row} already")
    SPECS[row.operation, row.name] = row


def functions_of(operation: str) -> list[OpSpec]:
    """The rows of an operation."""
    return [row for (room, _), row in SPECS.items() if room == operation]
