# SPDX-License-Identifier: MIT
"""What would run and why; what is installed; what has run."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fla import settings
from fla.backends import devices, switches
from fla.backends import plan as plans
from fla.backends.base import read_answer
from fla.backends.discovery import DISCOVERY
from fla.backends.errors import SignatureMismatch
from fla.backends.facts import Facts, Rejection, needs_backward
from fla.backends.op import DispatchedOp
from fla.backends.plan import Candidate, Pin
from fla.backends.record import Verdict
from fla.backends.registry import REGISTRY, Registration
from fla.backends.signature import is_default


@dataclass(frozen=True)
class Explanation:
    """Every candidate's verdict for one call, in the order in which they are asked, core last.

    ``chosen`` is what would run now, None where a strict pin would raise (``error`` says what). ``compiled_training``
    is what trains under torch.compile. ``plugins`` lists those that did not get as far as registering.
    """

    operation: str
    function: str
    chosen: str | None
    verdicts: tuple[Verdict, ...]
    facts: Facts
    compiled_training: str | None
    error: str | None = None
    plugins: tuple[str, ...] = ()

    def verdict(self, backend: str) -> Verdict:
        """The verdict of one backend; KeyError if it is no candidate."""
        for found in self.verdicts:
            if found.backend == backend:
                return found
        raise KeyError(f"{backend!r} is no candidate for {self.operation}.{self.function}")

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["facts"]["device"] = str(self.facts.device)
        return found

    def __str__(self) -> str:
        lines = [f"{self.operation}.{self.function} -> {self.chosen or 'nothing: ' + str(self.error)}"]
        lines += [f"  {verdict}" for verdict in self.verdicts]
        lines.append(f"  training under torch.compile: {self.compiled_training or 'nothing'}")
        lines += [f"  plugin {text}" for text in self.plugins]
        return "\n".join(lines)


def operation_of(fn: Callable[..., Any]) -> DispatchedOp:
    op = getattr(fn, "op", None)
    if not isinstance(op, DispatchedOp):
        raise TypeError(f"{fn!r} is not a dispatched function")
    return op


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Say for a call of ``fn`` what every candidate's verdict would be. Nothing is run but capabilities and verifiers.

    Works on meta tensors, which stand for tensors on this machine's accelerator, or on the CPU where there is none.
    Inputs are not validated, and a probe that has not run is not run.

    Raises:
        TypeError: ``fn`` is not dispatched, or the arguments do not fit its signature.
    """
    op = operation_of(fn)
    bound = op.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values = tuple(bound.arguments.values())
    plan = op.current()
    facts = op.read_facts(values, backward=needs_backward(values))
    facts = Facts(**{**vars(facts), "device": devices.concrete(facts.device)})
    key = op.full_key(values)
    verdicts: list[Verdict] = []
    rows = [row for row in REGISTRY.of(op.key) if plans.implements(op, row)]
    pin: Pin | None = plan.pin
    if pin is not None and not pin.core:
        rows.sort(key=lambda row: row.name != pin.name)
    trains: str | None = None
    context = settings.current_context()
    reference = context is not None and bool(context.values.get("reference"))
    for row in rows:
        verdict, candidate = _judge(op, row, pin, reference, facts, key, values)
        verdicts.append(verdict)
        if trains is None and verdict.accepted and candidate is not None and candidate.forward is not None:
            trains = row.name
    core = _core_verdicts(op, facts, pin, values)
    error: str | None = None
    chosen = next((v.backend for v in verdicts if v.accepted), None)
    if chosen is None:
        chosen = next((v.backend for v in core if v.accepted), None)
        if pin is not None and pin.strict and chosen != pin.name:
            chosen = None
    if plan.error is not None:
        chosen = None
    if chosen is None:
        error = (
            str(plan.error) if plan.error is not None else f"{pin.name if pin else ''} is pinned and does not take it"
        )
    failed = tuple(
        f"{p.name} ({p.distribution}) is {p.state}: {p.reason}"
        for p in DISCOVERY.plugins.values()
        if p.error is not None or p.state == "blocked"
    )
    core_name = next((v.backend for v in core if v.accepted), None)
    training = trains or (None if pin is not None and pin.strict and pin.name != core_name else core_name)
    return Explanation(op.operation, op.name, chosen, (*verdicts, *core), facts, training, error, failed)


def _judge(
    op: DispatchedOp,
    row: Registration,
    pin: Pin | None,
    reference: bool,
    facts: Facts,
    key: Any,
    values: tuple[Any, ...],
) -> tuple[Verdict, Candidate | None]:
    """Verdict of one backend without running it."""

    def refused(refusal: Rejection) -> tuple[Verdict, None]:
        return plans.verdict(row, refusal), None

    if reference:
        return refused(Rejection("disabled", "reference_only() is in force"))
    if pin is not None and (pin.core or (pin.strict and pin.name != row.name)):
        return refused(Rejection("disabled", f"use_backend({pin.name!r}) is in force"))
    if settings.get(plans.MASTER):
        return refused(Rejection("disabled", f"{plans.MASTER} is on ({settings.origin(plans.MASTER)})"))
    refusal, forced = switches.standing(row, pin)
    if refusal is not None:
        return refused(refusal)
    try:
        candidate = Candidate(op, row, forced)
    except SignatureMismatch as error:
        return refused(Rejection("error", str(error)))
    refusal = plans.static_refusal(op, row, key, facts, probe=False)
    if refusal is not None:
        return refused(refusal)
    for index, name, default in candidate.missing:
        if not is_default(values[index], default):
            return refused(Rejection("unsupported", f"it does not take {name}"))
    note = (
        "" if not switches.has_probe(row.backend) or switches.probe_result(row.backend)[0] else "its probe has not run"
    )
    if candidate.verify is not None:
        try:
            accepted, reason = read_answer(candidate.verify(*values))
        except Exception as error:
            return refused(Rejection("error", f"its verifier raised {type(error).__name__}: {error}"))
        if not accepted:
            found = reason if isinstance(reason, Rejection) else Rejection("unsupported", str(reason))
            if not (forced and found.code == "slower"):
                return refused(found)
            note = f"asked for by name, though: {found.text}"
    return Verdict(row.name, "accepted", note, row.backend.priority, row.distribution), candidate


def _core_verdicts(op: DispatchedOp, facts: Facts, pin: Pin | None, values: tuple[Any, ...]) -> list[Verdict]:
    if pin is not None and pin.name == "torch":
        triton = Verdict("triton", "disabled", "use_backend('torch') is in force")
    elif op.triton_path is None:
        triton = plans.NO_TRITON
    else:
        path = op.triton_path
        refusal = path.refusal(facts, pinned=pin is not None and pin.name == "triton")
        if refusal is None and path.verify is not None:
            accepted, reason = read_answer(path.verify(*values))
            if not accepted:
                refusal = reason if isinstance(reason, Rejection) else Rejection("unsupported", str(reason))
        triton = Verdict("triton", "accepted") if refusal is None else Verdict("triton", refusal.code, refusal.text)
    return [triton, Verdict("torch", "accepted", "the op's own PyTorch path")]


# Listing


def list_plugins() -> list[dict[str, Any]]:
    """Installed plugins with distribution, version, entry point, state, reason and load time. Discovers if need be."""
    DISCOVERY.ensure()
    return [plugin.to_dict() for plugin in DISCOVERY.plugins.values()]


def list_backends(operation: str | None = None) -> list[dict[str, Any]]:
    """Registered backends with their standing now, in the order in which they are asked. Discovers if need be."""
    DISCOVERY.ensure()
    rows = []
    for name in [operation] if operation is not None else REGISTRY.operations():
        for row in REGISTRY.of(name):
            refusal, _ = switches.standing(row)
            rows.append(
                {
                    "operation": name.split(":")[0],
                    "backend": row.name,
                    "priority": row.backend.priority,
                    "distribution": row.distribution,
                    "env_var": row.backend.env_var,
                    "functions": [op.name for op in REGISTRY.ops(name) if plans.implements(op, row)],
                    "usable": refusal is None,
                    "code": None if refusal is None else refusal.code,
                    "reason": None if refusal is None else refusal.text,
                }
            )
    return rows


def report() -> dict[str, Any]:
    """What a bug report needs, ready for ``json.dumps``: versions, settings, plugins, backends, what has run."""
    torch = devices.loaded_torch()
    ops = []
    quarantined = []
    for op in REGISTRY.ops():
        calls = {name: cell[0] for name, cell in op.cells.items() if cell[0]}
        if calls:
            ops.append({"operation": op.operation, "function": op.name, "calls": calls})
        quarantined += [
            {"operation": op.operation, "function": op.name, **asdict(failure)}
            for failure in list(op.quarantine.values())
        ]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": getattr(torch, "__version__", None),
        "triton": getattr(sys.modules.get("triton"), "__version__", None),
        "triton_devices": devices.triton_devices(),
        "settings": settings.describe(),
        "unrecognised": settings.unrecognised(),
        "plugins": list_plugins(),
        "backends": list_backends(),
        "calls": ops,
        "quarantine": quarantined,
    }
