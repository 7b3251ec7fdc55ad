# SPDX-License-Identifier: MIT
"""Whether kernels in Gluon run, and what becomes of a call whose kernel does not compile.

Each of them is a second form of a kernel in Triton, which serves every call that these do not.
"""

from __future__ import annotations

import functools
import importlib.util

from fla import settings
from fla.ops._common.audit import MiscompiledKernelError

# Versions of Triton that these kernels were run with; Gluon changes between versions.
VERSIONS = ((3, 6), (3, 7))

_failed: list[str] = []


@functools.lru_cache(maxsize=1)
def _against() -> str | None:
    if not settings.get("FLA_CORE_GLUON"):
        return "FLA_CORE_GLUON is off"
    try:
        import triton

        version = tuple(int(x) for x in triton.__version__.split(".")[:2])
        if version not in VERSIONS:
            return f"Triton {triton.__version__} is none of {', '.join(f'{a}.{b}' for a, b in VERSIONS)}"
        if importlib.util.find_spec("triton.experimental.gluon") is None:
            return "this Triton has no Gluon"
    except (ImportError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def why_not() -> str | None:
    """What speaks against kernels in Gluon; None: they run where their engine has one."""
    return _failed[0] if _failed else _against()


def gave_up(error: Exception) -> bool:
    """Whether ``error`` says that a kernel does not compile or does not fit. If so, none is tried again in this
    process, which is warned about once, and the caller goes on with Triton's."""
    from triton import errors

    # What passes of the compiler say has no class of its own, nor has a program that is none for this version.
    failed = isinstance(error, (errors.TritonError, MiscompiledKernelError, ImportError)) or (
        type(error) is RuntimeError and any(words in str(error) for words in ("PassManager", "during parsing"))
    )
    if failed:
        _failed.append(f"{type(error).__name__}: {error}")
        settings.warn_once(
            "gluon", "kernel", f"a kernel in Gluon failed to compile; Triton's run instead ({_failed[0][:500]})",
            RuntimeWarning,
        )  # fmt: skip
    return failed
