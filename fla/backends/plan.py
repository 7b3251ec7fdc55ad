# SPDX-License-Identifier: MIT
"""The order in which the implementations of one function are asked, worked out once per state of registry and switches.

A :class:`Plan` holds for one context and one snapshot of the environment. Below it, an :class:`Entry` holds what the
capabilities leave for one static signature (dtypes, head dimensions, device, flags). Verifiers are asked at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fla import settings
from fla.backends import devices, record, switches
from fla.backends.base import BaseBackend, read_answer
from fla.backends.doors import Door
from fla.backends.errors import BackendUnavailable, SignatureMismatch
from fla.backends.facts import Capability, Facts, Rejection
from fla.backends.record import Decision, Verdict
from fla.backends.registry import REGISTRY, Registration
from fla.backends.signature import Binding, bind_callable, positional

if TYPE_CHECKING:
    from fla.backends.op import DispatchedOp

MASTER, PLUGINS, STRICT = "FLA_DISABLE_BACKEND_DISPATCH", "FLA_PLUGINS", "FLA_BACKEND_STRICT"
CORE = ("triton", "torch")
_ANSWERS_AT_MOST = 256
NO_TRITON = Verdict("triton", "unsupported", "core has no Triton path for this function")


@dataclass(frozen=True)
class Pin:
    """What ``use_backend`` asks for."""

    name: str
    strict: bool = False

    @property
    def core(self) -> bool:
        return self.name in CORE


class Candidate:
    """One registered backend for one function: bound, ready to be called with the op's arguments in order."""

    __slots__ = ("answers", "backward", "cell", "forced", "forward", "missing", "name", "row", "run", "verify")

    def __init__(self, op: DispatchedOp, row: Registration, forced: bool) -> None:
        parts = bound_parts(op, row)
        self.row, self.forced, self.name = row, forced, row.name
        self.run, self.verify = parts.run, parts.verify
        self.forward, self.backward = parts.forward, parts.backward
        self.missing = parts.missing
        self.cell = op.cell(row.name)
        self.answers: dict[Any, Verdict | None] = {}


@dataclass(frozen=True)
class Parts:
    """Callables of a backend for one function. ``missing``: (index, name, default) of parameters it does not take."""

    run: Callable[..., Any]
    verify: Callable[..., Any] | None
    forward: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    missing: tuple[tuple[int, str, Any], ...]


def implements(op: DispatchedOp, row: Registration) -> bool:
    """Whether a backend has something to say about this function."""
    if row.functions is not None and op.name not in row.functions:
        return False
    single = row.backend.implementation
    if single is not None and row.functions is None:
        # One function registered for a whole operation is for its namesake, if there is one, else for all that it fits.
        name = getattr(single, "__name__", None)
        return name == op.name or all(other.name != name for other in REGISTRY.ops(op.key))
    return row.backend.get_implementation(op.name) is not None


def bound_parts(op: DispatchedOp, row: Registration) -> Parts:
    """A backend's callables for ``op``.

    Raises:
        SignatureMismatch: a parameter that the op does not have.
    """
    backend, name = row.backend, op.name
    run = backend.get_implementation(name)
    assert run is not None
    where = f"{row.name}.{name} ({row.source})"
    binding = bind_callable(op.signature, run, where)

    def bound(target: Callable[..., Any] | None, suffix: str) -> Callable[..., Any] | None:
        if target is None:
            return None
        return positional(op.signature, target, bind_callable(op.signature, target, f"{where[:-1]}, {suffix})"))

    if type(backend).verify is not BaseBackend.verify:
        # A 0.6.0 backend may have its own verify(function, *args, **kwargs).
        own = positional(op.signature, lambda *a, **k: backend.verify(name, *a, **k), Binding(op.argument_text, ()))
        verify: Callable[..., Any] | None = own
    else:
        verify = bound(backend.get_verifier(name), "verifier")
    forward, backward = getattr(backend, f"{name}_fwd", None), getattr(backend, f"{name}_bwd", None)
    index = {parameter: i for i, parameter in enumerate(op.signature.parameters)}
    return Parts(
        positional(op.signature, run, binding),
        verify,
        bound(forward, "forward") if backward is not None else None,
        backward if forward is not None else None,
        tuple((index[m], m, op.signature.parameters[m].default) for m in binding.missing),
    )


def check(op: DispatchedOp, row: Registration) -> None:
    """Compare a backend with a function of its operation, for the registry.

    Raises:
        SignatureMismatch: see :func:`bound_parts`; or it has a verifier and no implementation.
    """
    if row.functions is not None and op.name not in row.functions:
        return
    generic = row.backend.implementation is not None and row.functions is None
    if row.backend.get_implementation(op.name) is None:
        if getattr(row.backend, f"{op.name}_verifier", None) is not None:
            raise SignatureMismatch(f"{row.name} ({row.source}) has {op.name}_verifier but no {op.name}")
        return
    if not generic:  # one function for a whole operation stands for those functions that it fits
        bound_parts(op, row)


class Plan:
    """See the module's text. ``constant`` is set where every call runs the same core function."""

    __slots__ = (
        "active",
        "backward",
        "by_cheap",
        "by_device",
        "constant",
        "context",
        "decision",
        "dims",
        "doors",
        "dtypes",
        "error",
        "flags",
        "memo",
        "options",
        "pin",
        "refused",
        "snapshot",
        "strict",
        "traced",
        "triton",
        "watched",
    )

    def __init__(
        self, op: DispatchedOp, context: settings.Context | None, watched: tuple[Any, ...], snapshot: Any
    ) -> None:
        values = {} if context is None else context.values
        self.context, self.watched, self.snapshot = context, watched, snapshot
        reference = bool(values.get("reference"))
        pin: Pin | None = values.get("pin")
        self.pin = None if reference and pin is not None and not pin.core else pin
        self.traced = bool(values.get("trace"))
        self.strict = bool(settings.get(STRICT))
        self.memo: dict[Any, Entry] = {}
        # Where a part of the static signature settles it, the rest is not read. None: there is no such case so far.
        self.by_device: dict[Any, Entry] | None = None
        self.by_cheap: dict[Any, Entry] | None = None
        self.doors: dict[tuple[type, ...], Door] = {}
        self.active: list[Candidate] = []
        self.refused: list[Verdict] = []
        self.error: BackendUnavailable | None = None
        self.constant: Callable[..., Any] | None = None
        self.decision: Decision | None = None
        if reference and pin is not None and not pin.core and pin.strict:
            self.error = BackendUnavailable(f"{op}: use_backend({pin.name!r}, strict=True) inside reference_only()")
        if not reference and not (self.pin is not None and self.pin.core):
            self._candidates(op)
        wants_triton = self.pin is not None and self.pin.name == "triton"
        core_pinned = self.pin is not None and self.pin.core
        self.triton = op.triton_path is not None and (wants_triton or (devices.triton_possible() and not core_pinned))
        # Somebody to ask, to refuse or to tell: then no call is like every other.
        strict_pin = self.pin is not None and self.pin.strict and not core_pinned
        if not (self.active or self.error or self.triton or wants_triton or strict_pin or self.traced):
            self.constant = op.fn
            self.decision = Decision(op.operation, op.name, "torch", True, tuple(self.refused))
        self._what_matters(op)

    def _what_matters(self, op: DispatchedOp) -> None:
        """Which static facts some capability speaks of: the others need not be read at each call."""
        capabilities = [c.row.backend.capability for c in self.active]
        if self.triton and op.triton_path is not None:
            capabilities.append(op.triton_path.capability)
        stated = [c for c in capabilities if c is not None]
        # A capability of a class of its own may look at anything.
        every = bool(op.quarantine) or any(type(c) is not Capability for c in stated)
        self.dtypes = every or any(c.dtypes is not None for c in stated)
        self.dims = every or any(c.head_dims is not None or c.gva is False for c in stated)
        self.options = every or any(
            c.varlen is False or c.initial_state is False or c.state_layouts is not None for c in stated
        )
        self.backward = every or any(c.backward is False for c in stated)
        self.flags = every

    @property
    def device_only(self) -> bool:
        """Whether entries depend on the device alone."""
        return not (self.dtypes or self.dims or self.options or self.backward or self.flags)

    def settled(self, op: DispatchedOp, facts: Facts) -> bool:
        """Whether ``facts``, which leave things out, rule out every backend, and core does not depend on the rest."""
        if self.flags or any(_check(c.row.backend.capability, facts) is None for c in self.active):
            return False
        path = op.triton_path
        return not self.triton or path is None or path.capability is None or path.refuses(facts)

    def _candidates(self, op: DispatchedOp) -> None:
        pin = self.pin
        if settings.get(MASTER):
            if pin is not None and pin.strict:
                self.error = BackendUnavailable(
                    f"{op}: use_backend({pin.name!r}, strict=True) cannot be kept, {MASTER} is on "
                    f"({settings.origin(MASTER)})"
                )
            return
        rows = [row for row in REGISTRY.of(op.key) if implements(op, row)]
        if pin is not None:
            pinned = [row for row in rows if row.name == pin.name]
            rows = pinned if pin.strict else pinned + [row for row in rows if row.name != pin.name]
            if pin.strict and not pinned:
                self.error = BackendUnavailable(_not_registered(op, pin))
        for row in rows:
            refusal, forced = switches.standing(row, pin)
            if refusal is None:
                try:
                    self.active.append(Candidate(op, row, forced))
                    continue
                except SignatureMismatch as error:
                    if row.backend.implementation is not None and row.functions is None:
                        continue
                    settings.warn_once("signature", str(error), f"fla backend stays out: {error}", RuntimeWarning)
                    refusal = Rejection("error", str(error))
            self.refused.append(verdict(row, refusal))
            record.log_once(op.operation, op.name, row.name, refusal.text)


def verdict(row: Registration, refusal: Rejection) -> Verdict:
    return Verdict(row.name, refusal.code, refusal.text, row.backend.priority, row.distribution)


def _not_registered(op: DispatchedOp, pin: Pin) -> str:
    from fla.backends.discovery import DISCOVERY

    names = [row.name for row in REGISTRY.of(op.key) if implements(op, row)]
    text = f"{op}: no backend {pin.name!r} is registered for it (registered: {', '.join(names) or 'none'})"
    for plugin in DISCOVERY.plugins.values():
        if plugin.state == "blocked" or plugin.error is not None:
            text += f"; plugin {plugin.name} is {plugin.state}: {plugin.reason}"
    return text


def _check(capability: Capability | None, facts: Facts) -> Rejection | None:
    return None if capability is None else capability.check(facts)


class AllMatters:
    """Stands for a plan where the full static signature is wanted."""

    dtypes = dims = options = backward = flags = True


class Entry:
    """What is left for one static signature.

    ``direct`` is set where nothing has to be asked, ``verify_alone`` where only the Triton path has to.
    """

    __slots__ = (
        "candidates", "cell", "core", "core_name", "decision", "direct", "refused", "triton_verify", "verify_alone",
    )  # fmt: skip

    def __init__(self, op: DispatchedOp, plan: Plan, key: Any, facts: Facts, *, training: bool = False) -> None:
        refused = list(plan.refused)
        self.candidates: list[Candidate] = []
        for candidate in plan.active:
            refusal = static_refusal(op, candidate.row, key, facts, probe=True)
            if refusal is None and training and candidate.forward is None:
                refusal = Rejection(
                    "unsupported", f"training under torch.compile needs {op.name}_fwd and {op.name}_bwd"
                )
            if refusal is None:
                self.candidates.append(candidate)
            else:
                refused.append(verdict(candidate.row, refusal))
                record.log_once(op.operation, op.name, candidate.name, refusal.text)
        self.core: Callable[..., Any] | None = op.body
        self.core_name = "torch"
        self.triton_verify: Callable[..., Any] | None = None
        direct = op.fn
        pinned = plan.pin is not None and plan.pin.name == "triton"
        path = op.triton_path
        if plan.triton and path is not None:
            refusal = path.refusal(facts, pinned=pinned)
            if refusal is None:
                self.core, self.core_name, direct = path.body, "triton", path.function
                self.triton_verify = path.verify
            else:
                refused.append(Verdict("triton", refusal.code, refusal.text))
        elif pinned:
            refused.append(NO_TRITON)
        self.refused = tuple(refused)
        if plan.pin is not None and plan.pin.strict and plan.pin.name != self.core_name:
            self.core = None
        self.cell = op.cell(self.core_name)
        self.decision = Decision(op.operation, op.name, self.core_name, True, self.refused)
        alone = (
            not self.candidates and self.core is not None and plan.error is None and not plan.traced and not training
        )
        self.direct = direct if alone and self.triton_verify is None else None
        self.verify_alone = self.triton_verify if alone else None


def static_refusal(op: DispatchedOp, row: Registration, key: Any, facts: Facts, *, probe: bool) -> Rejection | None:
    """What is wrong with a candidate for every call of one static signature, ``key`` in full."""
    backend = row.backend
    try:
        refusal = _check(backend.capability, facts)
    except Exception as error:  # a class of the plugin's own
        if settings.get(STRICT):
            raise
        return Rejection("error", f"its capability raised {type(error).__name__}: {error}")
    if refusal is not None:
        return refusal
    failure = op.quarantine.get((row, key))
    if failure is not None:
        return Rejection("error", f"quarantined: {failure.summary}")
    return switches.probe(backend) if probe else switches.probe_result(backend)[1]


def understand(op: DispatchedOp, candidate: Candidate, answer: Any) -> Verdict | None:
    """What a verifier's answer means, worked out and logged once per distinct answer. None: accepted.

    Raises:
        TypeError: it is no answer.
    """
    accepted, reason = read_answer(answer)
    if accepted or (candidate.forced and isinstance(reason, Rejection) and reason.code == "slower"):
        found = None
    else:
        refusal = reason if isinstance(reason, Rejection) else Rejection("unsupported", reason)
        found = verdict(candidate.row, refusal)
        record.log_once(op.operation, op.name, candidate.name, refusal.text)
    if len(candidate.answers) < _ANSWERS_AT_MOST and type(answer) is tuple:
        candidate.answers[answer] = found
    return found
