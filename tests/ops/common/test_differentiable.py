# SPDX-License-Identifier: MIT
"""An engine's autograd function gives each input its gradient, whatever inputs are absent."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fla.ops._common.served import differentiable
from fla.ops._common.tape import Known

SEEN: dict = {}


def _forward(q, k, v, g, h0, cu, call, scale):
    o = q * k + v * scale
    if g is not None:
        o = o * g
    return o, None if h0 is None else h0 + v, k * 2


def _backward(q, k, v, g, h0, cu, o, twice, do, dht, call, into_state):
    SEEN.update(call=call, o=o, twice=twice, into_state=into_state, cu=cu, dht=dht)
    scale = 3.0
    w = do if g is None else do * g
    dv = w * scale if dht is None else w * scale + dht
    dg = None if g is None else do * (q * k + v * scale)
    return w * k, w * q, dv, dg, dht if into_state else None


train = differentiable("Toy", _forward, _backward, 4, lambda call, scale: call == "keep")


def _inputs(*absent: int, grads: tuple[int, ...] = (0, 1, 2, 3, 4)):
    torch.manual_seed(0)
    x = [None if i in absent else torch.randn(2, 3, requires_grad=i in grads) for i in range(5)]
    return (*x, None if 5 in absent else torch.tensor([0, 2]))


def _expected(inputs, final: bool):
    o, ht, _ = _forward(*inputs, None, 3.0)
    results = [o, ht] if final and ht is not None else [o]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    return torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], allow_unused=True)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("absent", [(), (3,), (4,), (3, 4), (5,), (3, 4, 5)])
def test_every_input_gets_its_own_gradient(absent, final) -> None:
    inputs = _inputs(*absent)
    o, ht = train(inputs, Known("call"), 3.0)
    assert (ht is None) == (4 in absent)
    results = [o, ht] if final and ht is not None else [o]
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    found = torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], allow_unused=True)
    for got, want in zip(found, _expected(inputs, final), strict=True):
        assert torch.equal(torch.zeros(1) if got is None else got, torch.zeros(1) if want is None else want)
    assert torch.equal(SEEN["twice"], inputs[1] * 2)
    assert SEEN["o"] is None
    assert SEEN["into_state"] is (4 not in absent)
    assert (SEEN["cu"] is None) == (5 in absent)


def test_a_state_that_needs_no_gradient_is_said_not_to() -> None:
    o, _ = train(_inputs(grads=(0, 2)), Known("call"), 3.0)
    o.sum().backward()
    assert SEEN["into_state"] is False


def test_a_gradient_of_the_state_alone_comes_with_zeros_for_the_output() -> None:
    inputs = _inputs(3)
    _, ht = train(inputs, Known("call"), 3.0)
    dq, dv = torch.autograd.grad(ht.sum(), (inputs[0], inputs[2]))
    assert torch.equal(dq, torch.zeros_like(dq))
    assert torch.equal(dv, torch.ones_like(dv))


def test_the_output_is_kept_where_the_call_says_so_and_may_not_be_written_to_then() -> None:
    inputs = _inputs(3, 4, 5)
    o, _ = train(inputs, Known("keep"), 3.0)
    o.sum().backward()
    assert torch.equal(SEEN["o"], o)
    o, _ = train(inputs, Known("keep"), 3.0)
    with torch.no_grad():
        o.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
    o, _ = train(inputs, Known("other"), 3.0)
    with torch.no_grad():
        inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_what_a_written_out_forward_made_takes_part_in_autograd_like_its_own() -> None:
    inputs, known = _inputs(3, 4, 5), Known("call")
    grad = []

    def written(device, *x):
        grad.append(torch.is_grad_enabled())
        return _forward(*x, "call", 3.0)

    known.tapes["forward"] = written
    o, _ = train(inputs, known, 3.0)
    assert grad == [False]
    assert type(o.grad_fn).__name__ == "ToyBackward"
    seen = []
    o.register_hook(lambda g: seen.append(g.shape))
    o.sum().backward()
    assert seen == [o.shape]
    for x, want in zip(inputs[:3], _expected(_inputs(3, 4, 5), False), strict=True):
        assert torch.equal(x.grad, want)


def test_offsets_from_inference_mode_can_be_kept() -> None:
    with torch.inference_mode():
        cu = torch.tensor([0, 2])
    o, _ = train((*_inputs()[:5], cu), Known("call"), 3.0)
    o.sum().backward()
    assert torch.equal(SEEN["cu"], cu)


def test_saved_tensors_go_through_hooks() -> None:
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x.clone(), lambda x: x):
        o, _ = train(_inputs(3, 4, 5), Known("call"), 3.0)
    assert packed == [(2, 3)] * 4
    o.sum().backward()


def test_the_usual_backward_is_what_is_written_out_of_it() -> None:
    known, calls = Known("call"), []

    def written(device, *x):
        calls.append(x[-2].is_contiguous() and not x[-2].is_neg() and x[-1] is None)
        return None if len(calls) <= 2 else _backward(*x, "call", False)

    known.tapes["backward", False, True] = written
    do = torch.randn(3, 2).t()
    for i in range(4):  # at first it says that it cannot
        inputs = _inputs(3, 4)
        o = train(inputs, known, 3.0)[0]
        w = do if i == 2 else do.contiguous() if i < 2 else torch._neg_view(do.contiguous())
        found = torch.autograd.grad(o, inputs[:3], w)
        inputs = _inputs(3, 4)
        want = torch.autograd.grad(_forward(*inputs, None, 3.0)[0], inputs[:3], w)
        for x, y in zip(found, want, strict=True):
            assert torch.equal(x, y)
    assert calls == [True] * 5


def test_states_go_the_long_way() -> None:
    known = Known("call")
    known.tapes["backward", False, True] = lambda *x: pytest.fail("not the usual backward")
    o, ht = train(_inputs(3, 5), known, 3.0)
    (o.sum() + ht.sum()).backward()
    train(_inputs(3, 5), known, 3.0)[0].sum().backward()
    train(_inputs(3, 5), known, 3.0)[1].sum().backward()
