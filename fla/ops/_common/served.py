# SPDX-License-Identifier: MIT
"""How an engine runs a call that it knows, differentiable or not, and tells dispatch of it, so that the next one comes
straight to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fla.backends import doors
from fla.ops._common.launch import HERE, aligned, on_device
from fla.ops._common.policy import chip_of
from fla.ops._common.single import applied, once, savable
from fla.ops._common.tape import Body, Known

# Name of the backward where o alone has a gradient and no initial state needs one.
_USUAL = ("backward", False, True)


def served(run: Callable[..., Any], inputs: tuple[Any, ...], *static: Any) -> Any:
    """``run(inputs, *static)`` on the device of the inputs, which holds for all that look the same."""
    first = inputs[0]
    with on_device(first):
        result = run(inputs, *static)
    if doors.asked():
        # What chip other devices stand for may change (`describe_chip`).
        device = first.device
        chip = None if first.is_cuda else chip_of(device)

        def again(inputs: tuple[Any, ...]) -> Any:
            if chip is not None and chip_of(device) != chip:
                return None
            here = on_device(inputs[0])
            if here is HERE:
                return run(inputs, *static)
            with here:
                return run(inputs, *static)

        doors.offer(again, inputs, result)
    return result


def differentiable(
    name: str, forward: Body, backward: Body, state: int, keeps: Callable[..., bool] | None = None
) -> Callable[..., Any]:
    """``(inputs, known, *static) -> (o, final state or None)``, an autograd function of an engine.

    ``forward(*inputs, call, *static)`` returns these two and what ``backward`` needs of its own. That is given the
    inputs, o where ``keeps(call, *static)`` (else None; no such place without ``keeps``), those, the gradients of the
    two, the call, and whether the initial state, the input with the index ``state``, needs a gradient. It returns
    gradients of the inputs, in order, as far as any has one. The third input is shaped like o, the last is cu_seqlens.
    """

    def run(ctx: Any, job: tuple[Known, tuple[Any, ...], tuple[Any, ...], Any], *given: Any) -> Any:
        known, inputs, static, made = job
        o, ht, *saved = made or known.run("forward", forward, inputs, *static)
        if keeps is None:
            ctx.save_for_backward(*inputs, *saved)
        else:
            ctx.save_for_backward(*inputs, o if keeps(known.call, *static) else None, *saved)
        ctx.known = known
        ctx.set_materialize_grads(False)
        return o, ht

    @once
    def back(ctx: Any, do: Tensor | None, dht: Tensor | None = None) -> tuple[Any, ...]:
        known = ctx.known
        if do is None and dht is None:
            return (None,) * (1 + len(known.places))
        saved = ctx.saved_tensors
        # The usual case in as few steps as there can be: the thread that this runs on has just woken, with cold caches.
        if dht is None and do is not None and saved[state] is None and callable(usual := known.tapes.get(_USUAL)):
            fit = do.is_contiguous() and not do.is_neg() and on_device(do) is HERE
            grads = usual(do.get_device(), *saved, do, None) if fit else None
            if grads is not None:
                return None, *known.given(grads)
        do = torch.zeros_like(saved[2]) if do is None else aligned(do)
        dht = None if dht is None else aligned(dht)
        into_state = saved[state] is not None and ctx.needs_input_grad[1 + known.places.index(state)]
        which = ("backward", into_state, dht is None)
        here = on_device(do)
        if here is HERE:
            grads = known.run(which, backward, (*saved, do, dht), into_state)
        else:
            with here:
                grads = known.run(which, backward, (*saved, do, dht), into_state)
        return None, *known.given(grads)

    members = {"forward": staticmethod(run), "backward": staticmethod(back), "__module__": forward.__module__}
    apply = applied(type(name, (torch.autograd.Function,), members))

    def train(inputs: tuple[Any, ...], known: Known, *static: Any) -> Any:
        if inputs[-1] is not None:
            inputs = (*inputs[:-1], savable(inputs[-1]))
        # The kernels run before torch makes its node, and absent inputs are not given to it: a caller waits for both.
        return apply((known, inputs, static, known.first("forward", inputs)), *known.given(inputs))

    return train
