# SPDX-License-Identifier: MIT
"""Static facts of a call, and what a backend declares about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fla.backends import devices

#: Why a backend does not run. ``slower`` is a matter of taste and is overruled by a pin; the others are not.
CODES = ("unavailable", "disabled", "unsupported", "slower", "error")


@dataclass(frozen=True)
class Rejection:
    """Why a backend does not take a call. ``code`` is one of :data:`CODES`; ``text`` says it to a person.

    A verifier returns ``(False, Rejection("slower", "core is faster below 4096 tokens (H200, core 1.0)"))``.
    """

    code: str
    text: str

    def __post_init__(self) -> None:
        if self.code not in CODES:
            raise ValueError(f"code must be one of {', '.join(CODES)}, got {self.code!r}")

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class CallFacts:
    """Names of the parameters from which a call's static facts are read (the framework knows no op).

    ``tensors`` are those whose dtypes count (the first one also gives the device), ``key`` and ``value`` those whose
    last dimension is K and V and whose dimension ``heads_dim`` counts heads. A name that the op lacks is passed over.
    """

    tensors: tuple[str, ...] = ("q", "k", "v")
    key: str | None = "k"
    value: str | None = "v"
    heads_dim: int = 2
    initial_state: str | None = "initial_state"
    state_v_first: str | None = "state_v_first"
    cu_seqlens: str | None = "cu_seqlens"

    def restricted(self, names: Iterable[str]) -> CallFacts:
        """The same facts without parameters that the op does not have."""
        known = set(names)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("key", "value", "initial_state", "state_v_first", "cu_seqlens"):
            values[name] = values[name] if values[name] in known else None
        values["tensors"] = tuple(name for name in self.tensors if name in known)
        return CallFacts(**values)

    def read(self, arguments: Mapping[str, Any], *, backward: bool) -> Facts:
        """Facts of one call. What cannot be read off an argument is None."""

        def argument(name: str | None) -> Any:
            return None if name is None else arguments.get(name)

        def size(name: str | None, dim: int) -> int | None:
            shape = getattr(argument(name), "shape", None)
            return int(shape[dim]) if shape is not None and -len(shape) <= dim < len(shape) else None

        tensors = [argument(name) for name in self.tensors]
        device = next((x.device for x in tensors if getattr(x, "device", None) is not None), None)
        heads, value_heads = size(self.key, self.heads_dim), size(self.value, self.heads_dim)
        return Facts(
            device=device,
            dtypes=tuple(
                (name, str(x.dtype).removeprefix("torch."))
                for name, x in zip(self.tensors, tensors, strict=True)
                if getattr(x, "dtype", None) is not None
            ),
            key_dim=size(self.key, -1),
            value_dim=size(self.value, -1),
            gva=None if heads is None or value_heads is None else heads != value_heads,
            varlen=argument(self.cu_seqlens) is not None,
            initial_state=argument(self.initial_state) is not None,
            state_v_first=bool(argument(self.state_v_first)),
            backward=backward,
        )


@dataclass(frozen=True)
class Facts:
    """What a capability is compared with. ``gva``: value and key heads differ. ``backward``: a gradient is due.

    No capability objects to a fact that is None or False, so facts may be left out.
    """

    device: Any
    dtypes: tuple[tuple[str, str], ...]
    key_dim: int | None
    value_dim: int | None
    gva: bool | None
    varlen: bool
    initial_state: bool
    state_v_first: bool | None
    backward: bool

    def device_alone(self) -> Facts:
        return Facts(self.device, (), None, None, None, False, False, None, False)

    def cheap(self) -> Facts:
        """What is read fast: the device, the first dtype, K and V."""
        return replace(self.device_alone(), dtypes=self.dtypes[:1], key_dim=self.key_dim, value_dim=self.value_dim)


@dataclass(frozen=True)
class Capability:
    """What a backend can do, as data. None means: anything. Checked once per static signature, before the verifier.

    Args:
        device_types: torch device types, ``("cuda",)``.
        compute_capability: least NVIDIA compute capability, ``(9, 0)``.
        dtypes: names of the dtypes that q, k and v may have, ``("bfloat16",)``.
        head_dims: pairs ``(K, V)``.
        gva: more value heads than key heads.
        varlen: packed sequences (``cu_seqlens`` given).
        initial_state: an initial state given.
        state_layouts: of ``"k_first"`` (``[N, H, K, V]``) and ``"v_first"``.
        backward: calls whose result needs a gradient.
    """

    device_types: tuple[str, ...] | None = None
    compute_capability: tuple[int, int] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[tuple[int, int], ...] | None = None
    gva: bool | None = None
    varlen: bool | None = None
    initial_state: bool | None = None
    state_layouts: tuple[str, ...] | None = None
    backward: bool | None = None

    def __post_init__(self) -> None:
        for name in ("device_types", "dtypes", "head_dims", "state_layouts"):
            value = getattr(self, name)
            if isinstance(value, str) or (value is not None and not isinstance(value, tuple | list | frozenset | set)):
                raise ValueError(f"Capability.{name} must be a tuple, got {value!r}")
        for layout in self.state_layouts or ():
            if layout not in ("k_first", "v_first"):
                raise ValueError(f"Capability.state_layouts takes 'k_first' and 'v_first', got {layout!r}")
        for pair in self.head_dims or ():
            if not _is_pair(pair):
                raise ValueError(f"Capability.head_dims takes pairs (K, V), got {pair!r}")
        if self.compute_capability is not None and not _is_pair(self.compute_capability):
            raise ValueError(f"Capability.compute_capability must be like (9, 0), got {self.compute_capability!r}")
        for name in ("gva", "varlen", "initial_state", "backward"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"Capability.{name} must be True, False or None, got {getattr(self, name)!r}")

    def check(self, facts: Facts) -> Rejection | None:
        """The first thing that the call asks for and that is not declared, or None."""
        reason = next(self._objections(facts), None)
        return None if reason is None else Rejection("unsupported", reason)

    def _objections(self, facts: Facts) -> Iterator[str]:
        device_type = getattr(facts.device, "type", None)
        if self.device_types is not None and device_type is not None and device_type not in self.device_types:
            yield f"device is {device_type}, supported: {_listed(self.device_types)}"
        if self.compute_capability is not None and device_type is not None:
            yield from devices.compute_capability_objections(facts.device, tuple(self.compute_capability))
        if self.dtypes is not None:
            for name, dtype in facts.dtypes:
                if dtype not in {str(known).removeprefix("torch.") for known in self.dtypes}:
                    yield f"{name} is {dtype}, supported: {_listed(self.dtypes)}"
        dims = (facts.key_dim, facts.value_dim)
        if self.head_dims is not None and None not in dims and dims not in {tuple(pair) for pair in self.head_dims}:
            yield f"head dimensions (K, V) are {dims}, supported: {_listed(self.head_dims)}"
        if self.gva is False and facts.gva:
            yield "more value heads than key heads (GVA) is not supported"
        if self.varlen is False and facts.varlen:
            yield "packed sequences (cu_seqlens) are not supported"
        if self.initial_state is False and facts.initial_state:
            yield "an initial state is not supported"
        layout = "v_first" if facts.state_v_first else "k_first"
        if self.state_layouts is not None and facts.state_v_first is not None and layout not in self.state_layouts:
            yield f"state layout is {layout}, supported: {_listed(self.state_layouts)}"
        if self.backward is False and facts.backward:
            yield "a gradient is needed and only the forward is supported"


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(item, int) for item in value)


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(str(value).removeprefix("torch.") for value in values)


def needs_backward(arguments: Any) -> bool:
    """Whether a gradient can be asked for: grad mode is on and a tensor in ``arguments`` requires one.

    Args:
        arguments: a tensor, or a mapping or sequence of arguments, nested as deep as you like.
    """
    return devices.is_grad_enabled() and _requires_grad(arguments)


def lost_gradient(result: Any) -> bool:
    """Whether there are tensors in ``result`` and none of them takes part in autograd. Empty tensors say nothing."""
    found = [value for value in _leaves(result) if hasattr(value, "requires_grad") and value.numel()]
    return bool(found) and not any(value.requires_grad for value in found)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _requires_grad(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_requires_grad(item) for item in value.values())
    if isinstance(value, tuple | list):
        return any(_requires_grad(item) for item in value)
    return getattr(value, "requires_grad", False) is True
