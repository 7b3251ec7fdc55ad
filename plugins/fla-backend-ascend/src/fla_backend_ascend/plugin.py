# SPDX-License-Identifier: MIT
"""The backend `triton_ascend`: core's own Triton kernels on Ascend NPUs, under a launch policy for their buffers.

Nothing here imports torch_npu. The functions it takes over are core's, with core's parameters: an implementation is
made when a function is first asked for, from the op's signature and its Triton path.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from fla.backends import Capability, TritonAscendBackend, devices, hookimpl

#: Functions of each operation, chunked and token by token.
COVERED = {
    "kda": ("chunk_kda", "fused_recurrent_kda"),
    "gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "gla": ("chunk_gla", "fused_recurrent_gla"),
    "simple_gla": ("chunk_simple_gla", "fused_recurrent_simple_gla"),
}
VERIFIER = "_verifier"
MAX_HEAD_DIM = 256
#: K of kda in float32, and in float16, whose calls have a form in float32 for what float16 does not hold: the tiles of
#: its scans do not fit a unified buffer of 192 KiB beyond.
MAX_WIDE_K = 128

Answer = tuple[bool, str | None]


class Ascend(TritonAscendBackend):
    """Core's kernels for one operation on `npu` devices, forward and backward."""

    operations = tuple(COVERED)
    capability = Capability(device_types=("npu",), dtypes=("float16", "bfloat16", "float32"))

    def __init__(self, operation: str = "kda") -> None:
        super().__init__()
        self.operation = operation

    @classmethod
    def is_available(cls) -> bool:
        return cls.unavailable_reason() is None

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """What is missing, in a sentence."""
        if not devices.has_module("torch_npu"):
            return "module torch_npu is not installed; see the pages of CANN for the version that fits yours"
        if not devices.has_module("triton"):
            return "module triton is not installed; pip install triton-ascend"
        return None if "npu" in devices.accelerators() else "there is no NPU"

    def probe(self) -> tuple[bool, str | None]:
        """Small calls of every function, compared with PyTorch on the CPU, once."""
        import torch

        from fla_backend_ascend.proof import proof

        if not devices.has_triton_driver("npu"):
            return False, "triton has no driver for NPUs; pip install triton-ascend"
        npu = getattr(torch, "npu")  # noqa: B009  # torch_npu puts it there
        if getattr(npu, "is_current_stream_capturing", lambda: False)():
            return False, "its first call came under capture of a graph; call the op once before"
        for function in COVERED[self.operation]:
            answer = proof(
                _op(self.operation, function), getattr(self, function), torch.device("npu", npu.current_device())
            )
            if not answer[0]:
                return answer
        return True, None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = self.__dict__.get("operation")
        function = name.removesuffix(VERIFIER)
        if operation is None or function not in COVERED[operation]:
            raise AttributeError(name)
        made = (_verifier if name.endswith(VERIFIER) else _implementation)(operation, function)
        setattr(self, name, made)
        return made


def _op(operation: str, function: str) -> Any:
    return getattr(importlib.import_module(f"fla.ops.{operation}"), function).op


def _implementation(operation: str, function: str) -> Callable[..., Any]:
    op = _op(operation, function)

    def run(*values: Any, **named: Any) -> Any:
        from fla_backend_ascend.heads import in_parts

        _describe()
        bound = op.signature.bind(*values, **named)
        bound.apply_defaults()
        with surroundings(bound.arguments["q"]):
            return in_parts(core_path(op), dict(bound.arguments))

    run.__signature__ = op.signature  # type: ignore[attr-defined]
    run.__name__ = function
    return run


@contextlib.contextmanager
def surroundings(q: Any) -> Iterator[None]:
    """The device of `q` as the current one, and autocast off. Core sees to both on devices that it knows."""
    import torch

    if q.device.type != "npu":
        yield
        return
    with getattr(torch, "npu").device(q.device), torch.autocast("npu", enabled=False):  # noqa: B009
        yield


def _describe() -> None:
    """Core asks this plugin about NPUs from now on; in the backward pass too, so it is not taken back."""
    from fla.ops._common import policy
    from fla.ops._common.launch import Launcher
    from fla_backend_ascend import chips

    policy.describe_chip("npu", chips.chip_of)
    if "npu" in devices.accelerators():
        # Core's short way from a compiled kernel to its launch is written against NVIDIA's and AMD's launchers.
        Launcher.remember = False


def core_path(op: Any) -> Callable[..., Any]:
    """Core's Triton implementation of an op."""
    module, _, name = op.triton_path.where.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _verifier(operation: str, function: str) -> Callable[..., Any]:
    op = _op(operation, function)

    def verify(*values: Any, **named: Any) -> Answer:
        bound = op.signature.bind(*values, **named)
        bound.apply_defaults()
        q = bound.arguments["q"]
        if operation == "kda" and str(q.dtype) != "torch.bfloat16" and q.shape[-1] > MAX_WIDE_K:
            kind = str(q.dtype).removeprefix("torch.")
            return False, f"K may be up to {MAX_WIDE_K} in {kind} (unified buffer), got {q.shape[-1]}"
        answer = accepts(bound.arguments)
        covers = op.triton_path.verify
        # What core's kernels do not cover they do not cover here.
        return answer if covers is None or not answer[0] else covers(*bound.arguments.values())

    verify.__signature__ = op.signature  # type: ignore[attr-defined]
    return verify


def accepts(arguments: Any) -> Answer:
    """Whether the kernels take a call on an NPU, and why not. The rest runs in PyTorch."""
    from fla_backend_ascend.chips import GRID_LIMIT
    from fla_backend_ascend.heads import at_once

    q, v = arguments["q"], arguments["v"]
    if 0 in q.shape or 0 in v.shape:
        return False, "there is nothing to launch for axes of no length"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM:
        return False, f"K and V may be up to {MAX_HEAD_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
    for name in ("ssm_state_indices", "num_accepted_tokens", "inplace_final_state", "out", "cp_context"):
        given = arguments.get(name)
        if given is not None and given is not False:
            return False, f"{name} is given: not supported on NPUs"
    B, T, H, K = q.shape
    cu = arguments.get("cu_seqlens")
    sequences = B if cu is None else cu.shape[0] - 1
    if not at_once(B * T, sequences, K, v.shape[-1], v.shape[2] // H):
        return False, f"one head takes more than the {GRID_LIMIT} programs of a launch"
    return True, None


@hookimpl
def register_backends(registry: Any) -> None:
    for operation in COVERED:
        registry.register(operation, Ascend(operation))
