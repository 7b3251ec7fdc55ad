# SPDX-License-Identifier: MIT
"""Teach transformers' Auto classes our families, without importing transformers or any model.

The mappings of transformers are lazy: a model type, a class name, and the module to import when the class is needed.
Our entries are of the same kind. When transformers is not imported yet, a finder on ``sys.meta_path`` waits for the two
modules that hold the mappings, adds the entries after each has run, and removes itself.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fla.models._index import FAMILIES, Entry

__all__ = ["install"]


class _Family(ModuleType):
    """Stands for ``transformers.models.<family>`` in a lazy mapping and finds the classes of one of ours."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(f"fla.models.{entry.package}")
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        if name in self._entry.names:
            return getattr(importlib.import_module(self.__name__), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


_modules = {entry.model_type: _Family(entry) for entry in FAMILIES}


_CONFIGS = {entry.model_type: entry.names[0] for entry in FAMILIES}


# The table of all configuration names is shared by everything in transformers, some of which expects documentation or
# a module of transformers for each entry. So the mappings that should know our families get a table of their own.


def _add_configs(module: ModuleType) -> None:
    mapping = module.CONFIG_MAPPING
    mapping._mapping = OrderedDict({**mapping._mapping, **_CONFIGS})
    mapping._modules.update(_modules)


def _add_models(module: ModuleType) -> None:
    for mapping, index in ((module.MODEL_FOR_CAUSAL_LM_MAPPING, 1), (module.MODEL_MAPPING, 2)):
        mapping._config_mapping = OrderedDict({**mapping._config_mapping, **_CONFIGS})
        mapping._reverse_config_mapping.update({name: model_type for model_type, name in _CONFIGS.items()})
        # Pipelines read this one to see which models can generate text.
        mapping._model_mapping.update({entry.model_type: entry.names[index] for entry in FAMILIES})
        mapping._modules.update(_modules)


_WAITING: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _add_configs,
    "transformers.models.auto.modeling_auto": _add_models,
}


def _run(name: str, module: ModuleType) -> None:
    try:
        _WAITING[name](module)
    except Exception as error:
        # Importing transformers must not fail because its internals changed; our classes work by name all the same.
        warnings.warn(
            f"fla could not register its models with {name} ({type(error).__name__}: {error}). AutoModel will not find "
            "them; import the classes from fla.models instead.",
            stacklevel=2,
        )


class _RunThenAdd(Loader):
    """The loader of a module, followed by our entries."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module should not show that anyone waited for it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _run(module.__name__, module)


class _Finder(MetaPathFinder):
    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        spec = None
        for finder in [*sys.meta_path]:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    break
        if spec is None or spec.loader is None or not hasattr(spec.loader, "exec_module"):
            return spec
        self.names.discard(fullname)
        if not self.names and self in sys.meta_path:
            sys.meta_path.remove(self)
        spec.loader = _RunThenAdd(spec.loader)
        return spec


def install() -> None:
    """Add our families to the mappings of transformers, now or when it is imported. Calling it again is harmless."""
    waiting = set()
    for name in _WAITING:
        module = sys.modules.get(name)
        if module is None:
            waiting.add(name)
        else:
            _run(name, module)
    present = {name for finder in sys.meta_path if isinstance(finder, _Finder) for name in finder.names}
    if waiting - present:
        sys.meta_path.insert(0, _Finder(waiting - present))
