# SPDX-License-Identifier: MIT
"""Gluon's language under the names of Triton 3.6, for kernels that are written once for all versions of it."""

import types

from triton.experimental.gluon import language as gl

if not hasattr(gl, "thread_barrier"):
    # The name of Triton 3.7.
    from triton.experimental.gluon.language import barrier

    # Triton's own module stays as it is. By its name Triton knows what belongs to the language and what to a kernel.
    language, gl = gl, types.ModuleType(gl.__name__)
    gl.__dict__.update(language.__dict__)
    gl.thread_barrier = barrier  # type: ignore[attr-defined]

__all__ = ["gl"]
