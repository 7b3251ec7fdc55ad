# SPDX-License-Identifier: MIT
"""What the kit asserts about one call. Every check first asks whether the backend takes the call at all."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fla.backends import BackendUnavailable, Trace, Verdict, trace
from fla.testing.draw import Call, Request, Truth, results_of, seeds_for, truth
from fla.testing.target import Target
from fla.utils.compare import assert_close

_NO_REASON = ("", "its verifier gave no reason")
_truths: dict[Any, Truth] = {}
_TRUTHS_AT_MOST = 2048


@dataclass(frozen=True)
class Outcome:
    """What came of a case: ``ran`` in the backend, or ``refused`` as it declares; calls made in the backend."""

    kind: str
    reason: str = ""
    calls: int = 0


Check = Callable[[Target, Request], int]


def outcome(target: Target, request: Request, check: Check) -> Outcome:
    """Run ``check`` if the backend takes the call, else see to it that the refusal is a proper one."""
    call = target.draw(request)
    verdict = target.verdict(call)
    if verdict.accepted:
        return Outcome("ran", calls=check(target, request))
    check_refusal(target, call, verdict)
    return Outcome("refused", verdict.reason)


def check_refusal(target: Target, call: Call, verdict: Verdict) -> None:
    """A refusal has a reason, is no bug of the verifier, and is kept: under a strict pin nothing runs."""
    assert verdict.code != "error", f"the verdict is an error, not a refusal: {verdict}"
    assert verdict.reason not in _NO_REASON, f"{target} refuses without a reason ({verdict.code})"
    said = None
    with trace() as calls:
        try:
            with target.pinned(), target.mode(call):
                target.function(**call.keywords())
        except BackendUnavailable as error:
            said = str(error)
    assert said is not None, f"explain says {verdict}, but the call ran in {_who(calls)}"
    assert verdict.reason in said, f"explain says {verdict.reason!r}, the call says {said}"


def _who(calls: Trace) -> str:
    return ", ".join(f"{c.operation}.{c.function} -> {c.backend}" for c in calls) or "nothing that is dispatched"


def execute(target: Target, call: Call) -> list[Any]:
    """Run a call under a strict pin; its results as a flat list.

    Raises:
        AssertionError: something else than the backend served the call, or the results are not of the op's form.
    """
    with target.pinned(), trace() as calls, target.mode(call):
        returned = target.function(**call.keywords())
    outer = [c for c in calls if c.depth == 0]
    ran = [c for c in outer if c.function == target.op.name and c.backend == target.backend]
    assert ran, f"{target} did not run, what ran: {_who(calls)}"
    inner = [c for c in calls if c.depth > 0 and c.function == target.op.name and c.backend != target.backend]
    assert not inner, f"{target} hands the call on instead of computing it: {_who(calls)}"
    check_form(target, call, returned)
    return results_of(returned)


def check_form(target: Target, call: Call, returned: Any) -> None:
    """Number, shapes, dtypes and device of results are those that the op declares."""
    if target.op.outputs is None:
        return
    bound = target.op.signature.bind(**call.keywords())
    bound.apply_defaults()
    try:
        promised = results_of(target.op.outputs(*bound.arguments.values()))
    except NotImplementedError:  # shapes that follow from values
        return
    got = results_of(returned)
    assert len(promised) == len(got), f"{len(promised)} results are due, got {len(got)}"
    for index, (want, have) in enumerate(zip(promised, got, strict=True)):
        name = _name(index)
        if want is None:
            assert have is None, f"{name} must be None, got {type(have).__name__}"
            continue
        assert isinstance(have, Tensor), f"{name} must be a tensor, got {have!r}"
        for what in ("shape", "dtype", "device"):
            due, found = getattr(want, what), getattr(have, what)
            assert due == found, f"{name} must have {what} {due}, got {found}"


def _name(index: int) -> str:
    return ("output", "final state", "second state")[index] if index < 3 else f"result {index}"


def expected(target: Target, call: Call, results: list[Tensor]) -> Truth:
    """The truth for a call, kept: one backend after the other is compared with the same numbers."""
    dtypes = tuple(x.dtype for x in results)
    fixed = tuple(sorted((name, repr(value)) for name, value in call.fixed.items()))
    key = (str(target.spec), target.device, call.request, dtypes, fixed)
    if key not in _truths:
        if len(_truths) >= _TRUTHS_AT_MOST:
            _truths.clear()
        _truths[key] = truth(call, list(dtypes))
    return _truths[key]


def compare(target: Target, call: Call, returned: list[Any], grads: dict[str, Tensor | None] | None = None) -> None:
    """Results and gradients are near the float64 recurrence."""
    results = [x for x in returned if x is not None]
    right = expected(target, call, results)
    dtype = call.request.dtype
    forward, backward = target.tolerances[dtype]
    near = 1e-12 if dtype == "float64" else 1e-7
    assert len(results) == len(right.results), f"{len(right.results)} results are due, got {len(results)}"
    wrong = []

    def near_enough(name: str, want: Tensor, have: Tensor, tolerance: float) -> None:
        try:
            assert_close(name, want, have.detach(), tolerance, err_atol=near)
        except AssertionError as error:
            wrong.append(str(error))

    for index, (want, have) in enumerate(zip(right.results, results, strict=True)):
        near_enough(_name(index), want, have, forward)
    for name, grad in (grads or {}).items():
        given = call.tensors[name]
        if grad is None:  # autograd's word for zero
            if right.grads[name].any():
                wrong.append(f"the gradient of {name} is missing")
        elif grad.dtype != given.dtype:
            wrong.append(f"the gradient of {name} must be {given.dtype}, got {grad.dtype}")
        else:
            near_enough(f"gradient of {name}", right.grads[name], grad, backward)
    assert not wrong, "\n".join(wrong)


def gradients(call: Call, returned: list[Any]) -> dict[str, Tensor | None]:
    """Gradients of a call that has been run, by input name; None where autograd knows of none."""
    results = [x for x in returned if x is not None]
    leaves = call.leaves()
    pairs = [
        (x, seed)
        for x, seed in zip(results, seeds_for(call.request, results), strict=True)
        if seed is not None and x.requires_grad
    ]
    if not pairs:
        return dict.fromkeys(leaves)
    outs, ups = [x for x, _ in pairs], [seed for _, seed in pairs]
    found = torch.autograd.grad(outs, list(leaves.values()), ups, allow_unused=True)
    return dict(zip(leaves, found, strict=True))


def run(target: Target, call: Call) -> tuple[list[Any], dict[str, Tensor | None]]:
    """Results and gradients of a call; no gradients where no input requires one."""
    returned = execute(target, call)
    return returned, gradients(call, returned) if call.request.grad else {}


# Checks


def check_values(target: Target, request: Request) -> int:
    """Results, and gradients where inputs require them, equal the truth."""
    call = target.draw(request)
    compare(target, call, *run(target, call))
    return 1


@contextmanager
def poisoned_memory(device: str) -> Iterator[None]:
    """Memory that torch hands out unwritten is NaN (the largest number, for integers)."""
    if device.startswith("cuda"):
        # What kernels get from the caching allocator without torch.empty: blocks that were NaN before.
        blocks = [torch.full((2**power,), float("nan"), device=device) for power in range(8, 26, 2) for _ in range(4)]
        del blocks
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    _set_deterministic(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _set_deterministic(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


# The public function imports the compiler first, which takes seconds.
_set_deterministic = getattr(torch._C, "_set_deterministic_algorithms", torch.use_deterministic_algorithms)


def check_poisoned(target: Target, request: Request) -> int:
    """Nothing is read before it is written."""
    call = target.draw(request)
    with poisoned_memory(target.device):
        returned, grads = run(target, call)
    compare(target, call, returned, grads)
    return 1


def check_kept(target: Target, request: Request) -> int:
    """Inputs and torch's modes are as they were, bit by bit, and results are memory of their own."""
    call = target.draw(request)
    before = {name: x.detach().clone() for name, x in call.tensors.items()}
    offsets = None if call.offsets is None else call.offsets.clone()
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
        torch.default_generator.manual_seed(20_000)  # not where a backend that seeds the generator leaves it
        modes = _modes(target.device)
        returned, _ = run(target, call)
        changed = [name for name, value in _modes(target.device).items() if not _equal(value, modes[name])]
    assert not changed, f"the call changed {', '.join(changed)}"
    for name, x in call.tensors.items():
        assert _same(x, before[name]), f"{name} was changed"
    assert offsets is None or torch.equal(offsets, call.offsets), "cu_seqlens was changed"  # type: ignore[arg-type]
    mine = {x.untyped_storage().data_ptr(): name for name, x in call.tensors.items() if x.numel()}
    for index, x in enumerate(returned):
        if x is not None and x.numel():
            owner = mine.setdefault(x.untyped_storage().data_ptr(), _name(index))
            assert owner == _name(index), f"the {_name(index)} lies in the memory of {owner}"
    return 1


def _modes(device: str) -> dict[str, Any]:
    """What belongs to the caller."""
    found: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "the state of random numbers": torch.get_rng_state(),
    }
    if device.startswith("cuda"):
        found["the current device"] = torch.cuda.current_device()
        found["the current stream"] = torch.cuda.current_stream().cuda_stream
        found["the state of random numbers on the GPU"] = torch.cuda.get_rng_state(device)
    return found


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit by bit, NaN being equal to NaN."""
    if a is None or b is None:
        return a is b
    a, b = a.detach(), b.detach()
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def check_repeatable(target: Target, request: Request) -> int:
    """The same call gives the same bits, also after other calls, which leave its results alone."""
    first = target.draw(request)
    returned, grads = run(target, first)
    kept = [None if x is None else x.detach().clone() for x in returned]
    kept_grads = {name: None if x is None else x.clone() for name, x in grads.items()}
    other = replace(request, seed=request.seed + 7)
    run(target, target.draw(other))
    for index, (x, copy) in enumerate(zip(returned, kept, strict=True)):
        assert _same(x, copy), f"a later call changed the {_name(index)} of an earlier one"
    again, grads = run(target, target.draw(request))
    for index, (x, copy) in enumerate(zip(again, kept, strict=True)):
        assert _same(x, copy), f"the {_name(index)} of the same call differs from run to run"
    for name, x in grads.items():
        assert _same(x, kept_grads[name]), f"the gradient of {name} differs from run to run"
    compare(target, first, again, grads)
    return 3


def check_without_grad(target: Target, request: Request) -> int:
    """Under no_grad and inference_mode a call gives the truth, and nothing that requires a gradient."""
    calls = 0
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            call = target.draw(request)
            verdict = target.verdict(call)
            if not verdict.accepted:
                check_refusal(target, call, verdict)
                continue
            returned = execute(target, call)
            calls += 1
        assert not any(x.requires_grad for x in returned if x is not None), f"a result of {mode.__name__} needs grad"
        compare(target, target.draw(replace(request, grad=())), returned)
    return calls


def check_meta(target: Target, request: Request) -> int:
    """``explain`` works on meta tensors, which have no values to look at."""
    call = target.draw(request).copy("meta")
    verdict = target.verdict(call)
    assert verdict.code != "error", f"explain on meta tensors: {verdict}"
    return 0


def check_stream(target: Target, request: Request) -> int:
    """Work is put on the current stream: inputs that are written late on it are seen."""
    call = target.draw(request)
    execute(target, call)  # compiled and warm
    stream = torch.cuda.Stream(target.device)
    late = call.copy()
    with torch.no_grad():
        for x in late.tensors.values():
            _physical(x).fill_(float("nan"))
    torch.cuda.synchronize(target.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        with torch.no_grad():
            for name, x in late.tensors.items():
                _physical(x).copy_(_physical(call.tensors[name]))
        returned, grads = run(target, late)
        # Reading on this stream: a backend that works on another one is not done yet.
        returned = [None if x is None else x.clone() for x in returned]
    stream.synchronize()
    compare(target, call, returned, grads)
    return 2


def _physical(x: Tensor) -> Tensor:
    """The part of an expanded tensor that is memory."""
    return x.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]


def check_other_device(target: Target, request: Request) -> int:
    """Tensors of a device that is not the current one."""
    other = replace_device(target, "cuda:1")
    with torch.cuda.device(0):
        return check_values(other, request)


def replace_device(target: Target, device: str) -> Target:
    return Target(target.backend, target.spec, device, target.fixed)


def check_pair(target: Target, request: Request) -> int:
    """A declared ``<fn>_fwd`` and ``<fn>_bwd`` give the truth, and a gradient for each input that needs one."""
    call = target.draw(request)
    parameters = target.op.signature.parameters
    bound = target.op.signature.bind(**call.keywords())
    bound.apply_defaults()
    args = tuple(bound.arguments.values())
    with target.pinned():
        candidate = target.op.training_candidate(args)
    assert candidate is not None, f"{target} has a forward and a backward, and they are not taken"
    with torch.no_grad():
        returned, saved = candidate.forward(*args)  # type: ignore[misc]
        results = [x for x in results_of(returned) if x is not None]
        seeds = seeds_for(request, results)
        tensors = [(name, x) for name, x in zip(parameters, args, strict=True) if isinstance(x, Tensor)]
        needed = [x.requires_grad for _, x in tensors]
        found = candidate.backward(args, saved, seeds, needed)  # type: ignore[misc]
    inverse = {target.op.facts.initial_state: "state"}
    named = {inverse.get(n, n): g for (n, _), g, need in zip(tensors, found, needed, strict=True) if need}
    compare(target, call, results_of(returned), named)
    return 1


def check_declared(target: Target, request: Request) -> int:
    """What the capability names is accepted, in at least one form of the op."""
    reasons = []
    for variant in target.spec.variants:
        if variant.without_grad and request.grad:
            continue
        asked = replace(request, variant=variant.name)
        verdict = target.verdict(target.draw(asked))
        if verdict.accepted:
            return check_values(target, asked)
        reasons.append(f"{variant.name}: {verdict}")
    raise AssertionError("the capability declares this, and no form of the op is accepted:\n  " + "\n  ".join(reasons))
