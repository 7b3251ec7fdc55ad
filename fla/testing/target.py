# SPDX-License-Identifier: MIT
"""What is tested: one backend for one function on one device, and whether it takes a call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from fla.backends import (
    BackendRegistry,
    BaseBackend,
    DispatchedOp,
    Facts,
    Verdict,
    devices,
    explain,
    list_backends,
    list_plugins,
    switches,
    use_backend,
)
from fla.testing.draw import Call, Request, draw
from fla.testing.specs import SPECS, OpSpec, functions_of

CORE = ("triton", "torch")
DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Head dimensions tried where a backend names none. Unequal ones tell the two state layouts apart.
HEAD_DIMS = ((32, 16), (64, 128), (32, 32), (64, 64), (128, 128), (16, 16), (256, 256))


#: (B, T) tried, for backends that take whole chunks or one sequence only.
SHAPES = ((2, 70), (2, 128), (1, 70), (1, 128))


class Unavailable(Exception):
    """The backend cannot be used on this machine, or is switched off; the text says why."""


class NotRegistered(Exception):
    """No backend of this name is registered for anything that the kit knows."""


@dataclass(eq=False)
class Target:
    """See the module's text. ``fixed`` are arguments that every call is given."""

    backend: str
    spec: OpSpec
    device: str
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.backend} for {self.spec}"

    @cached_property
    def function(self) -> Any:
        return self.spec.function

    @cached_property
    def op(self) -> DispatchedOp:
        return self.function.op

    @cached_property
    def instance(self) -> BaseBackend | None:
        """The registered backend; None for a path of core."""
        found = BackendRegistry(self.op.key).backends
        return next((b for b in found if b.backend_type == self.backend), None)

    @cached_property
    def tolerances(self) -> dict[str, tuple[float, float]]:
        """RMS error over RMS of the truth by dtype, for results and gradients.

        A backend may state lower accuracy in its attribute ``testing_tolerances``, up to twice the op's tolerance; the
        tally repeats what it states.
        """
        found = dict(self.spec.tolerances)
        if self.device != "cpu":
            found["float32"] = (max(found["float32"][0], 1e-4), max(found["float32"][1], 1e-4))
        for dtype, (forward, backward) in self.stated_tolerances.items():
            most = tuple(2 * limit for limit in found[dtype])
            if forward > most[0] or backward > most[1]:
                raise AssertionError(
                    f"{self.backend} states tolerances {(forward, backward)} for {dtype}; the kit allows {most} at most"
                )
            found[dtype] = (forward, backward)
        return found

    @cached_property
    def stated_tolerances(self) -> dict[str, tuple[float, float]]:
        return dict(getattr(self.instance, "testing_tolerances", None) or {})

    @contextmanager
    def pinned(self) -> Iterator[None]:
        with use_backend(self.backend, strict=True):
            yield

    def mode(self, call: Call) -> AbstractContextManager[Any]:
        """Grad mode off for forms of the op that want it so."""
        return torch.no_grad() if call.variant.without_grad else nullcontext()

    def draw(self, request: Request) -> Call:
        return draw(self.op, self.spec, request, self.device, self.fixed)

    def verdict(self, call: Call) -> Verdict:
        """What the backend says to a call, under a strict pin; nothing is run."""
        with self.pinned(), self.mode(call):
            return explain(self.function, **call.keywords()).verdict(self.backend)

    def takes(self, parameter: str | None) -> bool:
        """Whether the op has a parameter."""
        return parameter is not None and parameter in self.op.signature.parameters

    @cached_property
    def usable(self) -> Accepted:
        """What of the simplest calls the backend takes. Raises :class:`Unavailable`."""
        self.check_available()
        return self._accepted()

    def check_available(self) -> None:
        """Raise :class:`Unavailable` where packages, a switch, a probe or the hardware keep the backend out."""
        kind = torch.device(self.device).type
        if self.backend == "torch":
            return
        if self.backend == "triton":
            if not devices.has_triton_driver(kind) and not (kind == "cpu" and devices.triton_interprets()):
                raise Unavailable(f"no Triton driver for {kind}")
            return
        if self.instance is None:
            raise NotRegistered(f"{self.backend} is not registered for {self.spec.operation}")
        # A pin turns on what a switch has turned off, so only what is missing matters.
        refusal = switches.availability(self.instance)
        if refusal is not None:
            raise Unavailable(refusal.text)
        reason = device_refusal(self.instance, self.device)
        if reason is not None:
            raise Unavailable(reason)
        refused = probe(self.instance)
        if refused is not None:
            raise Unavailable(refused)

    def _accepted(self) -> Accepted:
        capability = None if self.instance is None else self.instance.capability
        declared = None if capability is None else capability.head_dims
        dims = [(int(K), int(V)) for K, V in declared] if declared else list(HEAD_DIMS)
        dims.sort(key=lambda pair: (pair[0] == pair[1], pair[0] * pair[1]) if declared else (False, 0))
        stated = None if capability is None else capability.dtypes
        known = [d for d in DTYPES if stated is None or d in {str(s).removeprefix("torch.") for s in stated}]
        if stated is not None and not known:
            known = list(DTYPES)
        refusals: dict[str, str] = {}
        for (B, T), (K, V), dtype, variant in itertools.product(SHAPES, dims, known, self.spec.variants):
            request = Request(variant.name, dtype, B=B, T=T, K=K, V=V, initial=None, final=False)
            verdict = self.verdict(self.draw(request))
            if verdict.accepted:
                return Accepted(self._with_states(request), capability)
            refusals.setdefault(f"{variant.name}, {dtype}, B={B}, T={T}, K={K}, V={V}", str(verdict))
        return Accepted(None, capability, refusals)

    def _with_states(self, request: Request) -> Request:
        """The request with as many states as the backend takes, so that as much as possible is tested with them."""
        for initial, final in (("float32", True), (None, True), ("float32", False)):
            asked = replace(request, initial=initial, final=final)
            if self.verdict(self.draw(asked)).accepted:
                return asked
        return request


@dataclass(frozen=True)
class Accepted:
    """The simplest call that a backend takes, with states where it takes them; None: it takes no form of the op."""

    base: Request | None
    capability: Any
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def why_not(self) -> str:
        shown = [f"{what}: {reason}" for what, reason in list(self.refusals.items())[:12]]
        return "no form of the op is accepted:\n  " + "\n  ".join(shown)


def device_refusal(backend: BaseBackend | None, device: str) -> str | None:
    """Why a backend's capability rules out the device itself, or the machine has none such."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        return "this machine has no CUDA device"
    if backend is None or backend.capability is None:
        return None
    facts = Facts(torch.device(device), (), None, None, None, False, False, None, False)
    refusal = backend.capability.check(facts)
    return None if refusal is None else refusal.text


def probe(backend: BaseBackend | None) -> str | None:
    """Run the one-time probe that the first call would run; what it objects to."""
    refusal = None if backend is None else switches.probe(backend)
    return None if refusal is None else refusal.text


def choose_device(backend: BaseBackend | None, name: str) -> str:
    """The device to test on where the user names none: an accelerator if the backend is for one, else the CPU."""
    capability = None if backend is None else backend.capability
    stated = None if capability is None else capability.device_types
    for kind in (*devices.accelerators(), "cpu"):
        if stated is None or kind in stated:
            return kind
    return next(iter(stated)) if stated else "cpu"


def targets(
    backend: str,
    *,
    device: str | None = None,
    ops: tuple[str, ...] = (),
    fixed: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[list[Target], list[str]]:
    """The functions that a backend takes over, and the names of those that the kit has no row for.

    Args:
        backend: a ``backend_type``, ``triton`` or ``torch``.
        device: as torch writes it; None chooses one that the backend is for.
        ops: operations or functions to keep; empty for all.
        fixed: function name -> arguments that every call is given.

    Raises:
        NotRegistered: no backend of this name is registered for an operation that the kit knows.
    """
    for spec in SPECS.values():
        spec.function  # noqa: B018  an op is known to the framework once its module is imported
    wanted = lambda spec: not ops or spec.operation in ops or spec.name in ops
    if backend in CORE:
        specs = [
            s for s in SPECS.values() if backend == "torch" or Target(backend, s, "cpu").op.triton_path is not None
        ]
        unknown: list[str] = []
    else:
        rows = [row for row in list_backends() if row["backend"] == backend]
        specs = [s for row in rows for s in functions_of(row["operation"]) if s.name in row["functions"]]
        known = {(s.operation, s.name) for s in SPECS.values()}
        unknown = [f"{r['operation']}.{f}" for r in rows for f in r["functions"] if (r["operation"], f) not in known]
        if not rows:
            raise NotRegistered(_not_registered(backend))
    found = []
    for spec in specs:
        if wanted(spec):
            target = Target(backend, spec, "cpu")
            own = getattr(target.instance, "testing_arguments", None) or {}
            target.fixed = {**own.get(spec.name, {}), **(fixed or {}).get(spec.name, {})}
            target.device = device or choose_device(target.instance, backend)
            found.append(target)
    return found, [name for name in unknown if not ops or name.split(".")[0] in ops or name.split(".")[1] in ops]


def _not_registered(backend: str) -> str:
    names = sorted({row["backend"] for row in list_backends()})
    text = f"no backend {backend!r} is registered (registered: {', '.join(names) or 'none'}; core: triton, torch)"
    for plugin in list_plugins():
        if plugin["reason"]:
            text += f"\nplugin {plugin['name']} ({plugin['distribution']}) is {plugin['state']}: {plugin['reason']}"
    return text
