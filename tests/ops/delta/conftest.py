# SPDX-License-Identifier: MIT
"""The ground truth of the delta family: a token recurrence in float64, and the comparison of a call with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

# RMS error over RMS of the truth, by dtype: (outputs and states, gradients).
TOLERANCE = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Deterministic mode fills what torch.empty returns with NaN, and refuses what is not deterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    h0: Tensor | None = None,
    scale: float | None = None,
    offsets: list[int] | None = None,
    erase: Tensor | None = None,
    gain: Tensor | None = None,
    p: Tensor | None = None,
    exclusive: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs and states [N, HV, K, V], token by token; ``erase``, ``gain``, ``p`` are for ops with their own."""
    if offsets is not None:
        parts = []
        for n, (a, b) in enumerate(itertools.pairwise(offsets)):
            cut = [None if x is None else x[:, a:b] for x in (q, k, v, beta, g, gk, gv)]
            own = [None if x is None else x[:, a:b] for x in (erase, gain, p)]
            parts.append(recurrence(*cut, None if h0 is None else h0[n : n + 1], scale, None, *own, exclusive))
        return torch.cat([o for o, _ in parts], 1), torch.cat([S for _, S in parts])
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, p = (x.repeat_interleave(HV // H, 2) for x in (q, k, k if p is None else p))
    wide = lambda x: x if x.dim() == 4 else x.unsqueeze(-1)
    S = q.new_zeros(B, HV, K, V) if h0 is None else h0
    outputs = []
    for t in range(T):
        before = S
        for decay, axis in ((g, None), (gk, -1), (gv, -2)):
            if decay is not None:
                factor = decay[:, t].exp()
                S = S * (factor[..., None, None] if axis is None else factor.unsqueeze(axis))
        read = p[:, t] if erase is None else wide(erase)[:, t] * p[:, t]
        error = torch.einsum("bhk,bhkv->bhv", read, before if exclusive else S)
        update = (v[:, t] if gain is None else wide(gain)[:, t] * v[:, t]) - error
        if beta is not None:
            update = wide(beta)[:, t] * update
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], update)
        outputs.append((K**-0.5 if scale is None else scale) * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), S


def op_truth(
    x: Mapping[str, Tensor],
    *,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    scale: float | None = None,
    offsets: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """What an op must compute for its arguments ``x`` (named as its own; the state is ``h0``) and flags."""
    q, k, beta = x["q"], x["k"], x.get("beta")
    if use_qk_l2norm_in_kernel:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if use_beta_sigmoid_in_kernel and beta is not None:
        beta = (2 if allow_neg_eigval else 1) / (1 + (-beta).exp())
    g = x.get("g")
    if use_gate_in_kernel and g is not None:
        per_head = (-1, 1) if g.dim() == 4 else (-1,)
        g = g + x["dt_bias"].reshape(g.shape[2:]) if "dt_bias" in x else g
        rate = x["A_log"].exp().reshape(per_head) if "A_log" in x else torch.ones((), dtype=g.dtype)
        g = -rate * F.softplus(g, threshold=50) if lower_bound is None else lower_bound / (1 + (-rate * g).exp())
    vector = g is not None and g.dim() == 4
    decay = {"gk" if vector else "g": g}
    if x.get("gk") is not None:
        decay["gk"] = x["gk"]
    return recurrence(q, k, x["v"], beta, **decay, gv=x.get("gv"), h0=x.get("h0"), scale=scale, offsets=offsets)


def inputs(
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int,
    V: int,
    *,
    gate: str | None = "mild",
    vector: bool = True,
    states: int | None = None,
    dtype: torch.dtype = torch.float32,
    gate_in_kernel: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random arguments. ``gate``: mild, strong, cut (much of it -1000 and -inf), zero or None (no gate)."""
    random = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=random, dtype=torch.float64)
    x = {"q": normal(B, T, H, K), "k": F.normalize(normal(B, T, H, K), dim=-1), "v": normal(B, T, HV, V)}
    if gate is not None:
        g = normal(B, T, HV, K) if vector else normal(B, T, HV)
        if not gate_in_kernel:
            g = {"mild": 1.0, "strong": 30.0, "cut": 1.0, "zero": 0.0}[gate] * F.logsigmoid(g)
        if gate == "cut":
            draw = torch.rand(g.shape, generator=random, dtype=torch.float64)
            g = torch.where(draw < 0.4, -1000.0, torch.where(draw < 0.5, -torch.inf, g))
        x["g"] = g
    x["beta"] = normal(B, T, HV).sigmoid()
    if gate_in_kernel:
        x["A_log"] = normal(HV) * 0.5
        x["dt_bias"] = normal(HV * K) if vector else normal(HV)
    if states is not None:
        x["h0"] = normal(states, HV, K, V)
    return {name: t.to(dtype if name in "qkv" else torch.promote_types(dtype, torch.float32)) for name, t in x.items()}


def call(op: Callable[..., Any], **options: Any) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]:
    """The op as a function of its arguments ``x``, giving outputs and K-first states."""
    v_first = options.get("state_v_first", False)

    def run(x: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        given = {("initial_state" if name == "h0" else name): t for name, t in x.items()}
        if v_first and "h0" in x:
            given["initial_state"] = x["h0"].mT
        o, S = op(**given, output_final_state=True, **options)
        return o, S.mT if v_first else S

    return run


def error(got: Tensor, truth: Tensor) -> float:
    """RMS error over RMS of the truth; NaN and infinities are never right."""
    got, truth = got.detach().double(), truth.detach()
    if not got.isfinite().all():
        return float("inf")
    return float((got - truth).square().mean().sqrt() / (truth.square().mean().sqrt() + 1e-8))


def differentiate(results: list[Tensor], x: Mapping[str, Tensor], seeds: list[Tensor]) -> tuple[Tensor, ...]:
    # Without tokens a result need not depend on anything.
    pairs = [(t, seed) for t, seed in zip(results, seeds, strict=True) if t.requires_grad]
    outputs, grads = ([pair[i] for pair in pairs] for i in (0, 1))
    return torch.autograd.grad(outputs, list(x.values()), grads, allow_unused=True, materialize_grads=True)


def compare(
    run: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]],
    truth: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]],
    x: Mapping[str, Tensor],
    gradients: bool = True,
) -> None:
    """Outputs, states and every gradient (through both) of ``run`` equal those of ``truth`` in float64."""
    forward, backward = TOLERANCE[x["q"].dtype]
    given = {name: t.detach().clone().requires_grad_(gradients) for name, t in x.items()}
    wanted = {name: t.detach().double().requires_grad_(gradients) for name, t in x.items()}
    o, S = run(given)
    o_true, S_true = truth(wanted)
    assert o.shape == o_true.shape
    assert S.shape == S_true.shape
    errors = {"o": error(o, o_true.detach()), "state": error(S, S_true.detach())}
    if gradients:
        random = torch.Generator().manual_seed(1)
        seeds = [torch.randn(t.shape, generator=random).to(t.dtype) for t in (o, S)]
        got = differentiate([o, S], given, seeds)
        true = differentiate([o_true, S_true], wanted, [t.double() for t in seeds])
        errors |= {f"d{name}": error(a, b) for name, a, b in zip(given, got, true, strict=True)}
    bad = {name: e for name, e in errors.items() if e > (backward if name.startswith("d") else forward)}
    assert not bad, f"errors above {forward}, {backward}: {bad}"


@pytest.fixture
def delta() -> SimpleNamespace:
    """The functions above."""
    return SimpleNamespace(
        recurrence=recurrence,
        truth=op_truth,
        inputs=inputs,
        call=call,
        compare=compare,
        error=error,
        tolerance=TOLERANCE,
    )
