# SPDX-License-Identifier: MIT
"""Old keyword names."""

from __future__ import annotations

import enum
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from packaging.version import Version

import fla

F = TypeVar("F", bound=Callable[..., Any])


class Action(enum.Enum):
    """What a deprecated keyword sets off."""

    NONE = "none"
    NOTIFY = "notify"
    NOTIFY_ALWAYS = "notify_always"
    RAISE = "raise"


def deprecate_kwarg(
    old_name: str,
    version: str,
    new_name: str | None = None,
    warn_if_greater_or_equal_version: bool = False,
    raise_if_greater_or_equal_version: bool = False,
    raise_if_both_names: bool = False,
    additional_message: str | None = None,
) -> Callable[[F], F]:
    """Decorator: the keyword `old_name` goes away in `version`.

    Before that version its use warns (`FutureWarning`). From then on it is silent, warns or raises as the flags say.
    With `new_name` the value moves to that parameter. If both are given, the new one wins with a warning.

    Raises:
        ValueError: when called with the old name where `raise_if_greater_or_equal_version` applies, or with both names
            under `raise_if_both_names`.
    """
    gone = Version(fla.__version__) >= Version(version)
    if not gone:
        usual = Action.NOTIFY
    elif raise_if_greater_or_equal_version:
        usual = Action.RAISE
    else:
        usual = Action.NOTIFY_ALWAYS if warn_if_greater_or_equal_version else Action.NONE
    when = f"{'was removed' if gone else 'will be removed'} in version {version}"

    def decorate(fn: F) -> F:
        order = list(inspect.signature(fn).parameters)
        place = order.index(new_name) if new_name in order else None

        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if old_name not in kwargs:
                return fn(*args, **kwargs)
            action = usual
            message = f"{fn.__name__}: `{old_name}` {when}"
            if new_name is not None:
                if new_name in kwargs or (place is not None and place < len(args)):
                    if raise_if_both_names:
                        raise ValueError(f"{fn.__name__}: both `{old_name}` and `{new_name}` are given; drop the first")
                    kwargs.pop(old_name)
                    message = f"{message}; both it and `{new_name}` are given, `{new_name}` counts"
                    action = Action.NOTIFY_ALWAYS if action is Action.NONE else action
                else:
                    kwargs[new_name] = kwargs.pop(old_name)
                    message = f"{message}; use `{new_name}`"
            message = f"{message}. {additional_message}" if additional_message else f"{message}."
            if action is Action.RAISE:
                raise ValueError(message)
            if action is not Action.NONE:
                warnings.warn(message, FutureWarning, stacklevel=2)
            return fn(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
