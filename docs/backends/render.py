# SPDX-License-Identifier: MIT
"""Writes the tables of the plugin pages from the code: `python docs/backends/render.py`. A test compares them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fla.backends import BaseBackend, Capability, needs_backward

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BEGIN, END = "<!-- rendered by render.py -->", "<!-- end of the rendered part -->"


@dataclass(frozen=True)
class Page:
    """One plugin: its sources, its backend, and calls of the op that it is asked about (nothing is run)."""

    name: str
    source: str
    backend: str
    function: str
    call: Mapping[str, Any]
    changes: tuple[tuple[str, Mapping[str, Any]], ...]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", **options)


_KDA = {
    **{name: meta(1, 64, 2, 128) for name in "qkvg"},
    "beta": meta(1, 64, 2),
    **{f"use_{name}_in_kernel": True for name in ("gate", "qk_l2norm", "beta_sigmoid")},
    "lower_bound": -5.0,
    "A_log": meta(2, dtype=torch.float32),
    "dt_bias": meta(256, dtype=torch.float32),
}

_READY = {"use_gate_in_kernel": False, "lower_bound": None, "A_log": None, "dt_bias": None, "safe_gate": True}
_IN_KERNEL = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
_GDN = {
    **{name: meta(1, 64, 2, 128) for name in "qkv"},
    "g": meta(1, 64, 2, dtype=torch.float32),
    "beta": meta(1, 64, 2),
}

PAGES = (
    Page(
        "flashkda",
        "plugins/fla-backend-flashkda/src",
        "fla_backend_flashkda.plugin:FlashKDA",
        "fla.ops.kda:chunk_kda",
        _KDA,
        (
            ("all in the kernel, `lower_bound=-5.0`", {}),
            ("`dt_bias=None`", {"dt_bias": None}),
            ("`A_log=None`", {"A_log": None}),
            ("`cu_seqlens` given", {"cu_seqlens": meta(3, dtype=torch.int32)}),
            ("`initial_state` given", {"initial_state": meta(1, 2, 128, 128)}),
            ("`state_v_first=True`", {"state_v_first": True}),
            ("an input requires a gradient", {"A_log": meta(2, dtype=torch.float32, requires_grad=True)}),
            ("float16", {name: meta(1, 64, 2, 128, dtype=torch.float16) for name in "qkv"}),
            ("K = V = 64", {name: meta(1, 64, 2, 64) for name in "qkvg"}),
            ("twice as many value heads", {"v": meta(1, 64, 4, 128)}),
            ("float32 `g`", {"g": meta(1, 64, 2, 128, dtype=torch.float32)}),
            ("float32 `beta`", {"beta": meta(1, 64, 2, dtype=torch.float32)}),
            ("`use_gate_in_kernel=False`", {"use_gate_in_kernel": False}),
            ("`use_qk_l2norm_in_kernel=False`", {"use_qk_l2norm_in_kernel": False}),
            ("`use_beta_sigmoid_in_kernel=False`", {"use_beta_sigmoid_in_kernel": False}),
            ("`lower_bound=None`", {"lower_bound": None}),
            ("`lower_bound=-8.0`", {"lower_bound": -8.0}),
            ("`allow_neg_eigval=True`", {"allow_neg_eigval": True}),
            ("`return_intermediate_states=True`", {"return_intermediate_states": True}),
            ("`use_graph=True`", {"use_graph": True}),
            ("`cp_context` given", {"cp_context": object()}),
        ),
    ),
    Page(
        "tilelang",
        "plugins/fla-backend-tilelang/src",
        "fla_backend_tilelang.plugin:GatedDeltaRule",
        "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
        _GDN,
        (
            ("nothing in the kernel", {}),
            ("`use_qk_l2norm_in_kernel=True`", {"use_qk_l2norm_in_kernel": True}),
            ("gate and sigmoid in the kernel", {**_IN_KERNEL, "A_log": meta(2, dtype=torch.float32)}),
            ("`cu_seqlens` given", {"cu_seqlens": meta(3, dtype=torch.int32)}),
            ("`initial_state` given", {"initial_state": meta(1, 2, 128, 128)}),
            ("`state_v_first=True`", {"state_v_first": True}),
            ("an input requires a gradient", {"beta": meta(1, 64, 2, requires_grad=True)}),
            ("float16", {n: meta(1, 64, 2, 128, dtype=torch.float16) for n in "qkv"} | {"beta": _GDN["g"]}),
            ("float32", {n: meta(1, 64, 2, 128, dtype=torch.float32) for n in "qkv"}),
            ("K = V = 64", {n: meta(1, 64, 2, 64) for n in "qkv"}),
            ("K = V = 256", {n: meta(1, 64, 2, 256) for n in "qkv"}),
            ("twice as many value heads", {"v": meta(1, 64, 4, 128), "g": meta(1, 64, 4), "beta": meta(1, 64, 4)}),
            ("`cp_context` given", {"cp_context": object()}),
        ),
    ),
    Page(
        "tilelang-kda",
        "plugins/fla-backend-tilelang/src",
        "fla_backend_tilelang.plugin:KDA",
        "fla.ops.kda:chunk_kda",
        _KDA,
        (
            ("all in the kernel, `lower_bound=-5.0`", {}),
            ("`lower_bound=None`", {"lower_bound": None}),
            ("`lower_bound=-8.0`", {"lower_bound": -8.0}),
            ("log decays, `safe_gate=True`", _READY),
            ("log decays, `safe_gate=False`", {**_READY, "safe_gate": False}),
            ("`cu_seqlens` given", {"cu_seqlens": meta(3, dtype=torch.int32)}),
            ("`initial_state` given", {"initial_state": meta(1, 2, 128, 128)}),
            ("an input requires a gradient", {"A_log": meta(2, dtype=torch.float32, requires_grad=True)}),
            ("K = V = 64", {n: meta(1, 64, 2, 64) for n in "qkvg"} | {"dt_bias": None}),
            ("float32 `g` and `beta`", {"g": meta(1, 64, 2, 128, dtype=torch.float32), "beta": _GDN["g"]}),
            ("`return_intermediate_states=True`", {"return_intermediate_states": True}),
            ("`use_graph=True`", {"use_graph": True}),
            ("`cp_context` given", {"cp_context": object()}),
        ),
    ),
    Page(
        "ascend",
        "plugins/fla-backend-ascend/src",
        "fla_backend_ascend.plugin:Ascend",
        "fla.ops.kda:chunk_kda",
        _KDA,
        (
            ("all in the kernel, `lower_bound=-5.0`", {}),
            ("log decays", _READY | {"safe_gate": False}),
            ("`cu_seqlens` given", {"cu_seqlens": meta(3, dtype=torch.int32)}),
            ("`initial_state` given", {"initial_state": meta(1, 2, 128, 128)}),
            ("an input requires a gradient", {"A_log": meta(2, dtype=torch.float32, requires_grad=True)}),
            ("float32", {n: meta(1, 64, 2, 128, dtype=torch.float32) for n in "qkvg"}),
            ("K = V = 256", {n: meta(1, 64, 2, 256) for n in "qkvg"} | {"dt_bias": None}),
            ("K = V = 512", {n: meta(1, 64, 2, 512) for n in "qkvg"} | {"dt_bias": None}),
            (
                "float32, K = V = 256",
                {n: meta(1, 64, 2, 256, dtype=torch.float32) for n in "qkvg"} | {"dt_bias": None},
            ),
            ("no tokens", {n: meta(1, 0, 2, 128) for n in "qkvg"} | {"beta": meta(1, 0, 2)}),
            ("`cp_context` given", {"cp_context": object()}),
        ),
    ),
)


def load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def render(page: Page) -> str:
    """The tables of one page."""
    if str(ROOT / page.source) not in sys.path:
        sys.path.insert(0, str(ROOT / page.source))
    backend: BaseBackend = load(page.backend)()
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in _attributes(page, backend))]
    lines += ["", "| call | answer |", "|---|---|"]
    lines += [f"| {name} | {_answer(page, backend, {**page.call, **change})} |" for name, change in page.changes]
    return "\n".join(lines) + "\n"


def _attributes(page: Page, backend: BaseBackend) -> Iterator[tuple[str, str]]:
    yield "backend", f"`{backend.backend_type}`"
    yield "takes over", f"`{page.function.replace(':', '.')}`"
    yield "needs", ", ".join(f"`{x}`" for x in (backend.package_name, *backend.requires) if x) or "nothing"
    yield "variable", f"`{backend.env_var}`, {'on' if backend.default_enable else 'off'} by default"
    yield "priority", str(backend.priority)
    capability = backend.capability or Capability()
    for field in fields(capability):
        value = getattr(capability, field.name)
        if value is None:
            text = "any"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif field.name == "compute_capability":
            text = f"{value[0]}.{value[1]} or later"
        else:
            text = ", ".join(f"({', '.join(map(str, x))})" if isinstance(x, tuple) else f"`{x}`" for x in value)
        yield f"`{field.name}`", text


def _answer(page: Page, backend: BaseBackend, call: Mapping[str, Any]) -> str:
    """What capability and verifier say to a call on a device that will do."""
    op = load(page.function).op
    bound = op.signature.bind(**call)
    bound.apply_defaults()
    values = tuple(bound.arguments.values())
    facts = op.read_facts(values, backward=needs_backward(values))
    if backend.capability is not None:
        refusal = replace(backend.capability, device_types=None, compute_capability=None).check(facts)
        if refusal is not None:
            return refusal.text
    from fla.backends.signature import bind_callable, positional

    verifier = backend.get_verifier(op.name)
    if verifier is None:
        return "**accepted**"
    accepted, reason = positional(op.signature, verifier, bind_callable(op.signature, verifier, "verifier"))(*values)
    # What is slower depends on the card; the page is about what can be computed.
    return "**accepted**" if accepted or getattr(reason, "code", None) == "slower" else str(reason)


def written(page: Page) -> tuple[Path, str, str]:
    """The file of a page, its text, and the text that it should have."""
    path = HERE / f"{page.name}.md"
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return path, text, f"{before}{BEGIN}\n\n{render(page)}\n{END}{after}"


if __name__ == "__main__":
    for page in PAGES:
        path, _, wanted = written(page)
        path.write_text(wanted, encoding="utf-8")
