# SPDX-License-Identifier: MIT
"""The plugin framework: any dispatched op can be taken over by a separately installed package.

For users: :func:`explain`, :func:`trace`, :func:`last_decision`, :func:`report`, :func:`use_backend`,
:func:`reference_only`, :func:`refresh`. For authors of backends: :class:`BaseBackend`, :class:`Capability`,
:class:`Rejection`, :class:`Measured`, :data:`hookimpl`, :func:`needs_backward`, :func:`register`. For authors of
ops: :func:`dispatch`, :class:`CallFacts`.
"""

from __future__ import annotations

from fla.backends._spec import API_VERSION, hookimpl, hookspec
from fla.backends.base import BaseBackend, GluonBackend, TileLangBackend, TritonAscendBackend
from fla.backends.discovery import DISCOVERY, Plugin
from fla.backends.errors import BackendError, BackendUnavailable, DuplicateBackend, PluginError, SignatureMismatch
from fla.backends.explain import Explanation, explain, list_backends, list_plugins, report
from fla.backends.facts import CallFacts, Capability, Facts, Rejection, needs_backward
from fla.backends.measured import Measured, Point
from fla.backends.op import DispatchedOp
from fla.backends.pins import reference_only, register, use_backend
from fla.backends.record import Call, Decision, Trace, Verdict, last_decision, trace
from fla.backends.registry import BackendRegistry, Registrar
from fla.backends.wrapper import dispatch

#: Make an optional backend that core ships known: ``add_builtin("module")``, loaded like a plugin.
add_builtin = DISCOVERY.add_builtin


def refresh() -> None:
    """Look at installed plugins again, now: after an installation, or to try again what failed.

    What plugins registered is dropped first; probes, availability and quarantine are forgotten. Registrations at run
    time stay.
    """
    DISCOVERY.refresh()


__all__ = [
    "API_VERSION",
    "BackendError",
    "BackendRegistry",
    "BackendUnavailable",
    "BaseBackend",
    "Call",
    "CallFacts",
    "Capability",
    "Decision",
    "DispatchedOp",
    "DuplicateBackend",
    "Explanation",
    "Facts",
    "GluonBackend",
    "Measured",
    "Plugin",
    "PluginError",
    "Point",
    "Registrar",
    "Rejection",
    "SignatureMismatch",
    "TileLangBackend",
    "Trace",
    "TritonAscendBackend",
    "Verdict",
    "add_builtin",
    "dispatch",
    "explain",
    "hookimpl",
    "hookspec",
    "last_decision",
    "list_backends",
    "list_plugins",
    "needs_backward",
    "reference_only",
    "refresh",
    "register",
    "report",
    "trace",
    "use_backend",
]
