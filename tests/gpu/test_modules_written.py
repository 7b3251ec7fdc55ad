# SPDX-License-Identifier: MIT
"""Written out calls of modules equal their bodies bit for bit: new buffers, views, one tensor given twice."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from fla.modules import FusedRMSNormGated, LayerNorm, RMSNorm, RotaryEmbedding, ShortConvolution, _written
from fla.modules.activations import swiglu
from fla.modules.l2norm import l2norm

pytestmark = pytest.mark.gpu
B, T, D = 2, 96, 256


def made(name):
    """The function, its parameters, and how many tensors of ``[B, T, D]`` it takes."""
    torch.manual_seed(0)
    module = {
        "rms": lambda: RMSNorm(D), "layer": lambda: LayerNorm(D, bias=True), "gated": lambda: FusedRMSNormGated(D),
        "conv": lambda: ShortConvolution(D, 4, bias=True), "rotary": lambda: RotaryEmbedding(32),
    }.get(name)  # fmt: skip
    if module is None:
        fn, n = {"l2": (l2norm, 1), "swiglu": (swiglu, 2)}[name]
        return fn, [], n
    m = module().to("cuda", torch.bfloat16)
    params = list(m.parameters())
    if name == "rotary":
        return lambda q, k: m(q.unflatten(-1, (-1, 64)), k.unflatten(-1, (-1, 64))), params, 2
    if name == "conv":
        return lambda x: m(x, output_final_state=True), params, 1
    if name == "layer":
        return lambda x, r: m(x, residual=r, prenorm=True), params, 2
    return m, params, 2 if name == "gated" else 1


def step(fn, params, xs):
    """Inference, and results and gradients of a training step."""
    with torch.no_grad():
        out = fn(*xs)
    leaves = [x.detach().requires_grad_() for x in xs]
    if len(xs) == 2 and xs[0] is xs[1]:
        leaves = leaves[:1] * 2
    found = fn(*leaves)
    found, out = (o if isinstance(o, tuple) else (o,) for o in (found, out))
    dy = [torch.sin(torch.arange(o.numel(), device="cuda")).view(o.shape).to(o.dtype) for o in found]
    return [*out, *found, *torch.autograd.grad(found, [*leaves, *params], dy)]


@pytest.mark.parametrize("name", ["rms", "layer", "gated", "l2", "swiglu", "conv", "rotary"])
def test_written_out_calls_equal_their_bodies(name, monkeypatch):
    fn, params, n = made(name)
    seen = []
    plain = _written.taped

    def counted(tapes, key, body, inputs, *static):
        before = sum(map(callable, tapes.values()))
        result = plain(tapes, key, body, inputs, *static)
        seen.append(before)
        return result

    def tensors(seed, kind):
        gen = torch.Generator(device="cuda").manual_seed(seed)
        wide = torch.randn(B, T, 3 * D, generator=gen, device="cuda").bfloat16()
        views = [wide[..., i * D : (i + 1) * D] for i in range(n)]
        if kind == "views":
            return views
        if kind == "twice":
            return [views[0].contiguous()] * n
        if kind == "float32":
            return [v.float() for v in views]
        return [v.contiguous() for v in views]

    kinds = ["plain", "views", "twice", "plain", "views", "plain", "twice", "plain", "views"]
    kinds += ["float32"] * 4 if name in ("l2", "swiglu") else []
    kept = []
    for seed, kind in enumerate(kinds):
        xs = tensors(seed, kind)
        kept.append(xs)  # so that every call has buffers of its own
        with monkeypatch.context() as m:
            m.setattr(_written, "taped", counted)
            got = step(fn, params, xs)
        with monkeypatch.context() as m:
            m.setattr(_written, "taped", lambda tapes, key, body, inputs, *static: body(*inputs, *static))
            want = step(fn, params, xs)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(a, b), (kind, seed, i)
    assert max(seen) >= 2, "nothing was written out"
