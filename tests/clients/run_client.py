# SPDX-License-Identifier: MIT
"""Run models of transformers from tiny random configurations and save what they compute.

`python run_client.py FILE [--models NAME ...] [--without-fla] [--device D] [--dtype T] [--exact]`: logits, loss,
gradients and greedy tokens, of plain and left-padded prompts, go to FILE (torch.save) by model; models that this
transformers does not have are left out. With `--without-fla` the package cannot be imported, so that transformers takes
its own PyTorch path; otherwise the calls that reached us are saved too. `--exact` rounds the weights to the dtype and
computes in float32.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

import torch

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Class, and sizes beside the common ones.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", {**LINEAR, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5", {**LINEAR, "head_dim": 16}),
    "olmo_hybrid": ("OlmoHybrid", {**LINEAR, "linear_num_value_heads": 2}),
    "kimi_linear": (
        "KimiLinear",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_heads": 2,
            "linear_head_dim": 16,
        },
    ),
}
STEPS = 8


def classes(name: str) -> tuple[Any, Any] | None:
    """Configuration and language model, or None where this transformers has no such model."""
    stem = MODELS[name][0]
    try:
        configs = importlib.import_module(f"transformers.models.{name}.configuration_{name}")
        models = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith(f"transformers.models.{name}"):
            return None
        raise
    config = getattr(configs, f"{stem}TextConfig", None) or getattr(configs, f"{stem}Config")
    return config, getattr(models, f"{stem}ForCausalLM")


def without_fla() -> None:
    """Make transformers take its own path: the package cannot be imported and does not count as there."""
    import transformers.utils
    from transformers.utils import import_utils

    for module in (import_utils, transformers.utils):
        if hasattr(module, "is_flash_linear_attention_available"):
            module.is_flash_linear_attention_available = lambda: False
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"]:
        raise SystemExit(f"{name} is imported already")
    sys.modules["fla"] = None  # type: ignore[assignment]


def build(name: str, dtype: torch.dtype, device: str, exact: bool) -> Any:
    """The model, or None where there is no such model. In 32 bits its weights are large enough for every layer to show.

    `exact` computes with the rounded weights in float32.
    """
    found = classes(name)
    if found is None:
        return None
    config, model_class = found
    sizes = {**COMMON, **MODELS[name][1]}
    if dtype.itemsize < 4 and "num_experts_per_tok" in sizes:
        sizes["num_experts_per_tok"] = 4  # all: rounding would choose others
    torch.manual_seed(0)
    model = model_class(config(**sizes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters() if dtype.itemsize == 4 else ():
            if parameter.dim() > 1 and min(parameter.shape[-2:]) > 1:
                parameter.normal_(0, 0.08, generator=generator)
        model.get_output_embeddings().weight[2] = 0  # never ends
    model = model.to(device=device, dtype=dtype)
    return model.float() if exact else model


def run(model: Any) -> dict[str, Any]:
    """Everything that is compared."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, 97, (2, 75), generator=generator).to(model.device)
    mask = torch.ones_like(tokens)
    mask[0, :9] = 0
    results: dict[str, Any] = {}
    model.train()
    out = model(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    results["logits"], results["loss"] = out.logits.detach(), out.loss.detach()
    results["gradients"] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        results["padded"] = model(input_ids=tokens, attention_mask=mask).logits[mask == 1]
    for key, kept in (("tokens", torch.ones_like(mask)), ("padded tokens", mask)):
        results[key] = model.generate(
            tokens[:, :20], attention_mask=kept[:, :20], max_new_tokens=STEPS, do_sample=False
        )
    return results


def traced(model: Any) -> dict[str, Any]:
    """:func:`run`, with the calls that reached the package: ``(op, backend)`` to their number."""
    from fla.backends import trace

    with trace() as calls:
        results = run(model)
    return {**results, "calls": {(f"{op}.{fn}", backend): n for (op, fn, backend), n in calls.counts().items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--models", nargs="+", default=[*MODELS])
    parser.add_argument("--without-fla", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--exact", action="store_true")
    args = parser.parse_args()
    if args.without_fla:
        without_fla()
    results = {}
    for name in args.models:
        model = build(name, getattr(torch, args.dtype), args.device, args.exact)
        if model is not None:
            results[name] = (run if args.without_fla else traced)(model)
    torch.save(results, args.file)


if __name__ == "__main__":
    main()
