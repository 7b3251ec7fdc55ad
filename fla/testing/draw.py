# SPDX-License-Identifier: MIT
"""Calls for the kit: what is asked for (:class:`Request`), the tensors of it, and what the op must answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.backends import CallFacts, DispatchedOp
from fla.testing.specs import OpSpec, Variant

#: log decay per token of the distribution "strong_decay" where it cuts.
CUT = -20.0


@dataclass(frozen=True)
class Request:
    """One call, as numbers and names.

    Attributes:
        variant: name of a form of the op.
        dtype: of q, k and v.
        B, T, H, K, V: sizes; ``T`` is the sum of ``lengths`` where those are given.
        group: value heads per key head.
        lengths: of packed sequences, or None.
        uncovered: tokens after the last packed sequence, of which nothing may come.
        offsets: dtype of ``cu_seqlens``.
        offsets_on_cpu: also pass ``cu_seqlens_cpu``.
        initial: dtype of the initial state, or None for no state.
        final: ask for the final state.
        v_first: states are V-first.
        scale: None for the default.
        grad: names of the inputs that require a gradient (``"*"``: every one that can).
        upstream: which results the gradient comes through: ``both``, ``output``, ``state``, or ``sum`` for the
            stride-0 gradient of ``o.sum()``.
        memory: how inputs lie in memory: ``contiguous``, ``padded``, ``head_first``, ``expanded``, ``column``.
        gates: dtype of the inputs that are float32 in 16-bit calls; None for float32.
        raw: dtype of all other gates and coefficients; None for the dtype of q.
        seed: of the random numbers.
    """

    variant: str = "plain"
    dtype: str = "float32"
    B: int = 2
    T: int = 70
    H: int = 2
    group: int = 1
    K: int = 32
    V: int = 16
    lengths: tuple[int, ...] | None = None
    uncovered: int = 0
    offsets: str = "int64"
    offsets_on_cpu: bool = False
    initial: str | None = "float32"
    final: bool = True
    v_first: bool = False
    scale: float | None = None
    grad: tuple[str, ...] = ()
    upstream: str = "both"
    memory: str = "contiguous"
    gates: str | None = None
    raw: str | None = None
    seed: int = 0

    def sizes(self) -> dict[str, int]:
        if self.lengths is None:
            B, T, N = self.B, self.T, self.B
        else:
            B, T, N = 1, sum(self.lengths) + self.uncovered, len(self.lengths)
        return {"B": B, "T": T, "N": N, "H": self.H, "HV": self.H * self.group, "K": self.K, "V": self.V}


def _size(axis: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[part] for part in axis.split("*"))


def _normal(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=random, dtype=torch.float64)


def _strong_decay(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    mild = F.logsigmoid(_normal(shape, random))
    return torch.where(torch.rand(shape, generator=random, dtype=torch.float64) < 0.3, CUT, mild)


#: Distributions of inputs by name. Decays are natural logarithms.
DRAWS: dict[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = {
    "normal": _normal,
    "unit": lambda shape, random: F.normalize(_normal(shape, random), dim=-1),
    "positive": lambda shape, random: _normal(shape, random).abs() + 0.1,
    "unit_interval": lambda shape, random: _normal(shape, random).sigmoid(),
    "decay": lambda shape, random: F.logsigmoid(_normal(shape, random)),
    "strong_decay": _strong_decay,
    "rate": lambda shape, random: 0.5 * _normal(shape, random),
}


def lay_out(x: Tensor, memory: str) -> Tensor:
    """``x`` with other strides (and, expanded, with the values of its first head everywhere)."""
    if memory == "contiguous" or x.dim() < 3:
        return x.contiguous()
    if memory == "padded":
        # Slices of one wider projection: rows are apart, the address is odd, and what lies between is NaN.
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 16), math.nan)
        view = wide[..., 3 : 3 + x.shape[-1]]
        view.copy_(x)
        return view
    if memory == "head_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if memory == "column":
        return x.mT.contiguous().mT
    if memory == "expanded":
        return x[:, :, :1].expand_as(x)
    raise ValueError(f"memory must be contiguous, padded, head_first, column or expanded, got {memory!r}")


@dataclass
class Call:
    """A request with its tensors. ``tensors`` are by argument name, the initial state as ``state`` and ``z``."""

    spec: OpSpec
    variant: Variant
    request: Request
    facts: CallFacts
    tensors: dict[str, Tensor]
    offsets: Tensor | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()

    @cached_property
    def flags(self) -> dict[str, Any]:
        return dict(self.variant.flags)

    def keywords(self) -> dict[str, Any]:
        """The arguments of the public function."""
        request, facts = self.request, self.facts
        given: dict[str, Any] = {**self.flags, **self.fixed}
        given |= {name: x for name, x in self.tensors.items() if name not in ("state", "z")}
        state, z = self.tensors.get("state"), self.tensors.get("z")
        if state is not None and facts.initial_state is not None:
            given[facts.initial_state] = state if z is None else (state, z)
        if request.scale is not None:
            given["scale"] = request.scale
        if "output_final_state" in self.parameters:
            given["output_final_state"] = request.final
        if request.v_first and facts.state_v_first is not None:
            given[facts.state_v_first] = True
        if self.offsets is not None and facts.cu_seqlens is not None:
            given[facts.cu_seqlens] = self.offsets
            if request.offsets_on_cpu:
                given[f"{facts.cu_seqlens}_cpu"] = self.offsets.cpu()
        return given

    def copy(self, device: str | torch.device | None = None) -> Call:
        """The same call on fresh tensors (same strides), or on another device."""

        def fresh(x: Tensor) -> Tensor:
            new = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device or x.device)
            if new.device.type != "meta":
                new.copy_(x.detach()) if 0 not in x.stride() else _copy_expanded(new, x.detach())
            return new.requires_grad_(x.requires_grad)

        tensors = {name: fresh(x) for name, x in self.tensors.items()}
        offsets = None if self.offsets is None else self.offsets.to(device or self.offsets.device, copy=True)
        return replace(self, tensors=tensors, offsets=offsets)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that require a gradient."""
        return {name: x for name, x in self.tensors.items() if x.requires_grad}


def _copy_expanded(new: Tensor, x: Tensor) -> None:
    first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    new[first].copy_(x[first])


def draw(op: DispatchedOp, spec: OpSpec, request: Request, device: str, fixed: Mapping[str, Any]) -> Call:
    """The tensors of a request; the same for the same request, whatever the backend."""
    variant = next(v for v in spec.variants if v.name == request.variant)
    random = torch.Generator().manual_seed(request.seed)
    sizes = request.sizes()
    dtype = getattr(torch, request.dtype)
    tensors: dict[str, Tensor] = {}
    differentiable: list[str] = []
    for name, x in spec.inputs_of(variant).items():
        values = DRAWS[x.draw](tuple(_size(axis, sizes) for axis in x.shape.split()), random)
        chosen = dtype
        if x.wide:
            chosen = getattr(torch, request.gates) if request.gates else torch.promote_types(dtype, torch.float32)
        elif name not in op.facts.tensors and request.raw:
            chosen = getattr(torch, request.raw)
        tensors[name] = lay_out(values.to(device=device, dtype=chosen), request.memory)
        if x.grad:
            differentiable.append(name)
    if request.initial is not None and op.facts.initial_state is not None:
        wide = dtype if dtype == torch.float64 else getattr(torch, request.initial)
        shape = [sizes["N"], sizes["HV"], sizes["K"], sizes["V"]]
        if request.v_first and op.facts.state_v_first is not None:
            shape[2:] = [sizes["V"], sizes["K"]]
        states = {"state": DRAWS["normal"](tuple(shape), random)}
        if variant.flags.get("normalize"):
            # Positive, as the sums of weights must be.
            states["z"] = DRAWS["positive"]((sizes["N"], 1, sizes["H"], sizes["K"]), random)
        memory = request.memory if request.memory in ("padded", "column") else "contiguous"
        tensors |= {name: lay_out(x.to(device=device, dtype=wide), memory) for name, x in states.items()}
        differentiable += states
    for name in differentiable:
        if "*" in request.grad or name in request.grad:
            tensors[name] = tensors[name].detach().requires_grad_()
    offsets = None
    if request.lengths is not None:
        ends = [0, *itertools.accumulate(request.lengths)]
        offsets = torch.tensor(ends, dtype=getattr(torch, request.offsets), device=device)
    return Call(spec, variant, request, op.facts, tensors, offsets, fixed, frozenset(op.signature.parameters))


def results_of(returned: Any) -> list[Any]:
    """What an op returned as a flat list, None included."""
    if isinstance(returned, tuple | list):
        return [item for part in returned for item in results_of(part)]
    return [returned]


@dataclass(frozen=True)
class Truth:
    """Results in float64 (None where the op returns None is not represented), and gradients by input name."""

    results: list[Tensor]
    grads: dict[str, Tensor]


def seeds_for(request: Request, results: list[Tensor]) -> list[Tensor | None]:
    """Upstream gradients for the results, in their dtypes, by ``request.upstream``."""
    random = torch.Generator().manual_seed(request.seed + 1)
    seeds: list[Tensor | None] = []
    for index, x in enumerate(results):
        seed = torch.randn(x.shape, generator=random, dtype=torch.float64).to(device=x.device, dtype=x.dtype)
        if request.upstream == "sum":  # with strides of 0, as autograd makes it
            seed = torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape)
        wanted = {"output": index == 0, "sum": index == 0, "state": index > 0}.get(request.upstream, True)
        seeds.append(seed if wanted else None)
    return seeds


def truth(call: Call, dtypes: list[torch.dtype]) -> Truth:
    """What the op must answer, by the token recurrence, sequence by sequence.

    Args:
        dtypes: of the op's results; upstream gradients are rounded to them.
    """
    request, sizes = call.request, call.request.sizes()
    exact = {n: x.detach().double().requires_grad_(x.requires_grad) for n, x in call.tensors.items()}
    tokenwise = {n for n, x in call.spec.inputs_of(call.variant).items() if x.shape.startswith("B T")}
    scale = request.K**-0.5 if request.scale is None else request.scale
    spans = [slice(0, sizes["T"])]
    if request.lengths is not None:
        spans = [slice(a, b) for a, b in itertools.pairwise([0, *itertools.accumulate(request.lengths)])]
    parts = []
    for n, span in enumerate(spans):
        values: dict[str, Any] = {"scale": scale}
        for name, x in exact.items():
            if name == "state":
                x = x.mT if request.v_first and call.facts.state_v_first is not None else x
            if name in tokenwise:
                x = x[:, span]
            elif name in ("state", "z") and request.lengths is not None:
                x = x[n : n + 1]
            values[name] = x
        parts.append(call.spec.compute(values, call.flags))
    # A third result is either a second state or the states before chunks, which follow the tokens.
    along_tokens = (0, 2) if call.flags.get("return_intermediate_states") else (0,)
    results = [torch.cat([part[i] for part in parts], int(i in along_tokens)) for i in range(len(parts[0]))]
    if request.uncovered:
        o = results[0]
        results[0] = torch.cat([o, o.new_zeros(o.shape[0], request.uncovered, *o.shape[2:])], 1)
    if request.v_first and call.facts.state_v_first is not None:
        results = [results[0], *(x.mT for x in results[1:])]
    if "output_final_state" not in call.parameters:
        results = results[:1]
    elif not request.final:
        results = [results[0], *results[2:]]
    leaves = {name: x for name, x in exact.items() if x.requires_grad}
    grads: dict[str, Tensor] = {}
    if leaves:
        seeds = seeds_for(request, results)
        pairs = [
            (x, seed.to(dtype).double())
            for x, seed, dtype in zip(results, seeds, dtypes, strict=True)
            if seed is not None and x.requires_grad
        ]
        if pairs:
            outs, ups = [x for x, _ in pairs], [seed for _, seed in pairs]
            found = torch.autograd.grad(outs, list(leaves.values()), ups, allow_unused=True, materialize_grads=True)
            grads = dict(zip(leaves, found, strict=True))
        else:
            grads = {name: torch.zeros_like(x) for name, x in leaves.items()}
    return Truth([x.detach() for x in results], grads)
