# SPDX-License-Identifier: MIT
"""The cases of the kit: which calls are made of one function of one backend, and what is asserted about each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fla.testing import checks
from fla.testing.checks import Check, Outcome
from fla.testing.draw import Request
from fla.testing.target import DTYPES, HEAD_DIMS, NotRegistered, Target, Unavailable

LENGTHS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200)
#: Packed sequences by name.
PACKED: dict[str, tuple[int, ...]] = {
    "two": (40, 33),
    "leading_empty": (0, 40, 33),
    "middle_empty": (40, 0, 33),
    "trailing_empty": (40, 33, 0),
    "several_empty": (0, 0, 65, 0, 0, 1, 0),
    "one_token_each": (1, 1, 1, 1, 1),
    "one_token_between": (64, 1, 63, 1, 65),
    "whole_chunks": (64, 128, 64),
    "one_sequence": (70,),
    "all_empty": (0, 0),
    "many": (5, 17, 1, 0, 30, 2, 2, 9, 64, 3, 0, 11, 7),
}


@dataclass(frozen=True)
class Case:
    """One case. ``request`` is None for a case that has failed, or is skipped, before a call could be made."""

    target: Target
    name: str
    request: Request | None
    check: Check
    must_run: bool = False

    @property
    def id(self) -> str:
        return f"{self.target.backend}-{self.target.spec.name}-{self.name}"

    def run(self) -> Outcome:
        """Run the case.

        Raises:
            AssertionError: the backend is wrong.
            Unavailable: it cannot be used here.
            Exception: whatever it raised.
        """
        with torch.enable_grad():  # whatever mode a backend leaves behind, later cases begin with this one
            return self._run()

    def _run(self) -> Outcome:
        if self.request is None:
            usable = self.target.usable
            assert usable.base is not None, f"{self.target} on {self.target.device}: {usable.why_not}"
            return Outcome("ran")
        if self.must_run:
            return Outcome("ran", calls=self.check(self.target, self.request))
        return checks.outcome(self.target, self.request, self.check)


def cases(target: Target) -> list[Case]:
    """Every case for a target; one only, which says why, for a backend that cannot be used or takes no call."""
    try:
        base = target.usable.base
    except (Unavailable, NotRegistered):
        base = None
    if base is None:
        return [Case(target, "usable", None, checks.check_values)]
    found: list[Case] = []
    for make in (_forward, _sizes, _states, _packed, _memory, _conduct, _backward, _declared):
        found += make(target, base)
    seen: set[str] = set()
    return [case for case in found if not (case.name in seen or seen.add(case.name))]  # type: ignore[func-returns-value]


def _case(target: Target, check: Check, name: str, base: Request, **changes: Any) -> Case:
    return Case(target, name, replace(base, **changes), check)


def _forward(target: Target, base: Request) -> Iterator[Case]:
    """Each form of the op in each dtype."""
    for variant in target.spec.variants:
        for dtype in DTYPES:
            yield _case(
                target,
                checks.check_values,
                f"forward-{variant.name}-{dtype}",
                base,
                variant=variant.name,
                dtype=dtype,
            )


def _sizes(target: Target, base: Request) -> Iterator[Case]:
    for T in LENGTHS:
        yield _case(target, checks.check_values, f"length-T{T}", base, T=T)
    yield _case(target, checks.check_values, "length-T1030", base, T=1030, B=1, H=1)
    for K, V in dict.fromkeys((*HEAD_DIMS, (60, 100), (20, 12), (base.K, base.K), (base.V, base.V))):
        yield _case(target, checks.check_values, f"dims-K{K}-V{V}", base, K=K, V=V)
    for B, H in ((1, 1), (3, 5), (5, 3)):
        yield _case(target, checks.check_values, f"heads-B{B}-H{H}", base, B=B, H=H)
    if target.spec.grouped:
        for group in (2, 3):
            for T in (1, 70):
                yield _case(target, checks.check_values, f"gva-x{group}-T{T}", base, group=group, T=T)
        yield _case(target, checks.check_values, "gva-packed", base, group=2, lengths=PACKED["several_empty"])
    for scale in (1.0, 0.3) if target.takes("scale") else ():
        yield _case(target, checks.check_values, f"scale-{scale}", base, scale=scale)
    if any(x.wide for x in target.spec.inputs.values()):
        yield _case(target, checks.check_values, "gates-dtype_of_q", base, gates=base.dtype)
    yield _case(target, checks.check_values, "gates-float32", base, raw="float32")


def _states(target: Target, base: Request) -> Iterator[Case]:
    if not target.takes(target.op.facts.initial_state):
        return
    layouts = (False, True) if target.takes(target.op.facts.state_v_first) else (False,)
    for v_first in layouts:
        layout = "v_first" if v_first else "k_first"
        for initial in (None, "float32"):
            for final in (False, True):
                for lengths in (None, PACKED["middle_empty"]):
                    name = f"state-{layout}{'-initial' * bool(initial)}{'-final' * final}{'-packed' * bool(lengths)}"
                    changes = {"initial": initial, "final": final, "v_first": v_first, "lengths": lengths}
                    yield _case(target, checks.check_values, name, base, **changes)
        # Nothing to do but to hand the state on.
        yield _case(target, checks.check_values, f"state-{layout}-T0", base, T=0, v_first=v_first)
        yield _case(target, checks.check_values, f"state-{layout}-T1", base, T=1, v_first=v_first)
    for dtype in ("bfloat16", "float16"):
        yield _case(target, checks.check_values, f"state-in-{dtype}", base, initial=dtype)


def _packed(target: Target, base: Request) -> Iterator[Case]:
    if not target.takes(target.op.facts.cu_seqlens):
        return
    for name, lengths in PACKED.items():
        for initial in ("float32", None):
            suffix = "" if initial else "-no_state"
            yield _case(target, checks.check_values, f"packed-{name}{suffix}", base, lengths=lengths, initial=initial)
    packed = {"lengths": PACKED["several_empty"]}
    yield _case(target, checks.check_values, "packed-int32", base, offsets="int32", **packed)
    if target.takes("use_graph"):
        graph = {"variant": "graph", "lengths": PACKED["middle_empty"], "uncovered": 21}
        yield _case(target, checks.check_values, "packed-graph", base, **graph)
        yield _case(target, checks.check_poisoned, "poisoned-graph", base, **graph)
        yield _case(target, checks.check_values, "backward-packed-graph", base, grad=("*",), **graph)
    if target.takes(f"{target.op.facts.cu_seqlens}_cpu"):
        yield _case(target, checks.check_values, "packed-offsets_on_cpu", base, offsets_on_cpu=True, **packed)


def _memory(target: Target, base: Request) -> Iterator[Case]:
    for memory in ("padded", "head_first", "column", "expanded"):
        yield _case(target, checks.check_values, f"strides-{memory}", base, memory=memory)
        if target.takes(target.op.facts.cu_seqlens):
            lengths = PACKED["middle_empty"]
            yield _case(target, checks.check_values, f"strides-{memory}-packed", base, memory=memory, lengths=lengths)
    for T in (0, 1, 65, 128):
        yield _case(target, checks.check_poisoned, f"poisoned-T{T}", base, T=T)
        yield _case(target, checks.check_poisoned, f"poisoned-T{T}-no_state", base, T=T, initial=None)
    if target.takes(target.op.facts.cu_seqlens):
        for name in ("several_empty", "all_empty"):
            yield _case(target, checks.check_poisoned, f"poisoned-packed-{name}", base, lengths=PACKED[name])


def _conduct(target: Target, base: Request) -> Iterator[Case]:
    """How a backend behaves beyond the numbers."""
    packed: dict[str, Any] = {}
    if target.takes(target.op.facts.cu_seqlens):
        packed = {"lengths": PACKED["several_empty"]}
    for name, changes in (("", {}), ("-T0", {"T": 0}), ("-T1", {"T": 1}), ("-packed", packed)):
        yield _case(target, checks.check_kept, f"inputs_kept{name}", base, **changes)
    for variant in target.spec.variants:
        yield _case(target, checks.check_kept, f"inputs_kept-{variant.name}", base, variant=variant.name)
    for name, changes in (("", {}), ("-packed", packed), ("-no_state", {"initial": None})):
        yield _case(target, checks.check_repeatable, f"repeatable{name}", base, **changes)
        yield _case(target, checks.check_meta, f"meta{name}", base, **changes)
    yield Case(target, "without_grad", base, checks.check_without_grad, must_run=True)
    requires = replace(base, grad=("*",))
    yield Case(target, "without_grad-inputs_require_it", requires, checks.check_without_grad, must_run=True)
    if target.device.startswith("cuda"):
        yield _case(target, checks.check_stream, "stream", base)
        yield _case(target, checks.check_stream, "stream-packed", base, **packed)
        if torch.cuda.device_count() > 1:
            yield _case(target, checks.check_other_device, "other_device", base)


def _backward(target: Target, base: Request) -> Iterator[Case]:
    whole = replace(base, grad=("*",))

    def case(name: str, check: Check = checks.check_values, **changes: Any) -> Case:
        return _case(target, check, f"backward-{name}", whole, **changes)

    for variant in target.spec.variants:
        if not variant.without_grad:
            yield case(f"{variant.name}", variant=variant.name)
    for dtype in DTYPES:
        yield case(f"{base.variant}-{dtype}", dtype=dtype)
    for T in (0, 1, 63, 64, 65, 129):
        yield case(f"T{T}", T=T)
    variant = next(v for v in target.spec.variants if v.name == base.variant)
    names = [name for name, x in target.spec.inputs_of(variant).items() if x.grad]
    names += ["state"] * target.takes(target.op.facts.initial_state)
    for name in names:
        yield case(f"of_{name}_alone", grad=(name,))
    yield case("no_state", initial=None, final=False)
    yield case("of_sum", upstream="sum")
    for upstream in ("output", "state"):
        if target.takes("output_final_state"):
            yield case(f"through_{upstream}", upstream=upstream)
    if target.takes(target.op.facts.state_v_first):
        yield case("v_first", v_first=True)
    if target.spec.grouped:
        for group in (2, 3):
            yield case(f"gva-x{group}", group=group)
    if target.takes(target.op.facts.cu_seqlens):
        for name in ("leading_empty", "middle_empty", "trailing_empty", "several_empty", "one_token_between"):
            yield case(f"packed-{name}", lengths=PACKED[name])
        yield case("packed-no_state", lengths=PACKED["several_empty"], initial=None, final=False)
        yield case("poisoned-packed", checks.check_poisoned, lengths=PACKED["several_empty"])
    for memory in ("padded", "head_first", "column"):
        yield case(f"strides-{memory}", memory=memory)
    yield case("poisoned", checks.check_poisoned, T=65)
    yield case("inputs_kept", checks.check_kept)
    yield case("repeatable", checks.check_repeatable)
    if target.device.startswith("cuda"):
        yield case("stream", checks.check_stream)
    name = target.op.name
    if all(hasattr(target.instance, f"{name}_{part}") for part in ("fwd", "bwd")):
        yield case("pair", checks.check_pair)


def _declared(target: Target, base: Request) -> Iterator[Case]:
    """What a capability names has to be accepted: a verifier that refuses it contradicts the declaration."""
    stated, facts = target.usable.capability, target.op.facts
    if stated is None:
        return

    def case(name: str, **changes: Any) -> Case:
        return Case(target, f"declared-{name}", replace(base, **changes), checks.check_declared, must_run=True)

    for dtype in stated.dtypes or ():
        yield case(f"{dtype}".removeprefix("torch."), dtype=f"{dtype}".removeprefix("torch."))
    for K, V in stated.head_dims or ():
        yield case(f"K{K}-V{V}", K=int(K), V=int(V))
    if stated.gva and target.spec.grouped:
        yield case("gva", group=2)
    if stated.varlen and target.takes(facts.cu_seqlens):
        yield case("varlen", lengths=PACKED["two"])
    if stated.initial_state and target.takes(facts.initial_state):
        yield case("initial_state", initial="float32")
    for layout in stated.state_layouts or ():
        if target.takes(facts.state_v_first) or layout == "k_first":
            yield case(layout, v_first=layout == "v_first")
    if stated.backward:
        yield case("backward", grad=("*",))
