# SPDX-License-Identifier: MIT
"""The Triton path of an op in core: imported at the first call that it could take."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import Signature
from typing import Any

from fla import settings
from fla.backends import devices
from fla.backends.errors import SignatureMismatch
from fla.backends.facts import Capability, Facts, Rejection
from fla.backends.signature import argument_text, bind_callable, positional

#: Devices whose launches take fewer programs than core's may have: Triton runs there through a plugin that cuts calls.
PLUGIN_ONLY = {"npu": "fla-backend-ascend"}


def _negated(values: Iterable[Any], tensor: type) -> bool:
    """Whether the memory of a tensor among ``values``, or in one that holds several, has the opposite of it."""
    for x in values:
        if isinstance(x, tensor):
            if x.is_neg():  # type: ignore[attr-defined]
                return True
        elif (type(x) is tuple or type(x) is list) and _negated(x, tensor):
            return True
    return False


def _resolved(x: Any, tensor: type) -> Any:
    if type(x) is tuple or type(x) is list:
        return type(x)(_resolved(y, tensor) for y in x)
    return x.resolve_neg() if isinstance(x, tensor) else x  # type: ignore[attr-defined]


def _on_memory(function: Callable[..., Any], inplace: bool) -> Callable[..., Any]:
    """``function`` for what runs kernels: they read memory, and know of no bit that torch keeps beside it."""
    from torch import Tensor

    def call(*args: Any, **kwargs: Any) -> Any:
        if _negated(args, Tensor) or (kwargs and _negated(kwargs.values(), Tensor)):
            if inplace:
                raise ValueError("an op that writes into its arguments takes no view with the negative bit")
            args = _resolved(args, Tensor)
            kwargs = {name: _resolved(x, Tensor) for name, x in kwargs.items()}
        return function(*args, **kwargs)

    return call


class TritonPath:
    """``module:function`` with the op's parameters, and what it covers.

    ``verify`` takes the op's arguments in order and answers as a backend's verifier does; None accepts.
    """

    def __init__(
        self,
        where: str,
        signature: Signature,
        capability: Capability | None,
        verify: Callable[..., Any] | None,
        inplace: bool = False,
    ) -> None:
        if where.count(":") != 1:
            raise ValueError(f"triton must be 'module:function', got {where!r}")
        self.where, self.signature = where, signature
        self.capability, self.verify, self.inplace = capability, verify, inplace
        self._loaded: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        self._failure: Rejection | None = None

    def refuses(self, facts: Facts) -> bool:
        """Whether calls of these facts are refused, whatever is not among them. Imports nothing."""
        kind = getattr(facts.device, "type", None)
        if kind in PLUGIN_ONLY or not devices.has_triton_driver(kind):
            return True
        return self.capability is not None and self.capability.check(facts) is not None

    def refusal(self, facts: Facts, *, pinned: bool) -> Rejection | None:
        """Why calls of these facts cannot be taken. Pinned, tensors of the CPU can under the interpreter."""
        device_type = getattr(facts.device, "type", None)
        if device_type in PLUGIN_ONLY:
            return Rejection(
                "unavailable", f"on {device_type} Triton needs {PLUGIN_ONLY[device_type]}, which cuts launches"
            )
        interpreted = pinned and device_type == "cpu" and devices.triton_interprets()
        if not interpreted and not devices.has_triton_driver(device_type):
            return Rejection("unavailable", f"no Triton driver for {device_type}")
        if self.capability is not None:
            stated = self.capability
            if interpreted:
                stated = replace(stated, device_types=None, compute_capability=None)
            refusal = stated.check(facts)
            if refusal is not None:
                return refusal
        return self._load()

    def _load(self) -> Rejection | None:
        if self._loaded is None and self._failure is None:
            try:
                self._loaded = self._import()
            except Exception as error:
                if settings.get("FLA_BACKEND_STRICT"):
                    raise
                self._failure = Rejection("error", f"{self.where} cannot be used: {type(error).__name__}: {error}")
                settings.warn_once("triton path", self.where, f"{self._failure}; PyTorch runs instead", RuntimeWarning)
        return self._failure

    def _import(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        module, _, name = self.where.partition(":")
        target = getattr(importlib.import_module(module), name)
        binding = bind_callable(self.signature, target, self.where)
        if binding.missing:
            raise SignatureMismatch(f"{self.where} lacks {', '.join(binding.missing)}")
        in_order = positional(self.signature, target, binding)
        # Generated code calls it as it calls the op; only another order or kind of parameters needs an adapter.
        like_the_op = target if binding.text == argument_text(self.signature) else self._like_the_op(in_order)
        return _on_memory(like_the_op, self.inplace), _on_memory(in_order, self.inplace)

    def _like_the_op(self, in_order: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = self.signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return in_order(*bound.arguments.values())

        return call

    @property
    def function(self) -> Callable[..., Any]:
        """Called like the op. Only after :meth:`refusal` has said None."""
        assert self._loaded is not None
        return self._loaded[0]

    @property
    def body(self) -> Callable[..., Any]:
        """Called with the op's arguments in order. Only after :meth:`refusal` has said None."""
        assert self._loaded is not None
        return self._loaded[1]

    def forget(self) -> None:
        """Try again after a failed import."""
        self._failure = None
