# SPDX-License-Identifier: MIT
"""The custom ops behind `fla.backends._compile`: one for the forward of an op, one for its backward.

Autograd is off inside the body of a custom op. A forward that will be differentiated therefore runs the core, and the
backward op runs the core once more with autograd on and differentiates that. Two things replace the second run: a
`Pair` that the op declares, and a backend with `<name>_fwd` and `<name>_bwd`. These two are

- ``<name>_fwd(<the op's parameters>) -> (result, saved)`` and
- ``<name>_bwd(args, saved, grads, needed) -> gradients``, as `Pair.backward`.

The graph has to know the shapes of `saved` before anything runs, so they are the op's choice: what `Pair.saved` says,
and nothing for an op without a pair. A backend that needs more computes it again from `args`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fla import settings
from fla.backends import record
from fla.backends._compile_schema import Layout, flatten_tree, layout_of, static_key, unpack
from fla.backends.pins import reference_only


class Pair(Protocol):
    """A forward and backward that belong together: ``op.pair``. `args` are all of the op's arguments, in order."""

    def forward(self, *args: Any) -> tuple[Any, Sequence[torch.Tensor]]:
        """The op's result, and the tensors that `backward` wants."""

    def saved(self, *args: Any) -> Sequence[torch.Tensor]:
        """Empty tensors of the shapes, dtypes and device of those that `forward` saves. Runs on fake tensors."""

    def backward(
        self,
        args: tuple[Any, ...],
        saved: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of the call's tensor arguments, in order; None where not `needed` or zero.

        `grads` has one entry for each tensor in the op's result, None where nothing flows back.
        """


@dataclass
class Entry:
    """An op's registration."""

    op: Any
    name: str
    layout: Layout
    structure: dict[tuple[Any, ...], str] = field(default_factory=dict)
    """The tree of the outputs, by `static_key`: the fake kernel notes it, and tracing reads it right after."""


_entries: dict[str, Entry] = {}
_lock = threading.RLock()
_library: torch.library.Library | None = None


def register(name: str, op: Any) -> Entry:
    """The registration of `op` under a name, made on the first call (about 2 ms)."""
    entry = _entries.get(name)
    if entry is not None:
        return entry
    with _lock:
        if name not in _entries:
            _entries[name] = _define(name, op)
        return _entries[name]


def _define(name: str, op: Any) -> Entry:
    global _library
    if op.inplace:
        raise NotImplementedError(f"{op.name} writes into its arguments; call it outside the compiled region")
    if _library is None:
        _library = torch.library.Library("fla", "FRAGMENT")
    layout = layout_of(op.signature, op.fn)
    entry = Entry(op, name, layout)
    back = f"{name}_backward"
    _library.define(f"{name}({layout.schema}, bool differentiable) -> Tensor[]")
    _library.define(f"{back}({layout.schema}, Tensor[] saved, Tensor?[] grads, bool[] needed) -> Tensor[]")
    _library.impl(name, _forward_body(entry), "CompositeExplicitAutograd")
    _library.impl(back, _backward_body(entry), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fla::{name}", _forward_fake(entry), lib=_library)
    torch.library.register_fake(f"fla::{back}", _backward_fake(entry), lib=_library)
    torch.library.register_autograd(f"fla::{name}", _derivative(entry), setup_context=_setup(entry), lib=_library)
    return entry


# Forward


def _forward_body(entry: Entry) -> Callable[..., list[torch.Tensor]]:
    def body(*slots: Any) -> list[torch.Tensor]:
        *slots_, differentiable = slots
        args = unpack(entry.layout, slots_)
        _validate(entry.op, args)  # values too; while tracing there were none
        saved: Sequence[torch.Tensor] = ()
        if differentiable:
            result, saved = _run_forward(entry.op, args)
        else:
            result = entry.op.run(args)
        leaves: list[torch.Tensor] = []
        tree = flatten_tree(result, leaves)
        expected = entry.structure.get(static_key(slots_), tree)
        if tree != expected:
            raise RuntimeError(f"{entry.op.name} returned {tree}, its outputs were declared as {expected}")
        _check_backend_results(entry.op, args, leaves)
        return _own(leaves + list(saved), _tensors(slots_))

    return body


def _forward_fake(entry: Entry) -> Callable[..., list[torch.Tensor]]:
    def fake(*slots: Any) -> list[torch.Tensor]:
        *slots_, differentiable = slots
        args = unpack(entry.layout, slots_)
        _validate(entry.op, args)
        leaves: list[torch.Tensor] = []
        tree = flatten_tree(entry.op.outputs(*args), leaves)
        if tree is None:
            raise TypeError(f"{entry.op.name}: outputs must return tensors, None and tuples of them")
        entry.structure[static_key(slots_)] = tree
        if differentiable and entry.op.pair is not None:
            leaves += entry.op.pair.saved(*args)
        return [_empty(t) for t in leaves]

    return fake


def _setup(entry: Entry) -> Callable[..., None]:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
        *slots, _ = inputs
        outputs = entry.structure.get(static_key(slots))
        count = len(output) if outputs is None else outputs.count("t")
        saved = output[count:]
        if saved:
            ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        tensors = _tensors(slots)
        ctx.save_for_backward(*tensors, *saved)
        ctx.inputs, ctx.outputs = len(tensors), count
        ctx.slots = [_Hole(len(s)) if _is_list(s) else _HOLE if isinstance(s, torch.Tensor) else s for s in slots]

    return setup


# Backward


@dataclass(frozen=True)
class _Hole:
    """The place of a tensor, or of a list of `count` tensors, among the slots."""

    count: int | None = None


_HOLE = _Hole()


def _derivative(entry: Entry) -> Callable[..., Any]:
    def derivative(ctx: Any, grads: Sequence[torch.Tensor | None]) -> Any:
        stored = ctx.saved_tensors  # once: checkpointing unpacks them a single time
        tensors, saved = list(stored[: ctx.inputs]), list(stored[ctx.inputs :])
        queue = iter(tensors)
        slots: list[Any] = []
        needed: list[bool] = []
        for slot, wanted in zip(ctx.slots, ctx.needs_input_grad, strict=False):
            if not isinstance(slot, _Hole):
                slots.append(slot)
            elif slot.count is None:
                slots.append(next(queue))
                needed.append(wanted)
            else:
                slots.append([next(queue) for _ in range(slot.count)])
                needed += wanted
        backward = getattr(torch.ops.fla, f"{entry.name}_backward").default
        found = iter(backward(*slots, saved, list(grads[: ctx.outputs]), needed))
        spread = iter([next(found) if n else None for n in needed])
        return (
            *(
                None
                if not isinstance(s, _Hole)
                else next(spread)
                if s.count is None
                else [next(spread) for _ in range(s.count)]
                for s in ctx.slots
            ),
            None,
        )

    return derivative


def _backward_body(entry: Entry) -> Callable[..., list[torch.Tensor]]:
    def body(*inputs: Any) -> list[torch.Tensor]:
        *slots, saved, grads, needed = inputs
        tensors = _tensors(slots)
        args = unpack(entry.layout, slots)
        candidate = entry.op.training_candidate(args)
        if candidate is not None:
            found = list(candidate.backward(args, saved, grads, needed))
        elif entry.op.pair is not None:
            found = list(entry.op.pair.backward(args, saved, grads, needed))
        else:
            found = _differentiate_core(entry, slots, grads, needed)
        if len(found) != len(tensors):
            raise RuntimeError(f"{entry.op.name}: {len(found)} gradients came back for {len(tensors)} tensors")
        out = [
            torch.zeros_like(t, memory_format=torch.contiguous_format) if g is None else g.to(t.dtype)
            for t, g, n in zip(tensors, found, needed, strict=True)
            if n
        ]
        return _own(out, [*tensors, *saved, *(g for g in grads if g is not None)])

    return body


def _backward_fake(entry: Entry) -> Callable[..., list[torch.Tensor]]:
    def fake(*inputs: Any) -> list[torch.Tensor]:
        *slots, _, _, needed = inputs
        return [_empty(t) for t, n in zip(_tensors(slots), needed, strict=True) if n]

    return fake


def _differentiate_core(
    entry: Entry, slots: Sequence[Any], grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    with _autograd_on():
        leaves = [t.detach().requires_grad_(n) for t, n in zip(_tensors(slots), needed, strict=True)]
        if any(needed) and not any(x.view_as(x).requires_grad for x in leaves):
            # Better than gradients of zero, should a dispatcher to come mask autograd in a new way.
            raise RuntimeError(f"{entry.op.name}: autograd records nothing here, so its backward cannot be computed")
        queue = iter(leaves)
        fresh = [
            next(queue) if isinstance(s, torch.Tensor) else [next(queue) for _ in s] if _is_list(s) else s
            for s in slots
        ]
        outputs: list[torch.Tensor] = []
        flatten_tree(_run_core(entry.op, unpack(entry.layout, fresh)), outputs)
        flows = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        wanted = [x for x, n in zip(leaves, needed, strict=True) if n]
        if not flows or not wanted:
            return [None] * len(leaves)
        found = iter(
            torch.autograd.grad([o for o, _ in flows], wanted, [g.to(o.dtype) for o, g in flows], allow_unused=True)
        )
        return [next(found) if n else None for n in needed]


# Shared


def _check_backend_results(op: Any, args: tuple[Any, ...], leaves: Sequence[torch.Tensor]) -> None:
    """Generated code reads memory as the declared shape and dtype, so what a backend returned has to have them."""
    decision = record.last_decision()
    if decision is None or decision.core:
        return
    declared: list[torch.Tensor] = []
    flatten_tree(op.outputs(*args), declared)
    found, wanted = ([(tuple(t.shape), t.dtype, t.device) for t in tensors] for tensors in (leaves, declared))
    if found != wanted:
        raise RuntimeError(f"{decision.backend}.{op.name} returned {found}, its outputs were declared as {wanted}")


def _validate(op: Any, args: tuple[Any, ...]) -> None:
    if op.validate is not None:
        op.validate(*args)


def _run_forward(op: Any, args: tuple[Any, ...]) -> tuple[Any, Sequence[torch.Tensor]]:
    """The forward of a call that will be differentiated, with what its backward wants."""
    candidate = op.training_candidate(args)
    if candidate is None:
        return (_run_core(op, args), ()) if op.pair is None else op.pair.forward(*args)
    # A failure here propagates: which backward runs was settled with this choice.
    result, saved = candidate.forward(*args)
    expected = () if op.pair is None else op.pair.saved(*args)
    if [(t.shape, t.dtype) for t in saved] != [(t.shape, t.dtype) for t in expected]:
        raise RuntimeError(
            f"{candidate.name}.{op.name}_fwd saved {[(tuple(t.shape), t.dtype) for t in saved]}, "
            f"{op.name} lets a forward save {[(tuple(t.shape), t.dtype) for t in expected]}"
        )
    candidate.cell[0] += 1
    decision = record.Decision(op.operation, op.name, candidate.name, False)
    record.thread.decision = decision
    context = settings.current_context()
    for taken in () if context is None else context.values.get("trace", ()):
        taken.calls.append(record.Call(op.operation, op.name, record.thread.depth, decision))
    return result, saved


def _run_core(op: Any, args: tuple[Any, ...]) -> Any:
    context = settings.current_context()
    pin = None if context is None else context.values.get("pin")
    if pin is not None and pin.core:
        return op.run(args)  # leaves plugins out, and says which of core's paths
    with reference_only():
        return op.run(args)


@contextlib.contextmanager
def _autograd_on() -> Iterator[None]:
    """Autograd as outside of a custom op. Where the dispatcher masks it, ``enable_grad`` alone records nothing."""
    keys = torch._C.DispatchKey
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        exclude = exclude.remove(key)
    include = torch._C._dispatch_tls_local_include_set().add(keys.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def _is_list(slot: Any) -> bool:
    return isinstance(slot, (list, tuple))


def _tensors(slots: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for slot in slots:
        if isinstance(slot, torch.Tensor):
            found.append(slot)
        elif _is_list(slot):
            found += slot
    return found


def _empty(t: torch.Tensor) -> torch.Tensor:
    # Outputs are contiguous whatever the strides of the inputs: the one layout that every backend can promise.
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _own(results: list[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`results` contiguous, detached, and sharing memory with nothing: a custom op may not return an alias."""
    taken = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
    owned: list[torch.Tensor] = []
    for t in results:
        t = t.detach().contiguous()
        where = t.untyped_storage().data_ptr()
        if t.numel() and where in taken:
            t = t.clone()
            where = t.untyped_storage().data_ptr()
        taken.add(where)
        owned.append(t)
    return owned
