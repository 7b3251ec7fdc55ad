# SPDX-License-Identifier: MIT
"""`fla convert`: checkpoints of Llama, Mistral, Qwen2 and RWKV-6 as models of ours."""

from __future__ import annotations

import argparse
from typing import Any

from fla.cli._output import CliError, Output, add_json_option, print_json

FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="folder with config.json and weights (safetensors, or .bin with tensors only)")
    parser.add_argument("output", help="folder to write; must not exist, or be empty")
    parser.add_argument(
        "--dtype", choices=("float32", "float16", "bfloat16"), help="of the weights (default: as they are)"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare logits with the original, for the kinds that transformers runs"
    )
    add_json_option(parser)
    parser.epilog = "Exit codes: 0 converted, 1 not converted, or the logits differ."


def run(args: argparse.Namespace) -> int:
    import torch

    from fla.convert import ConversionError, convert_checkpoint

    try:
        model = convert_checkpoint(args.source, args.output, args.dtype and getattr(torch, args.dtype))
    except (ConversionError, OSError) as error:
        raise CliError(str(error), FAILED) from None
    document: dict[str, Any] = {
        "output": args.output,
        "model_type": model.config.model_type,
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(model.lm_head.weight.dtype).removeprefix("torch."),
    }
    if args.check:
        document["logits_error"] = _compare(args.source, model)
    if args.json:
        print_json(document)
    else:
        Output().fields((name.replace("_", " "), str(value)) for name, value in document.items())
    # A conversion moves numbers; what differs is rounding.
    return FAILED if document.get("logits_error", 0.0) > (1e-4 if args.dtype in (None, "float32") else 3e-2) else 0


def _compare(source: str, model: Any) -> float:
    """RMS of the difference of the logits over that of the logits, on random tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    try:
        original: Any = AutoModelForCausalLM.from_pretrained(source, torch_dtype=torch.float32)
    except (ValueError, KeyError) as error:
        raise CliError(f"converted, but --check cannot run the original: {error}", FAILED) from None
    tokens = torch.randint(0, model.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ref, got = original.eval()(tokens).logits, model.float()(tokens, use_cache=False).logits
    return float((got - ref).square().mean().sqrt() / ref.square().mean().sqrt())
