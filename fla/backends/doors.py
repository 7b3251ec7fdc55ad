# SPDX-License-Identifier: MIT
"""Calls that look like one that was served before go straight to what served it.

Validation, capabilities, verifiers and the function that runs look at the same few facts of a call, one after the
other. What runs may `offer` itself with the tensors it ran on: where these are the op's own arguments and its result is
the op's result, a door is opened. Later calls with the same facts in all arguments (types, shapes, dtypes, devices,
gradients, numbers) pass through it; tensors must be contiguous, begin on 16-byte boundaries and be what their memory
holds.

Doors belong to a plan and go with it, so a backend registered, a switch or a context makes new ones. None is opened
for a call that gives an argument whose values are checked each time, or anything but tensors, numbers and None.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fla.backends import record
from fla.settings import GENERATED

_DOORS_AT_MOST = 32
_CALLS_AT_MOST = 256
_NUMBERS = (bool, int, float)

Run = Callable[[tuple[Any, ...]], Any]
Offer = tuple[Run, tuple[Any, ...], Any]


class _Thread(threading.local):
    offers: list[Offer] | None = None


thread = _Thread()


def asked() -> bool:
    """Whether an offer would be heard."""
    return thread.offers is not None


def offer(run: Run, inputs: tuple[Any, ...], result: Any) -> None:
    """Say that ``run(inputs)`` gave ``result`` and serves other tensors that look the same.

    ``run`` returns None where that is no longer so, and then has done nothing.
    """
    if thread.offers is not None:
        thread.offers.append((run, inputs, result))


def listen(core: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Offer | None]:
    """``core(*args)``, and the one offer made meanwhile whose result is that of ``core``.

    None where ``core`` made a dispatched call, which has backends of its own to ask each time.
    """
    around, before = thread.offers, record.thread.decision
    offers: list[Offer] = []
    thread.offers, record.thread.decision = offers, None
    try:
        result = core(*args)
    finally:
        nested = record.thread.decision is not None
        thread.offers = around
        if not nested:
            record.thread.decision = before
    return result, offers[0] if not nested and len(offers) == 1 and offers[0][2] is result else None


class Door:
    """Calls with arguments of the same types, of which the same ones reach what runs, in the same places."""

    def __init__(self, names: Sequence[str], types: tuple[type, ...], places: tuple[int | None, ...]) -> None:
        import torch
        from torch.autograd import forward_ad

        self.places = places
        self._calls: dict[Any, Any] = {}
        tensors = [name for name, t in zip(names, types, strict=True) if t not in _NUMBERS and t is not type(None)]
        numbers = [name for name, t in zip(names, types, strict=True) if t in _NUMBERS]
        facts = [f"{x}.{fact}" for x in tensors for fact in ("shape", "dtype", "device", "requires_grad")]
        plain = f"not ({' | '.join(f'{x}.data_ptr()' for x in tensors)}) & 15 and " + " and ".join(
            f"{x}.is_contiguous() and not {x}.is_neg()" for x in tensors
        )
        key = f"(_fla_grad(), {', '.join([*facts, *numbers])},)"
        inputs = ", ".join("None" if i is None else names[i] for i in places)
        source = [
            f"def _fla_key({', '.join(names)}):",
            f"    return {key} if {plain} else None",
            "",
            f"def _fla_enter({', '.join(names)}):",
            "    # Transforms and tangents are for what is asked first: it may refuse them.",
            "    if _fla_transforms() or _fla_forward._current_level >= 0:",
            "        return None",
            "    try:",
            f"        if not ({plain}):",
            "            return None",
            f"        _fla_found = _fla_get({key})",
            "    except RuntimeError:  # a tensor without memory of its own",
            "        return None",
            "    if _fla_found is None:",
            "        return None",
            "    _fla_run, _fla_decision, _fla_cell = _fla_found",
            f"    _fla_result = _fla_run(({inputs},))",
            "    if _fla_result is not None:",
            "        _fla_thread.decision = _fla_decision",
            "        _fla_cell[0] += 1",
            "    return _fla_result",
        ]
        space = {
            "_fla_grad": torch.is_grad_enabled,
            "_fla_get": self._calls.get,
            "_fla_thread": record.thread,
            "_fla_transforms": torch._C._are_functorch_transforms_active,
            "_fla_forward": forward_ad,
        }
        exec(compile("\n".join(source), f"{GENERATED} door>", "exec"), space)
        self._key: Callable[..., Any] = space["_fla_key"]  # type: ignore[assignment]
        self.enter: Callable[..., Any] = space["_fla_enter"]  # type: ignore[assignment]

    def add(self, args: tuple[Any, ...], *call: Any) -> None:
        """Let calls that look like this one pass: ``call`` is what runs, the decision and the count of its backend."""
        try:
            key = self._key(*args)
        except RuntimeError:
            return
        if key is not None:
            if len(self._calls) >= _CALLS_AT_MOST:
                self._calls.clear()
            self._calls[key] = call


def open_door(
    doors: dict[tuple[type, ...], Door], names: Sequence[str], args: tuple[Any, ...], offered: Offer, *call: Any
) -> None:
    """Open a door for calls that look like this one, unless it is none that a few facts can tell from others."""
    import torch

    run, inputs, _ = offered
    types = tuple(map(type, args))
    tensors = [i for i, t in enumerate(types) if t is torch.Tensor or t is torch.nn.Parameter]
    if any(t not in (*_NUMBERS, type(None)) for i, t in enumerate(types) if i not in tensors):
        return
    place = {id(args[i]): i for i in tensors}
    # One tensor given twice: which of the two is meant cannot be told. One that does not reach what runs: its value may
    # have decided something, as that of a flag given as a tensor.
    if not tensors or len(place) < len(tensors) or {id(x) for x in inputs if x is not None} != place.keys():
        return
    places = tuple(None if x is None else place[id(x)] for x in inputs)
    door = doors.get(types)
    if door is None:
        if len(doors) >= _DOORS_AT_MOST:
            doors.clear()
        door = doors[types] = Door(names, types, places)
    if door.places == places:
        door.add(args, run, *call)
