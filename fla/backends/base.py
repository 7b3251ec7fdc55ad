# SPDX-License-Identifier: MIT
"""What a backend is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fla import settings
from fla.backends import devices
from fla.backends.facts import Capability, Rejection


class BaseBackend:
    """Implementations of some functions of some operations, by another package.

    A subclass has one method per function it takes over, of the function's name and with its parameters, and may have
    ``<name>_verifier`` with the same parameters, which returns True, ``(True, None)`` or ``(False, reason)`` with a
    text or a :class:`Rejection`. A verifier is cheap, gives the same answer for the same call and changes nothing.
    ``<name>_fwd`` and ``<name>_bwd`` together make a backend usable for training under torch.compile.

    Attributes:
        backend_type: name of the backend, one per operation.
        package_name: module that must be importable; looked for, never imported by core.
        requires: distributions with version ranges (PEP 508), all installed.
        env_var: boolean variable that turns the backend on or off.
        default_enable: on or off where nobody says.
        priority: lower runs first; ties go by name.
        capability: what it supports, as data (checked before the verifier, once per static signature).
        operations: names of the operations, for a class that is itself the value of an entry point.
        override: replace a backend of the same type that another distribution registered.
    """

    backend_type: str = "base"
    package_name: str | None = None
    requires: tuple[str, ...] = ()
    env_var: str | None = None
    default_enable: bool = True
    priority: int = 5
    capability: Capability | None = None
    operations: tuple[str, ...] = ()
    override: bool = False

    #: Set by the decorator form of ``register``: one function that stands for the method, and its verifier.
    implementation: Callable[..., Any] | None = None
    verifier: Callable[..., Any] | None = None

    def __init__(self, *, env_var: str | None = None) -> None:
        if env_var is not None:
            self.env_var = env_var

    def __repr__(self) -> str:
        return f"<{type(self).__name__} backend_type={self.backend_type!r} priority={self.priority}>"

    @classmethod
    def is_available(cls) -> bool:
        """Whether the package is there. Override it for more; it must not import the package."""
        return cls.package_name is None or devices.has_module(cls.package_name)

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Asked where :meth:`is_available` says no: what is missing, in a sentence. None leaves it to the framework."""
        return None

    def is_enabled(self) -> bool:
        """What the backend's own variable says, else ``default_enable``."""
        chosen = own_switch(self)
        return self.default_enable if chosen is None else chosen[0]

    def can_use(self) -> bool:
        return self.is_available() and self.is_enabled()

    def probe(self) -> Any:
        """A one-time proof that the package works on this machine, run before the first call that would use it.

        Return nothing or True when it does; return False, ``(False, reason)`` or raise when it does not.
        """
        return None

    def verify(self, function: str, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        """Answer of the verifier of ``function``; no verifier accepts."""
        verifier = self.get_verifier(function)
        return (True, None) if verifier is None else read_answer(verifier(*args, **kwargs))

    def get_verifier(self, function: str) -> Callable[..., Any] | None:
        return self.verifier if self.verifier is not None else getattr(self, f"{function}_verifier", None)

    def get_implementation(self, function: str) -> Callable[..., Any] | None:
        """The callable that takes over ``function``, or None."""
        return self.implementation if self.implementation is not None else getattr(self, function, None)


def own_switch(backend: BaseBackend) -> tuple[bool, str] | None:
    """What somebody chose for the backend's own variable and where (context, set, environment); None: nobody did."""
    if not backend.env_var:
        return None
    settings.register_variable(
        backend.env_var,
        default=backend.default_enable,
        meaning=f"The {backend.backend_type} backend on or off.",
        owner=backend.backend_type,
    )
    return settings.explicit(backend.env_var)


def read_answer(answer: Any) -> tuple[bool, Any]:
    """What a verifier returned, as ``(accepted, reason)``.

    Raises:
        TypeError: it returned something else.
    """
    if answer is True:
        return True, None
    if answer is False:
        return False, "its verifier gave no reason"
    if isinstance(answer, Rejection):
        return False, answer
    if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], bool):
        accepted, reason = answer
        if accepted or reason is None:
            return accepted, None if accepted else "its verifier gave no reason"
        return False, reason if isinstance(reason, Rejection) else str(reason)
    raise TypeError(f"a verifier returns a bool, a Rejection or (bool, reason), got {answer!r}")


class TileLangBackend(BaseBackend):
    """Base of backends in TileLang, which needs nvcc at the first call of each kernel."""

    backend_type = "tilelang"
    package_name = "tilelang"
    env_var = "FLA_TILELANG"

    @classmethod
    def is_available(cls) -> bool:
        return super().is_available() and devices.has_usable_nvcc()

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Which of the two is missing."""
        if not super().is_available():
            return f"module {cls.package_name} is not installed"
        return None if devices.has_usable_nvcc() else "no usable nvcc (CUDA_HOME, PATH, nvidia-cuda-nvcc)"


class GluonBackend(BaseBackend):
    """Base of backends in Triton's Gluon dialect; NVIDIA only, off unless ``FLA_GLUON`` says otherwise."""

    backend_type = "gluon"
    package_name = "triton.experimental.gluon"
    env_var = "FLA_GLUON"
    default_enable = False
    capability = Capability(device_types=("cuda",), compute_capability=(8, 0))


class TritonAscendBackend(BaseBackend):
    """Base of backends for Ascend NPUs through triton-ascend."""

    backend_type = "triton_ascend"
    package_name = "torch_npu"
    env_var = "FLA_ASCEND"
    priority = 0
    capability = Capability(device_types=("npu",))
