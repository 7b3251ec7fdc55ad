# SPDX-License-Identifier: MIT
"""The hook that a plugin implements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from fla.backends.registry import Registrar

PROJECT = "fla"

#: Version of the contract. A plugin module may state the one it was written for as ``api_version``.
API_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """Hooks called on plugins."""

    @hookspec
    def register_backends(self, registry: Registrar) -> None:
        """Register backends: ``registry.register("kda", MyBackend())``.

        Called once, at discovery. All registrations of one call are taken together or, when it raises, not at all.
        Must import neither kernels nor their packages.
        """
