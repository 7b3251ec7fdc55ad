# SPDX-License-Identifier: MIT
"""Checkpoints of other packages as models of ours: Llama, Mistral and Qwen2 as Transformer, and RWKV-6.

Numbers are moved, not approximated: the converted model computes what the original does.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fla.convert._mapping import Conversion, ConversionError, apply
from fla.convert.llama import LLAMA
from fla.convert.rwkv6 import RWKV6
from fla.models.family import Family, load

__all__ = ["ConversionError", "convert_back", "convert_checkpoint", "convert_config", "convert_state_dict"]

CONVERSIONS = (LLAMA, RWKV6)
_COPIED = ("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model")


def _conversion(config: Mapping[str, Any]) -> Conversion:
    kind = config.get("model_type")
    for conversion in CONVERSIONS:
        if kind in conversion.model_types:
            return conversion
    known = [name for conversion in CONVERSIONS for name in conversion.model_types]
    raise ConversionError(f"`model_type` must be one of {known}, got {kind!r}")


def _family(conversion: Conversion) -> Family:
    return load(f"fla.models.{conversion.family}:FAMILY")


def convert_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Our configuration for theirs, given as ``config.json`` has it, and for sizes that only their state dict says.

    Raises:
        ConversionError: a kind of model or a field that we have nothing for; the message names it.
    """
    conversion = _conversion(config)
    family = _family(conversion)
    return family.get(family.names[0])(**conversion.config(config, tensors or {}))


def convert_state_dict(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict for theirs.

    Args:
        config: their configuration.
        tensors: their state dict.

    Raises:
        ConversionError: parameters that are missing, or that nothing is known to do with.
    """
    return apply(_conversion(config), config, tensors)


def convert_back(config: Any, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The reverse for Transformer models: configuration and state dict of a Llama, Mistral or Qwen2.

    Args:
        config: our configuration.
        tensors: our state dict.

    Raises:
        ConversionError: a family or a field that none of them has.
    """
    conversion = next((c for c in CONVERSIONS if c.family == config.model_type and c.back is not None), None)
    if conversion is None or conversion.back is None:
        raise ConversionError(f"nothing is known to turn a model of type {config.model_type!r} into")
    theirs = conversion.back(config)
    return theirs, apply(conversion, theirs, tensors, reverse=True)


class _Files(Mapping[str, Tensor]):
    """The tensors of a checkpoint folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._where: dict[str, Path] = {}
        self._loaded: dict[str, Tensor] = {}
        tensors_only = sorted(folder.glob("*.safetensors"))
        for path in tensors_only or sorted(folder.glob("pytorch_model*.bin")):
            try:
                if tensors_only:
                    with safe_open(path, "pt") as file:
                        self._where.update(dict.fromkeys(file.keys(), path))
                else:  # a pickle could run code: nothing but tensors is read
                    self._loaded.update(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
            except (SafetensorError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
                raise ConversionError(f"{path} cannot be read: {error}") from error
        if not self:
            raise ConversionError(f"{folder} has neither *.safetensors nor pytorch_model*.bin")

    def __getitem__(self, name: str) -> Tensor:
        if name in self._loaded:
            return self._loaded[name]
        with safe_open(self._where[name], "pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._where, **self._loaded})

    def __len__(self) -> int:
        return len(self._where) + len(self._loaded)


def convert_checkpoint(source: str | Path, output: str | Path, dtype: torch.dtype | None = None) -> Any:
    """Convert a folder with ``config.json`` and weights, and write one of ours, tokenizer included.

    Args:
        source: folder of a checkpoint, safetensors or PyTorch files (which may hold tensors only).
        output: folder to write; it may not exist or must be empty.
        dtype: dtype of the weights; that of the source when None.

    Returns:
        The model, on the CPU.

    Raises:
        ConversionError: a folder, a kind of model, a field or a parameter that does not fit. Nothing is written then.
    """
    source, output = Path(source), Path(output)
    if not (source / "config.json").is_file():
        raise ConversionError(f"{source} has no config.json")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConversionError(f"{output} exists and is not an empty folder")
    theirs = json.loads((source / "config.json").read_text())
    family = _family(_conversion(theirs))
    files = _Files(source)
    config, tensors = convert_config(theirs, files), convert_state_dict(theirs, files)
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    with torch.device("meta"):
        model: Any = family.get(family.names[1])(config)
    expected = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    for name, tensor in tensors.items():
        if expected.get(name) != tuple(tensor.shape):
            raise ConversionError(f"{name} must have shape {expected.get(name)}, got {tuple(tensor.shape)}")
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, p in model.state_dict().items() if p.is_meta]
    if left:
        raise ConversionError(f"nothing sets {', '.join(left)}")
    model.save_pretrained(output)
    for pattern in _COPIED:
        for path in source.glob(pattern):
            shutil.copy2(path, output)
    return model.eval()
