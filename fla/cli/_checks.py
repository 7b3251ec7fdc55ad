# SPDX-License-Identifier: MIT
"""What `fla smoke` runs: every op against a slow form of itself, every model family at a tiny size."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from fla.backends import last_decision
from fla.cli._arguments import build_arguments, parse_shape
from fla.cli._families import small_config
from fla.models._index import FAMILIES
from fla.models._index import Entry as FamilyEntry

# RMS ratio against float64, forward and gradients.
_TOLERANCE = {"float64": (1e-9, 1e-8), "float32": (1e-4, 1e-3), "float16": (5e-3, 1e-2), "bfloat16": (1e-2, 2e-2)}


class Skip(Exception):
    """A step that does not apply here; the text says why."""


class Mismatch(Exception):
    """A result is not what it must be."""


@dataclass
class Result:
    """Outcome of one item: `ok`, `skip` or `fail`, and the steps that passed."""

    item: str
    status: str = "ok"
    steps: list[str] = field(default_factory=list)
    detail: str = ""
    backend: str | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Step = tuple[str, Callable[[], str | None]]


def run_steps(item: str, steps: Iterator[Step]) -> Result:
    """Run the steps of an item in order; the first that fails ends it. A step may return a remark."""
    result = Result(item)
    start = time.perf_counter()
    name = "set up"
    try:
        for name, step in steps:
            remark = step()
            result.steps.append(name)
            if remark:
                result.detail = f"{result.detail}; {remark}" if result.detail else remark
    except Skip as reason:
        result.status, result.detail = "skip", str(reason)
    except Mismatch as error:
        result.status, result.detail = "fail", f"{name}: {error}"
    except Exception as error:  # whatever an item raises is its result
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        result.status, result.detail = "fail", f"{name}: {text}"
    result.seconds = round(time.perf_counter() - start, 3)
    return result


# Ops. The slow form runs in float64 on the CPU: `fused_recurrent_*`, token by token.


@dataclass(frozen=True)
class OpCase:
    """How to call the two forms of an op: arguments of both, and a parameter the slow one calls otherwise."""

    fast: str
    slow: str
    values: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ("initial_state",)
    renamed: dict[str, str] = field(default_factory=dict)


_NORM = {"use_qk_l2norm_in_kernel": True}
OPS: dict[str, OpCase] = {
    "kda": OpCase("chunk_kda", "fused_recurrent_kda", _NORM),
    "gated_delta_rule": OpCase("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", _NORM),
    "delta_rule": OpCase("chunk_delta_rule", "fused_recurrent_delta_rule", _NORM),
    "comba": OpCase("chunk_comba", "fused_recurrent_comba", _NORM, tensors=("initial_state", "beta")),
    "gdn2": OpCase("chunk_gdn2", "fused_recurrent_gdn2", _NORM),
    "gsa": OpCase("chunk_gsa", "fused_recurrent_gsa", tensors=("g",)),
    "hgrn": OpCase("chunk_hgrn", "fused_recurrent_hgrn"),
    "gla": OpCase("chunk_gla", "fused_recurrent_gla", renamed={"g": "gk"}),
    "rwkv6": OpCase("chunk_rwkv6", "fused_recurrent_rwkv6"),
    "simple_gla": OpCase("chunk_simple_gla", "fused_recurrent_simple_gla", tensors=("initial_state", "g")),
    "retention": OpCase("chunk_retention", "fused_recurrent_retention"),
    "linear_attn": OpCase("chunk_linear_attn", "fused_recurrent_linear_attn", {"normalize": False}),
    "lightning_attn": OpCase(
        "chunk_lightning_attn", "fused_recurrent_lightning_attn", {"layer_idx": 1, "num_layers": 4}
    ),
}


def op_steps(name: str, device: torch.device, dtype: str) -> Iterator[Step]:
    """Forward and backward of one op, with an initial state, at T=70, H=2, K=V=16."""
    case = OPS[name]
    room = importlib.import_module(f"fla.ops.{name}")
    fast, slow = getattr(room, case.fast), getattr(room, case.slow)
    arguments = _random_arguments(fast, name, case, dtype)
    exact = {n: a.double().requires_grad_() if isinstance(a, Tensor) else a for n, a in arguments.items()}
    ours = {n: a.to(device).requires_grad_() if isinstance(a, Tensor) else a for n, a in arguments.items()}
    outputs: dict[str, list[Tensor]] = {}

    def forward() -> str:
        outputs["ours"] = _results(fast(**ours, output_final_state=True))
        decision = last_decision()
        renamed = {case.renamed.get(n, n): a for n, a in exact.items()}
        outputs["exact"] = _results(slow(**renamed, output_final_state=True))
        for i, (got, want) in enumerate(zip(outputs["ours"], outputs["exact"], strict=True)):
            _compare("final_state" if i else "o", got, want, _TOLERANCE[dtype][0])
        return f"ran on {decision.backend}" if decision is not None else ""

    def backward() -> None:
        for o, *states in outputs.values():
            sum((state.double().cos().sum() for state in states), o.double().sin().sum()).backward()
        for what, tensor in ours.items():
            if isinstance(tensor, Tensor):
                _compare(f"gradient of {what}", tensor.grad, exact[what].grad, _TOLERANCE[dtype][1])

    yield "forward", forward
    yield "backward", backward


def _results(result: tuple[Tensor, Any]) -> list[Tensor]:
    """The output and the state, or states, of a call."""
    o, state = result
    return [o, *state] if isinstance(state, (tuple, list)) else [o, state]


def _random_arguments(function: Callable[..., Any], name: str, case: OpCase, dtype: str) -> dict[str, Any]:
    """Values in the range ops are made for: gates negative, write strengths in (0, 1)."""
    sizes = parse_shape("B1,T70,H2,K16,V16")
    blank = build_arguments(function, name, sizes, dtype=dtype, device="cpu", values=case.values, tensors=case.tensors)
    generator = torch.Generator().manual_seed(0)
    filled = {}
    for parameter, value in blank.items():
        if isinstance(value, Tensor):
            kind = torch.float64 if dtype == "float64" else value.dtype  # a float32 state would round its gradient
            value = torch.randn(value.shape, generator=generator, dtype=torch.float64).to(kind)
            if parameter == "g" or (name, parameter) == ("rwkv6", "w"):
                value = torch.nn.functional.logsigmoid(value)
            elif parameter in ("beta", "b", "w"):
                value = value.sigmoid()
        filled[parameter] = value
    return filled


def _compare(what: str, ours: Tensor | None, exact: Tensor | None, tolerance: float) -> None:
    if ours is None or exact is None:
        raise Mismatch(f"there is no {what}")
    got, want = ours.detach().double().cpu(), exact.detach().double().cpu()
    error = float((got - want).square().mean().sqrt() / (want.square().mean().sqrt() + 1e-8))
    if not error < tolerance:
        raise Mismatch(f"{what} is off by an RMS ratio of {error:.1e}, allowed {tolerance:.0e}")


# Models

_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def model_steps(family: FamilyEntry, device: torch.device, dtype: str) -> Iterator[Step]:
    """Construction, config round trip, forward, backward and generation with the cache."""
    package = importlib.import_module(f"fla.models.{family.package}")
    config_class, model_class = (getattr(package, name) for name in family.names[:2])
    config = small_config(family, **_TINY)
    torch.manual_seed(0)
    made: dict[str, Any] = {}
    tokens = torch.randint(1, 64, (2, 70), generator=torch.Generator().manual_seed(0)).to(device)

    def construct() -> str:
        made["model"] = model_class(config).to(device, getattr(torch, dtype))
        return f"{sum(p.numel() for p in made['model'].parameters()):,} parameters"

    def round_trip() -> None:
        again = config_class.from_dict(config.to_dict())
        if again.to_dict() != config.to_dict():
            raise Mismatch("the configuration changes when it is written and read")

    def forward() -> str:
        made["loss"] = made["model"](input_ids=tokens, labels=tokens).loss
        if not torch.isfinite(made["loss"]):
            raise Mismatch(f"the loss is {made['loss'].item()}")
        decision = last_decision()
        return f"ran on {decision.backend}" if decision is not None else ""

    def backward() -> None:
        made["loss"].backward()
        for name, parameter in made["model"].named_parameters():
            if parameter.grad is None or not torch.isfinite(parameter.grad).all():
                raise Mismatch(f"no finite gradient for {name}")

    def generate() -> None:
        model, prompt = made["model"].eval(), tokens[:, :9]
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 4, "do_sample": False}
        cached = model.generate(prompt, **options, eos_token_id=None)
        plain = model.generate(prompt, **options, eos_token_id=None, use_cache=False)
        if dtype in ("float32", "float64") and not torch.equal(cached, plain):
            raise Mismatch("generation with and without the cache differs")

    yield "construct", construct
    yield "config", round_trip
    yield "forward", forward
    yield "backward", backward
    yield "generate", generate


# All of them


def items() -> list[str]:
    """`ops/<op>` and `models/<model_type>`."""
    return [*(f"ops/{name}" for name in OPS), *(f"models/{family.model_type}" for family in FAMILIES)]


def run_item(item: str, device: torch.device, dtype: str) -> Result:
    """Run one of `items()`."""
    kind, _, name = item.partition("/")
    if kind == "ops":
        return run_steps(item, op_steps(name, device, dtype))
    family = next(f for f in FAMILIES if f.model_type == name)
    return run_steps(item, model_steps(family, device, dtype))
