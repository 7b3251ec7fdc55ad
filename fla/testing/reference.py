# SPDX-License-Identifier: MIT
"""What ops must compute: the token recurrences of ``fla.ops.*.naive`` in float64, behind the flags of the public calls.

Each function takes the tensors of one batch of whole sequences by the op's argument names (``state`` and ``z`` for the
initial state) and the flags, and returns ``[o, final state, ...]`` with states K-first. ``scale`` is always given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fla.ops.comba.naive import naive_recurrent_comba
from fla.ops.gdn2.naive import naive_recurrent_gdn2
from fla.ops.gla.naive import naive_recurrent_gla
from fla.ops.kda.naive import naive_recurrent_kda
from fla.ops.linear_attn.naive import naive_recurrent_linear_attn
from fla.ops.rwkv6.recurrent_naive import naive_recurrent_rwkv6

Values = Mapping[str, Any]
Results = list[Any]


def delta(x: Values, flags: Values) -> Results:
    """Delta rules, whatever their decay; the activations that the kernels of some calls apply are written out here."""
    if flags.get("return_intermediate_states"):
        return [*_delta(x, flags), _states_before_chunks(x, flags)]
    return _delta(x, flags)


def _states_before_chunks(x: Values, flags: Values) -> Tensor:
    """``[B, NT, HV, K, V]``: the final states of what precedes each chunk."""
    T, states = x["q"].shape[1], []
    for start in range(0, T, flags.get("chunk_size", 64)):
        before = {name: t[:, :start] if name in ("q", "k", "v", "g", "beta") else t for name, t in x.items()}
        states.append(_delta(before, flags)[1])
    return torch.stack(states, 1)


def _delta(x: Values, flags: Values) -> Results:
    q, k, v, beta = x["q"], x["k"], x["v"], x.get("beta")
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    if flags.get("use_qk_l2norm_in_kernel"):
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if beta is None:
        beta = v.new_ones(B, T, HV)
    if flags.get("use_beta_sigmoid_in_kernel"):
        beta = (2 if flags.get("allow_neg_eigval") else 1) / (1 + (-beta).exp())
    g = x.get("g")
    if flags.get("use_gate_in_kernel") and g is not None:
        g = _gate(g, x, flags.get("lower_bound"))
    decay = v.new_zeros(B, T, HV, K)
    for part in (g, x.get("gk")):
        if part is not None:
            decay = decay + (part if part.dim() == 4 else part.unsqueeze(-1))
    gv, state = x.get("gv"), x.get("state")
    if gv is None and beta.dim() == 3:
        o, S = naive_recurrent_kda(q, k, v, decay, beta, x["scale"], state, True)
        return [o, S]
    # One strength or decay per value channel: each channel is a head with one value.
    q, k = (t.repeat_interleave(HV * V // H, 2) for t in (q, k))
    decay = decay.repeat_interleave(V, 2)
    if gv is not None:
        decay = decay + gv.flatten(2).unsqueeze(-1)
    beta = beta.flatten(2) if beta.dim() == 4 else beta.repeat_interleave(V, 2)
    return _joined(naive_recurrent_kda(q, k, _split(v), decay, beta, x["scale"], _split_state(state), True), HV, V)


def comba(x: Values, flags: Values) -> Results:
    """The delta rule that reads the state before its decay, with a key of its own."""
    q, k, v, p, beta = x["q"], x["k"], x["v"], x["p"], x.get("beta")
    if flags.get("use_qk_l2norm_in_kernel"):
        q, k, p = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k, p))
    if beta is None:
        beta = v.new_ones(v.shape[:3])
    return [*naive_recurrent_comba(q, k, v, p, beta, x["g"], x["scale"], x.get("state"), True)]


def gdn2(x: Values, flags: Values) -> Results:
    """The delta rule with gates per channel."""
    q, k, g = x["q"], x["k"], x["g"]
    if flags.get("use_qk_l2norm_in_kernel"):
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    if flags.get("use_gate_in_kernel"):
        g = _gate(g, x, flags.get("lower_bound"))
    return [*naive_recurrent_gdn2(q, k, x["v"], g, x["b"], x["w"], x["scale"], x.get("state"), True)]


def _gate(g: Tensor, x: Values, lower_bound: float | None) -> Tensor:
    """The log decay from a raw gate ``[B, T, HV]`` or ``[B, T, HV, K]``."""
    if x.get("dt_bias") is not None:
        g = g + x["dt_bias"].reshape(g.shape[2:])
    rate = x["A_log"].exp().reshape(-1, *[1] * (g.dim() - 3))
    if lower_bound is not None:
        return lower_bound / (1 + (-rate * g).exp())
    return -rate * F.softplus(g, threshold=50)


def linear(x: Values, flags: Values) -> Results:
    """``S_t = decay S_{t-1} + k_t (x) v_t``: decays per head, per key channel and per value channel, either way."""
    parts = {name: x[name] for name in ("q", "k", "v", "g", "gk", "gv") if x.get(name) is not None}
    if flags.get("reverse"):
        parts = {name: t.flip(1) for name, t in parts.items()}
    q, k, v = parts["q"], parts["k"], parts["v"]
    (B, T, H, K), V = q.shape, v.shape[-1]
    decay = q.new_zeros(B, T, H, K)
    for name in ("g", "gk"):
        if name in parts:
            decay = decay + (parts[name] if parts[name].dim() == 4 else parts[name].unsqueeze(-1))
    if x.get("g_gamma") is not None:
        decay = decay + x["g_gamma"].unsqueeze(-1)
    q = q * (x["scale"] * math.sqrt(K))  # the recurrence multiplies by K ** -0.5
    if "gv" in parts:
        q, k, decay = (t.repeat_interleave(V, 2) for t in (q, k, decay))
        decay = decay + parts["gv"].flatten(2).unsqueeze(-1)
        found = naive_recurrent_gla(q, k, _split(v), decay, _split_state(x.get("state")), True)
        o, S = _joined(found, H, V)
    else:
        o, S = naive_recurrent_gla(q, k, v, decay, x.get("state"), True)
    return [o.flip(1) if flags.get("reverse") else o, S]


def rwkv6(x: Values, flags: Values) -> Results:
    """Reads the state before each token, and the token itself with a weight of its own, either way."""
    turn = lambda t: (t.flip(1) if flags.get("reverse") else t).transpose(1, 2)
    r, k, v, w = (turn(x[name]) for name in ("r", "k", "v", "w"))
    o, S = naive_recurrent_rwkv6(r, k, v, w, x["u"], x["scale"], x.get("state"), True)
    o = o.transpose(1, 2)
    return [o.flip(1) if flags.get("reverse") else o, S]


def retention(x: Values, flags: Values) -> Results:
    """Head h decays by ``1 - 2 ** (-5 - h)``."""
    decay = torch.log1p(-torch.exp2(-5.0 - _heads(x["q"])))
    return linear({**x, "g_gamma": decay}, flags)


def lightning(x: Values, flags: Values) -> Results:
    """Head h of H has the log decay ``-(8 / H) (1 - layer_idx / num_layers) h``."""
    heads = _heads(x["q"])
    decay = -(8.0 / len(heads)) * (1.0 - flags["layer_idx"] / flags["num_layers"]) * heads
    return linear({**x, "g_gamma": decay}, flags)


def linear_attn(x: Values, flags: Values) -> Results:
    """Linear attention, with ``normalize`` divided by the sum of weights, whose state ``z`` comes third."""
    if not flags.get("normalize"):
        return linear(x, flags)
    state = (x.get("state"), x.get("z"))
    o, final = naive_recurrent_linear_attn(x["q"], x["k"], x["v"], x["scale"], state, True, True)
    return [o, *final]


def _heads(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2], dtype=q.dtype, device=q.device)


def _split(v: Tensor) -> Tensor:
    """``[B, T, H, V]`` to ``[B, T, H * V, 1]``."""
    return v.flatten(2).unsqueeze(-1)


def _split_state(state: Tensor | None) -> Tensor | None:
    """``[N, H, K, V]`` to ``[N, H * V, K, 1]``."""
    return None if state is None else state.mT.flatten(1, 2).unsqueeze(-1)


def _joined(found: tuple[Tensor, Tensor | None], H: int, V: int) -> Results:
    o, S = found
    assert S is not None
    return [o.squeeze(-1).unflatten(2, (H, V)), S.squeeze(-1).unflatten(1, (H, V)).mT]
