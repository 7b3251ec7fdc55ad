# SPDX-License-Identifier: MIT
"""The classes of a family, from its row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import new_class
from typing import TYPE_CHECKING, Any

from fla.models.configuration_utils import FLAConfig
from fla.models.family import load

if TYPE_CHECKING:
    from fla.models.family import Family

__all__ = ["config_class", "model_class"]


def _make(family: Family, name: str, bases: tuple[type, ...], part: str, doc: str, body: dict[str, Any]) -> type:
    namespace = {
        "__module__": f"fla.models.{family.package}.{part}_{family.package}",
        "__qualname__": name,
        "__doc__": doc,
        **body,
    }
    return new_class(name, bases, exec_body=lambda ns: ns.update(namespace))


def _cache_first(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with ``past_key_values`` before ``inputs_embeds``, where the softmax families have it."""
    signature = inspect.signature(forward)
    order = [*signature.parameters]
    a, b = order.index("inputs_embeds"), order.index("past_key_values")
    order[a], order[b] = order[b], order[a]

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, **dict(zip(order[1:], args, strict=False)), **kwargs)

    swapped.__doc__, swapped.__name__ = forward.__doc__, "forward"
    swapped.__signature__ = signature.replace(parameters=[signature.parameters[name] for name in order])  # type: ignore[attr-defined]
    return swapped


def config_class(family: Family) -> type:
    """The configuration class."""
    doc = f"Configuration of {family.stem} models. Fields and defaults:\n\n    " + "\n    ".join(
        f"{name} = {default!r}" for name, default in family.fields.items()
    )
    body = {
        "model_type": family.model_type,
        "fields": dict(family.fields),
        "attribute_map": dict(family.aliases),
        "_finish": None if family.finish is None else staticmethod(family.finish),
    }
    return _make(family, f"{family.stem}Config", (FLAConfig,), "configuration", doc, body)


def model_class(family: Family, name: str) -> type:
    """``<Stem>Block``, ``<Stem>PreTrainedModel``, ``<Stem>Model`` or ``<Stem>ForCausalLM``."""
    from fla.models._compat import tied_weights
    from fla.models.causal_lm import CausalLM
    from fla.models.decoder import FLAPreTrainedModel
    from fla.models.generation_utils import FLAGenerationMixin, FLAUnsupportedCacheGenerationMixin

    stem = family.stem
    if name == f"{stem}Block":
        return _make(
            family, name, (load(family.block),), "modeling", f"One block of a {stem} model.", {"family": family}
        )
    if name == f"{stem}PreTrainedModel":
        body: dict[str, Any] = {
            "family": family,
            "config_class": family.get(f"{stem}Config"),
            "base_model_prefix": family.prefix,
            "_no_split_modules": [f"{stem}Block"],
        }
        return _make(family, name, (FLAPreTrainedModel,), "modeling", f"Base of the {stem} models.", body)
    base = family.get(f"{stem}PreTrainedModel")
    if name == f"{stem}Model":
        doc, model = f"The {stem} decoder without a language model head.", load(family.model)
        body = {"forward": _cache_first(model.forward)} if family.cache_first else {}
        return _make(family, name, (model, base), "modeling", doc, body)
    plain = family.generation == "plain"
    mixin = FLAGenerationMixin if plain else FLAUnsupportedCacheGenerationMixin
    body = {"_tied_weights_keys": tied_weights("lm_head.weight", f"{family.prefix}.embeddings.weight")}
    if family.cache_first:
        body["forward"] = _cache_first(CausalLM.forward)
    doc = f"The {stem} decoder with a language model head."
    return _make(family, name, (CausalLM, base, mixin), "modeling", doc, body)
