# SPDX-License-Identifier: MIT
"""Configurations: one base class whose fields come from a family's row."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

from fla.models._compat import CACHE_FIELD, PreTrainedConfig
from fla.models.attention_config import (
    AttentionConfig,
    AttentionSpec,
    get_attention_spec,
    parse_attention_config,
)

__all__ = [
    "AttentionConfig",
    "AttentionConfigBase",
    "AttentionSpec",
    "FLAConfig",
    "get_attention_spec",
    "parse_attention_config",
    "validate_attnres_config",
    "validate_loss_config",
]


def validate_loss_config(fuse_cross_entropy: bool, fuse_linear_cross_entropy: bool) -> None:
    """Raise ValueError when both fused losses are asked for; warn about the precision of the linear one."""
    if fuse_cross_entropy and fuse_linear_cross_entropy:
        raise ValueError("`fuse_cross_entropy` and `fuse_linear_cross_entropy` cannot both be True.")
    if fuse_linear_cross_entropy:
        warnings.warn(
            "`fuse_linear_cross_entropy` saves memory at the price of some precision in 16-bit training; if losses "
            "differ from a run without it, set it to False.",
            stacklevel=3,
        )


def validate_attnres_config(attnres_block_size: int | None) -> None:
    """Raise ValueError unless the block size is None, 1 or an even number."""
    size = attnres_block_size
    if size is None or (
        isinstance(size, int) and not isinstance(size, bool) and (size == 1 or (size > 1 and size % 2 == 0))
    ):
        return
    raise ValueError(f"`attnres_block_size` must be None, 1 or an even int >= 2, got {size!r}.")


class FLAConfig(PreTrainedConfig):
    """Base of the configurations. A class holds its fields and defaults in ``fields``; ``attn`` is checked when set."""

    keys_to_ignore_at_inference: ClassVar[list[str]] = sorted({"past_key_values", CACHE_FIELD}, reverse=True)
    fields: ClassVar[Mapping[str, Any]] = {}
    _finish: ClassVar[Any] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # transformers 5 makes configs dataclasses and would replace an inherited constructor by a generated one.
        if "__init__" not in cls.__dict__:
            cls.__init__ = _constructor(cls.fields)  # type: ignore[method-assign]
        super().__init_subclass__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "attn":
            value = parse_attention_config(value, self.num_hidden_layers)
        super().__setattr__(name, value)


AttentionConfigBase = FLAConfig


def _constructor(fields: Mapping[str, Any]) -> Any:
    """An ``__init__`` whose signature names the fields."""

    def __init__(self: FLAConfig, *args: Any, **kwargs: Any) -> None:
        _config_init(self, args, kwargs)

    Parameter = inspect.Parameter
    named = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default) for name, default in fields.items()]
    ends = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), Parameter("kwargs", Parameter.VAR_KEYWORD)
    __init__.__signature__ = inspect.Signature([ends[0], *named, ends[1]])  # type: ignore[attr-defined]
    return __init__


def _config_init(self: FLAConfig, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fields = self.fields
    if len(args) > len(fields):
        raise TypeError(f"{type(self).__name__}() takes at most {len(fields)} positional arguments, got {len(args)}.")
    values = dict(fields)
    given = dict(zip(fields, args, strict=False))
    if twice := given.keys() & kwargs.keys():
        raise TypeError(f"{type(self).__name__}() got multiple values for argument {sorted(twice)[0]!r}.")
    given.update((name, kwargs.pop(name)) for name in [*kwargs] if name in fields)
    values.update(given)
    finish = type(self)._finish
    if finish is not None:
        finish(values, "transformers_version" in kwargs)
    if "fuse_cross_entropy" in values:
        validate_loss_config(values["fuse_cross_entropy"], values.get("fuse_linear_cross_entropy", False))
    validate_attnres_config(values.get("attnres_block_size"))
    # The base class keeps these itself in some versions.
    base: dict[str, Any] = {
        n: values.get(n) for n in ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings")
    }
    own = {name: value for name, value in values.items() if name not in base}
    # `attn` is checked against the depth, which has to be known first.
    for name in sorted(own, key=lambda n: n == "attn"):
        setattr(self, name, own[name])
    PreTrainedConfig.__init__(self, **base, **kwargs)
    for name, value in base.items():
        if getattr(self, name, None) != value:
            setattr(self, name, value)
