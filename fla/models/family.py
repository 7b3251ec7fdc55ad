# SPDX-License-Identifier: MIT
"""A family of models as a table row.

A row names the fields of the configuration, the token mixer and which fields its constructor takes; the classes are
built from it when they are first asked for. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any

__all__ = ["COMMON", "Family", "config_fields", "load"]

COMMON: dict[str, Any] = {
    "attn": None,
    "attn_mode": "chunk",
    "attnres_block_size": None,
    "bos_token_id": 1,
    "conv_size": 4,
    "elementwise_affine": True,
    "eos_token_id": 2,
    "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "norm_eps": 1e-6,
    "num_hidden_layers": 24,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_l2warp": False,
    "vocab_size": 32000,
}
"""Fields that most configurations have, with their usual defaults."""


TAIL = (
    "use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings initializer_range fuse_norm fuse_swiglu "
    "fuse_cross_entropy fuse_linear_cross_entropy use_l2warp vocab_size attnres_block_size"
)
"""The last fields of most configurations."""


def config_fields(text: str, **defaults: Any) -> dict[str, Any]:
    """Fields in their positional order, from ``"name name=default ..."``.

    A field without a default has that of ``defaults`` or of :data:`COMMON`. Defaults are literals without spaces.
    """
    items = (item.partition("=") for item in text.split())
    known = {**COMMON, **defaults}
    fields = {name: ast.literal_eval(value) if equals else known[name] for name, equals, value in items}
    if unknown := defaults.keys() - fields.keys():
        raise KeyError(f"defaults for fields that are not listed: {sorted(unknown)}")
    return fields


def load(path: str) -> Any:
    """The object that ``"module:name"`` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@dataclass(frozen=True)
class Family:
    """One row.

    Attributes:
        stem: prefix of the class names, ``KDA`` in ``KDAConfig``.
        model_type: name in ``config.json`` and in the Auto classes.
        package: package that the classes live in, ``fla.models.<package>``.
        fields: fields of the configuration and their defaults, in positional order (see :func:`config_fields`).
        mixer: ``"module:Class"`` of the token mixer.
        mixer_args: what its constructor takes: names of fields, or ``argument=field``. ``layer_idx`` comes on top.
        finish: checks and completes the values of a configuration, in place, before they are set; told also whether
            they were loaded from a file.
        aliases: other names of fields -> the attribute that holds the value; both are accepted.
        prefix: attribute of the base model inside the language model, and first part of its keys.
        final_norm: attribute of the norm after the last block.
        block: ``"module:Class"`` of a block other than the usual one.
        model: ``"module:Class"`` of a base model other than the usual one.
        linear_loss: configuration field that, in training for ``"fuse_cross_entropy"``, turns on the linear loss.
        generation: ``"plain"`` where every generation strategy works, else ``"unsupported_cache"``.
        cache_first: whether ``past_key_values`` stands before ``inputs_embeds`` among the arguments of the models.
    """

    stem: str
    model_type: str
    package: str
    fields: Mapping[str, Any]
    mixer: str
    mixer_args: str
    finish: Callable[[dict[str, Any], bool], None] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model"
    final_norm: str = "norm"
    block: str = "fla.models.decoder:Block"
    model: str = "fla.models.decoder:DecoderModel"
    linear_loss: str = "fuse_linear_cross_entropy"
    generation: str = "unsupported_cache"
    cache_first: bool = False
    _classes: dict[str, type] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Public class names: configuration, language model, base model."""
        return f"{self.stem}Config", f"{self.stem}ForCausalLM", f"{self.stem}Model"

    @cached_property
    def mixer_kwargs(self) -> dict[str, str]:
        """Constructor argument of the mixer -> field of the configuration."""
        pairs = (item.partition("=") for item in self.mixer_args.split())
        return {argument: name or argument for argument, _, name in pairs}

    def get(self, name: str) -> type:
        """The class ``name``, built on first use."""
        if name not in self._classes:
            build = importlib.import_module("fla.models.build")
            made = build.config_class(self) if name == f"{self.stem}Config" else build.model_class(self, name)
            self._classes.setdefault(name, made)
        return self._classes[name]

    def has(self, name: str) -> bool:
        """Whether :meth:`get` knows ``name``."""
        return name in (*self.names, f"{self.stem}Block", f"{self.stem}PreTrainedModel")

    def exports(self) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
        """``__getattr__``, ``__dir__`` and ``__all__`` of the family's package.

        Also makes ``configuration_<package>`` and ``modeling_<package>`` importable, where code expects the classes.
        """
        home = f"fla.models.{self.package}"
        parts = {}
        for part in ("configuration", "modeling"):
            module = ModuleType(f"{home}.{part}_{self.package}", f"{self.stem} classes, built from the family's row.")
            module.__package__ = home
            # Tools that look a class up by its file find the code it runs.
            module.__file__ = __file__
            module.__getattr__ = self._attribute(module.__name__)  # type: ignore[method-assign]
            sys.modules[module.__name__] = parts[f"{part}_{self.package}"] = module
        getattribute = self._attribute(home)

        def get(name: str) -> Any:
            return parts[name] if name in parts else getattribute(name)

        return get, lambda: sorted([*self.names, *parts]), list(self.names)

    def _attribute(self, module: str) -> Callable[[str], Any]:
        def get(name: str) -> Any:
            if self.has(name):
                return self.get(name)
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        return get
