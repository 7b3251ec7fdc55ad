# SPDX-License-Identifier: MIT
"""Versions of Python, torch, triton and transformers, and what follows from them."""

from __future__ import annotations

import functools
import inspect
import logging
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from fla.utils import facts
from fla.utils.decorators import contiguous

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


@functools.cache
def installed_version(distribution: str) -> Version | None:
    """The installed version of a distribution, without its local part; None where it is absent."""
    try:
        return Version(Version(metadata.version(distribution)).public)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def check_pytorch_version(version_s: str = "2.4") -> bool:
    """Whether torch is at least `version_s`."""
    import torch

    return Version(Version(torch.__version__).base_version) >= Version(version_s)


@functools.cache
def check_transformers_version(version_s: str) -> bool:
    """Whether transformers is installed and at least `version_s`."""
    found = installed_version("transformers")
    return found is not None and found >= Version(version_s)


@functools.cache
def supports_transformers_next_sequence_length() -> bool:
    """Whether generation of the installed transformers passes `next_sequence_length` to models."""
    try:
        from transformers.generation import GenerationMixin
    except ImportError:
        return False
    return "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters


@functools.cache
def _triton() -> Any:
    try:
        import triton
        import triton.language
    except ImportError:
        return None
    return triton


def _triton_at_least(version: str) -> bool:
    triton = _triton()
    return triton is not None and Version(Version(triton.__version__).base_version) >= Version(version)


triton_above_3_4_0 = functools.partial(_triton_at_least, "3.4.0")
triton_above_3_5_1 = functools.partial(_triton_at_least, "3.5.1")
triton_above_3_6_0 = functools.partial(_triton_at_least, "3.6.0")
triton_above_3_7_1 = functools.partial(_triton_at_least, "3.7.1")
triton_above_3_8_0 = functools.partial(_triton_at_least, "3.8.0")


def is_gather_supported() -> bool:
    return hasattr(getattr(_triton(), "language", None), "gather")


def is_tma_supported() -> bool:
    """Whether the device has a tensor memory accelerator and triton can describe tensors to it."""
    device = facts.is_amd_tma_arch() or (facts.is_nvidia() and facts.get_device_capability(0)[0] >= 9)
    return device and hasattr(getattr(_triton(), "language", None), "make_tensor_descriptor")


@functools.cache
def supports_autotune_cache() -> bool:
    triton = _triton()
    return triton is not None and "cache_results" in inspect.signature(triton.autotune).parameters


def autotune_cache_kwargs() -> dict[str, Any]:
    """Keywords that let `triton.autotune` keep its results on disk; empty where it cannot. Core tunes nothing."""
    return {"cache_results": True} if supports_autotune_cache() else {}


@functools.cache
def check_environments() -> None:
    """Log, once, which versions are older than this package is tested with.

    Never called at import. `fla doctor` says more.
    """
    if sys.version_info < (3, 11):
        logger.warning("Python %s: torch.compile works best from 3.11 on", platform.python_version())
    triton = installed_version("triton")
    if triton is not None and triton < Version("3.3.0"):
        logger.warning("triton %s is older than 3.3.0: kernels may not compile", triton)
    if sys.platform == "win32" and installed_version("triton-windows") is None:
        logger.warning("on Windows triton comes as `pip install triton-windows`; without it ops run in PyTorch")


def require_version(version: str, hint: str) -> Callable[[F], F]:
    """Decorator: the function needs a distribution in a version range.

    Checked at the first call; tensor arguments arrive contiguous.

    Args:
        version: a requirement as pip writes it, `transformers>=4.45`; `python>=3.11` speaks of the interpreter.
        hint: what to do, appended to the error.

    Raises:
        ValueError: `version` is no requirement (when decorating).
        ImportError: it is not met (when calling).
    """
    try:
        requirement = Requirement(version)
    except InvalidRequirement as error:
        raise ValueError(f"version must be a requirement such as 'torch>=2.7', got {version!r}: {error}") from None

    @functools.cache
    def check() -> None:
        if requirement.name.lower() == "python":
            found: Version | None = Version(platform.python_version())
        else:
            found = installed_version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            have = "not installed" if found is None else f"{found} is installed"
            raise ImportError(f"{version} is required, {requirement.name} {have}. {hint}".rstrip())

    def decorate(fn: F) -> F:
        guarded = contiguous(fn)

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            check()
            return guarded(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
