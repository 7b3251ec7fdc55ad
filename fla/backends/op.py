# SPDX-License-Identifier: MIT
"""One dispatched function: selection, running, fallback."""

from __future__ import annotations

import inspect
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fla import settings
from fla.backends import devices, faults, record
from fla.backends import plan as plans
from fla.backends.base import read_answer
from fla.backends.discovery import DISCOVERY
from fla.backends.doors import listen, open_door
from fla.backends.errors import BackendUnavailable
from fla.backends.facts import CallFacts, Capability, Facts, Rejection, lost_gradient, needs_backward
from fla.backends.plan import MASTER, PLUGINS, STRICT, Candidate, Entry, Plan, Verdict, understand
from fla.backends.record import Decision
from fla.backends.registry import REGISTRY, Registration
from fla.backends.signature import argument_text, bind_callable, is_default, positional
from fla.backends.triton_path import TritonPath

_ENTRIES_AT_MOST = 1024
_PLANS_AT_MOST = 64
_UNKNOWN: Any = object()
_TRANSFORMED = False, "backends compute no forward-mode derivatives and no torch.func transforms"


def _plan_key(context: settings.Context | None, watched: tuple[Any, ...]) -> tuple[Any, Any]:
    """What a plan holds for: the values of the context, and those of the variables (None: none is set)."""
    snapshot = None
    if not settings.environment_isdisjoint(watched):
        snapshot = tuple(map(settings.environment_get, watched))
    return None if context is None else context.key, snapshot


def _small(entries: dict[Any, Entry]) -> dict[Any, Entry]:
    """``entries``, or nothing once there are too many: a program with that many signatures gains little from them."""
    return entries if len(entries) < _ENTRIES_AT_MOST else {}


def _given(candidate: Candidate, args: tuple[Any, ...]) -> str | None:
    """A parameter that the candidate does not take and that this call gives."""
    return next((name for i, name, default in candidate.missing if not is_default(args[i], default)), None)


@dataclass(frozen=True)
class Failure:
    """Why a backend is quarantined for one static signature of one function."""

    backend: str
    summary: str
    traceback: str
    signature: str


class DispatchedOp:
    """What stands behind a public wrapper, reachable as ``wrapper.op``.

    Attributes:
        operation, name: as in ``kda`` and ``chunk_kda``.
        key: under which backends are registered; the operation, or unique for a function dispatched on its own.
        signature: of the op, without renamed and removed keywords.
        fn: the body, the core's PyTorch path.
        outputs: empty results for the arguments in order, or None where the op declares none.
        pair: a forward and backward of core for torch.compile, or None.
    """

    pair: Any = None

    def __init__(
        self,
        operation: str,
        fn: Callable[..., Any],
        *,
        key: str | None = None,
        validate: Callable[..., None] | None = None,
        facts: CallFacts | None = None,
        outputs: Callable[..., Any] | None = None,
        triton: str | None = None,
        triton_capability: Capability | None = None,
        triton_verifier: Callable[..., Any] | None = None,
        inplace: bool = False,
        differentiable: bool = True,
    ) -> None:
        self.operation, self.name, self.fn = operation, fn.__name__, fn
        self.key = key or operation
        self.signature = inspect.signature(fn)
        self.argument_text = argument_text(self.signature)
        self.inplace, self.differentiable = inplace, differentiable
        self.facts = (facts or CallFacts()).restricted(self.signature.parameters)
        self.body = self._in_order(fn, "the body")
        self.validate = None if validate is None else self._in_order(validate, "validate")
        self._values_of = self._looked_at(validate)
        self.outputs = None if outputs is None else self._in_order(outputs, "outputs")
        self.triton_path: TritonPath | None = None
        if triton is not None:
            verify = None if triton_verifier is None else self._in_order(triton_verifier, "triton_verifier")
            self.triton_path = TritonPath(triton, self.signature, triton_capability, verify, inplace)
        self.quarantine: dict[tuple[Registration, Any], Failure] = {}
        self.cells: dict[str, list[int]] = {}
        self.core_cell = self.cell("torch")
        self.plan: Plan | None = None
        self._plans: dict[Any, Plan] = {}
        self._watched: tuple[Any, ...] | None = None
        self._generation = 0
        # Set by the wrapper's generated code.
        self.key_of: Callable[..., Any] = lambda *args: None
        self.device_of: Callable[..., Any] = lambda *args: None
        self.cheap_of: Callable[..., Any] = lambda *args: None
        self.bind_torch: Callable[[], None] = lambda: None
        REGISTRY.add_op(self)

    def __str__(self) -> str:
        return f"{self.operation}.{self.name}"

    def __repr__(self) -> str:
        return f"<DispatchedOp {self}>"

    def _in_order(self, target: Callable[..., Any], what: str) -> Callable[..., Any]:
        return positional(self.signature, target, bind_callable(self.signature, target, f"{what} of {self}"))

    def _looked_at(self, validate: Callable[..., None] | None) -> tuple[int, ...] | None:
        """Which parameters' values are checked at each call; None where nothing is known of ``validate``."""
        names: Sequence[str] | None = getattr(validate, "values_of", None)
        if names is None or self.inplace:
            return None
        order = list(self.signature.parameters)
        return tuple(order.index(name) for name in names)

    def cell(self, backend: str) -> list[int]:
        """How many calls a backend served, as a list of one number."""
        return self.cells.setdefault(backend, [0])

    def check(self, row: Registration) -> None:
        """For the registry: raise SignatureMismatch where a backend does not fit this function."""
        plans.check(self, row)

    def forget(self) -> None:
        """Give backends that failed another chance."""
        self.quarantine.clear()
        if self.triton_path is not None:
            self.triton_path.forget()

    # Plans

    def invalidate(self) -> None:
        """Forget every plan (the registry or a setting changed)."""
        self._generation += 1
        self.plan, self._watched = None, None
        self._plans = {}

    def _names_watched(self) -> tuple[Any, ...]:
        names = {MASTER, PLUGINS, STRICT, "TRITON_INTERPRET", *DISCOVERY.blocked_variables()}
        names.update(row.backend.env_var for row in REGISTRY.of(self.key) if row.backend.env_var)
        return tuple(sorted(map(settings.encode_name, names)))

    def replan(self) -> Plan:
        """The plan for the context and environment of now; discovery happens here, at the first call."""
        context = settings.current_context()
        generation, watched, known = self._generation, self._watched, self._plans
        if watched is not None:
            plan = known.get(_plan_key(context, watched))
            if plan is not None:
                plan.context = context
                return self._keep(plan, generation)
        self.bind_torch()
        values = {} if context is None else context.values
        pin = values.get("pin")
        if not values.get("reference") and not (pin is not None and pin.core) and not settings.get(MASTER):
            DISCOVERY.ensure(pin)
        generation = self._generation
        watched = self._watched = self._watched or self._names_watched()
        key = _plan_key(context, watched)
        plan = Plan(self, context, watched, key[1])
        # A plan made while plugins are being loaded, or while the registry changed, serves this call only.
        if generation == self._generation and not DISCOVERY.running:
            if len(self._plans) >= _PLANS_AT_MOST:
                self._plans = {}
            self._plans[key] = plan
            return self._keep(plan, generation)
        return plan

    def _keep(self, plan: Plan, generation: int) -> Plan:
        self.plan = plan
        if generation != self._generation:  # the registry changed between the question and the answer
            self.plan, self._plans = None, {}
        return plan

    def unchanged(self, plan: Plan) -> bool:
        """Whether the environment is as it was when ``plan`` was made (the context is compared by the caller)."""
        if plan.snapshot is None:
            return settings.environment_isdisjoint(plan.watched)
        return tuple(map(settings.environment_get, plan.watched)) == plan.snapshot

    def current(self) -> Plan:
        plan = self.plan
        if plan is None or plan.context is not settings.current_context() or not self.unchanged(plan):
            return self.replan()
        return plan

    def full_key(self, args: tuple[Any, ...]) -> Any:
        """The whole static signature, None where an argument is not what its name promises."""
        try:
            key = self.key_of(plans.AllMatters, *args)
            hash(key)
        except (AttributeError, TypeError, IndexError):
            return None
        return key

    def entry(self, plan: Plan, args: tuple[Any, ...], *, training: bool = False) -> Entry:
        """What the static facts of the arguments leave of ``plan``."""
        if training:
            full = ("training", self.full_key(args))
            found = plan.memo.get(full)
            if found is None:
                facts = self.read_facts(args, backward=True)
                found = Entry(self, plan, full[1], facts, training=True)
                plan.memo = {**_small(plan.memo), full: found}
            return found
        try:
            device, cheap, key = self.device_of(*args), self.cheap_of(*args), self.key_of(plan, *args)
            found = (plan.by_device or {}).get(device) or (plan.by_cheap or {}).get(cheap) or plan.memo.get(key)
        except (AttributeError, TypeError, IndexError):
            return Entry(self, plan, None, self.read_facts(args, backward=needs_backward(args)))
        return found or self._new_entry(plan, args, device, cheap, key)

    def _new_entry(self, plan: Plan, args: tuple[Any, ...], device: Any, cheap: Any, key: Any) -> Entry:
        """Make an entry and keep it where the least has to be read to find it again."""
        facts = self.read_facts(args, backward=needs_backward(args))
        full = self.full_key(args)
        if plan.device_only or plan.settled(self, facts.device_alone()):
            found = Entry(self, plan, full, facts if plan.device_only else facts.device_alone())
            plan.by_device = {**(plan.by_device or {}), device: found}
        elif plan.settled(self, facts.cheap()):
            found = Entry(self, plan, full, facts.cheap())
            plan.by_cheap = {**_small(plan.by_cheap or {}), cheap: found}
        else:
            found = Entry(self, plan, full, facts)
            plan.memo = {**_small(plan.memo), key: found}
        return found

    def read_facts(self, args: tuple[Any, ...], *, backward: bool) -> Facts:
        return self.facts.read(dict(zip(self.signature.parameters, args, strict=True)), backward=backward)

    # Choosing

    def _pick(
        self, plan: Plan, candidates: Sequence[Candidate], args: tuple[Any, ...], rejected: list[Verdict]
    ) -> Candidate | None:
        """The first candidate that takes this call; what the others said is appended to ``rejected``.

        This loop is the price of every verifier at every call, hence its shape.
        """
        if candidates and devices.is_transforming():
            # Their results would have lost what core's PyTorch keeps or refuses.
            rejected += filter(None, (understand(self, candidate, _TRANSFORMED) for candidate in candidates))
            return None
        for candidate in candidates:
            if candidate.missing and (name := _given(candidate, args)) is not None:
                refusal = understand(self, candidate, (False, f"it does not take {name}"))
            elif candidate.verify is None:
                return candidate
            else:
                try:
                    answer = candidate.verify(*args)
                    if answer is True:
                        return candidate
                    refusal = candidate.answers.get(answer, _UNKNOWN) if type(answer) is tuple else _UNKNOWN
                    if refusal is _UNKNOWN:
                        refusal = understand(self, candidate, answer)
                except Exception as error:
                    refusal = self._verifier_failed(plan, candidate, error)
            if refusal is None:
                return candidate
            rejected.append(refusal)
        return None

    def _verifier_failed(self, plan: Plan, candidate: Candidate, error: Exception) -> Verdict | None:
        where = f"the verifier of {candidate.name} ({candidate.row.source}) for {self}"
        if plan.strict:
            faults.note(error, f"raised by {where}")
            raise error
        text = f"its verifier raised {type(error).__name__}: {error}"
        # Once for each place that raises: a message may have the numbers of the call in it.
        place = traceback.extract_tb(error.__traceback__)[-1]
        settings.warn_once(
            "verifier",
            f"{self} {candidate.name} {type(error).__name__} {place.filename}:{place.lineno}",
            f"{where} raised, the backend is passed over:\n{traceback.format_exc()}",
            RuntimeWarning,
        )
        return understand(self, candidate, (False, Rejection("error", text)))

    def _core(self, plan: Plan, entry: Entry, args: tuple[Any, ...], rejected: list[Verdict]) -> tuple[Any, str]:
        """The core function for a call that no backend takes."""
        if plan.error is not None:
            raise BackendUnavailable(str(plan.error), plan.error.verdicts)
        name, core = entry.core_name, entry.core
        if entry.triton_verify is not None:
            accepted, reason = read_answer(entry.triton_verify(*args))
            if not accepted:
                refusal = reason if isinstance(reason, Rejection) else Rejection("unsupported", str(reason))
                rejected.append(Verdict("triton", refusal.code, refusal.text))
                pinned = plan.pin is not None and plan.pin.strict
                name, core = "torch", None if pinned else self.body
        if core is None:
            assert plan.pin is not None
            reasons = (*entry.refused, *rejected)
            why = "; ".join(map(str, reasons)) or "nothing else was asked"
            raise BackendUnavailable(f"{self}: {plan.pin.name} is pinned and does not take this call: {why}", reasons)
        return core, name

    def select(self, args: tuple[Any, ...], *, training: bool = False) -> tuple[Callable[..., Any], Decision]:
        """What would run for these arguments (a value for each parameter, in order), as a callable of them.

        Raises:
            BackendUnavailable: a strict pin cannot be kept.
        """
        plan = self.current()
        entry = self.entry(plan, args, training=training)
        rejected: list[Verdict] = []
        candidate = self._pick(plan, entry.candidates if plan.error is None else (), args, rejected)
        if candidate is not None:
            return candidate.run, self._decision(entry, candidate.name, False, rejected)
        core, name = self._core(plan, entry, args, rejected)
        return core, self._decision(entry, name, True, rejected)

    def training_candidate(self, args: tuple[Any, ...]) -> Candidate | None:
        """For torch.compile: the backend whose ``_fwd`` and ``_bwd`` serve a call under differentiation; None: core."""
        plan = self.current()
        if plan.error is not None:
            raise BackendUnavailable(str(plan.error), plan.error.verdicts)
        entry = self.entry(plan, args, training=True)
        rejected: list[Verdict] = []
        candidate = self._pick(plan, entry.candidates, args, rejected)
        if candidate is not None:
            return candidate
        self._core(plan, entry, args, rejected)
        return None

    def _decision(self, entry: Entry, name: str, core: bool, rejected: list[Verdict]) -> Decision:
        return Decision(self.operation, self.name, name, core, (*entry.refused, *rejected))

    # Running

    def run(self, args: tuple[Any, ...]) -> Any:
        """Select and run. ``args`` holds a value for each parameter, in order; they have been validated."""
        plan = self.current()
        if plan.constant is not None:
            result = self.body(*args)
            record.thread.decision = plan.decision
            self.core_cell[0] += 1
            return result
        return self.choose(plan, self.entry(plan, args), args)

    def choose(self, plan: Plan, entry: Entry, args: tuple[Any, ...]) -> Any:
        """Run the first candidate that takes the call, else core."""
        if plan.traced:
            return self._traced(plan, entry, args)
        verify = entry.verify_alone
        if verify is not None:
            answer = verify(*args)
            if answer is True or (type(answer) is tuple and answer == (True, None)):
                return self.serve(plan, entry, args)
        return self._run(plan, entry, args)

    def serve(self, plan: Plan, entry: Entry, args: tuple[Any, ...]) -> Any:
        """Run core where nobody else is asked, and open a door for calls that look the same (see `doors`)."""
        core = entry.core
        assert core is not None
        if self._values_of is None or any(args[i] is not None for i in self._values_of):
            result = core(*args)
        else:
            result, offered = listen(core, args)
            if offered is not None:
                open_door(plan.doors, list(self.signature.parameters), args, offered, entry.decision, entry.cell)
        record.thread.decision = entry.decision
        entry.cell[0] += 1
        return result

    def _run(self, plan: Plan, entry: Entry, args: tuple[Any, ...]) -> Any:
        rejected: list[Verdict] = []
        candidates: Sequence[Candidate] = entry.candidates if plan.error is None else ()
        while (candidate := self._pick(plan, candidates, args, rejected)) is not None:
            try:
                result = candidate.run(*args)
                if self.differentiable and needs_backward(args) and lost_gradient(result):
                    raise RuntimeError("its result takes no part in autograd, and a gradient is due (backward=False?)")
            except Exception as error:
                rejected.append(self._failed(plan, candidate, args, error))
                candidates = candidates[candidates.index(candidate) + 1 :]
                continue
            if not candidate.cell[0]:
                record.log_once(self.operation, self.name, candidate.name)
            record.thread.decision = (self, entry, candidate.name, False, rejected)
            candidate.cell[0] += 1
            return result
        core, name = self._core(plan, entry, args, rejected)
        result = core(*args)
        record.thread.decision = (self, entry, name, True, rejected) if rejected else entry.decision
        self.cell(name)[0] += 1
        return result

    def _failed(self, plan: Plan, candidate: Candidate, args: tuple[Any, ...], error: Exception) -> Verdict:
        """Quarantine a backend that raised, or raise again where nothing else may run."""
        where = f"{candidate.name} ({candidate.row.source}) running {self}"
        if plan.strict or self.inplace or (plan.pin is not None and plan.pin.strict) or faults.must_propagate(error):
            faults.note(error, f"raised by {where}")
            raise error
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        signature = str(self.read_facts(args, backward=needs_backward(args)))
        failure = Failure(candidate.name, summary, traceback.format_exc(), signature)
        self.quarantine[candidate.row, self.full_key(args)] = failure
        self.invalidate()
        warnings.warn(
            f"fla backend {where} raised {summary}; it is left out for calls of this static signature and the next "
            f"implementation runs (the traceback is in fla.backends.report())",
            RuntimeWarning,
            stacklevel=settings.callers_level(),
        )
        refusal = Rejection("error", f"raised {summary}")
        record.log_once(self.operation, self.name, candidate.name, refusal.text)
        return plans.verdict(candidate.row, refusal)

    def _traced(self, plan: Plan, entry: Entry, args: tuple[Any, ...]) -> Any:
        context = settings.current_context()
        call = record.Call(self.operation, self.name, record.thread.depth)
        for taken in () if context is None else context.values.get("trace", ()):
            taken.calls.append(call)
        record.thread.depth += 1
        try:
            result = self._run(plan, entry, args)
        except BaseException as error:
            call.error = f"{type(error).__name__}: {error}"
            raise
        finally:
            record.thread.depth -= 1
        call.decision = record.last_decision()
        return result
