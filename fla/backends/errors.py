# SPDX-License-Identifier: MIT
"""Errors of the framework. Each message names the backend, the operation and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fla.backends.record import Verdict


class BackendError(RuntimeError):
    """Base of everything that the framework itself raises."""


class BackendUnavailable(BackendError):
    """A strict pin cannot be kept. ``verdicts`` holds every reason."""

    def __init__(self, message: str, verdicts: Sequence[Verdict] = ()) -> None:
        super().__init__(message)
        self.verdicts = tuple(verdicts)


class SignatureMismatch(BackendError, TypeError):
    """A backend's function does not take the parameters of the op it replaces."""


class DuplicateBackend(BackendError, ValueError):
    """Two backends of one operation have the same ``backend_type`` and neither says ``override=True``."""


class PluginError(BackendError):
    """A plugin cannot be taken: no metadata, wrong ``api_version``, nothing to register."""
