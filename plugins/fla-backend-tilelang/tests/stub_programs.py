# SPDX-License-Identifier: MIT
"""What the TileLang programs compute, in torch, for machines that cannot build them. It is no reference: fla's are.

A first stage notes what it was given; the pass over time looks that up by the tiles and runs core's PyTorch path over
the full chunks of each sequence, or with `tail` over what they leave, with states in the layouts that it is told.
"""

from __future__ import annotations

import torch

from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda

_noted = {}
NONE, K_FIRST, V_FIRST = 0, 1, 2


def program(module, name, **choices):
    """In the place of `fla_backend_tilelang.programs.program`."""
    made = {"scalar_prep": _scalar_prep, "vector_prep": _vector_prep, "scan": _scan}[name]
    return lambda *args: made(choices, *args)


def _dense(*tensors):
    for x in tensors:
        assert x.is_contiguous()
        assert x.data_ptr() % 16 == 0


def _options(choices, scale, beta_scale, A_log, dt_bias):
    gate = choices["gate"] == 2
    return {
        "scale": scale,
        "use_qk_l2norm_in_kernel": choices["norm"],
        "use_beta_sigmoid_in_kernel": choices["sigmoid"],
        "allow_neg_eigval": choices["sigmoid"] and beta_scale == 2.0,
        "use_gate_in_kernel": gate,
        "A_log": A_log if gate and choices.get("rate", True) else None,
        "dt_bias": dt_bias if gate and choices["bias"] else None,
    }


def _scalar_prep(choices, q, k, g, beta, A_log, dt_bias, table, Tm, A, SC, scale, beta_scale):
    _dense(q, k, g, beta, A_log, dt_bias, table, Tm, A, SC)
    g = torch.zeros_like(g, dtype=torch.float32) if choices["gate"] == 0 else g
    options = _options(choices, scale, beta_scale, A_log, dt_bias)
    _noted[Tm.data_ptr()] = chunk_gated_delta_rule, (q, k, g, beta), options


def _vector_prep(choices, q, k, g, beta, A_log, dt_bias, table, KD, KU, QD, Tm, A, SC, scale, beta_scale, lower):
    _dense(q, k, g, beta, A_log, dt_bias, table, KD, KU, QD, Tm, A, SC)
    options = _options(choices, scale, beta_scale, A_log, dt_bias)
    options["lower_bound"] = lower if choices["gate"] == 2 else None
    _noted[Tm.data_ptr()] = chunk_kda, (q, k, g, beta), options


def _scan(choices, _q, _k, _kk, v, Tm, _A, _SC, cu, offsets, h0, ht, o, length, sequences):
    _dense(v, cu, offsets, h0, ht, o)
    assert cu.dtype == offsets.dtype == torch.int32
    op, inputs, options = _noted[Tm.data_ptr()]
    for n in range(sequences):
        first, end = cu[n : n + 2].tolist() if choices["varlen"] else (n * length, (n + 1) * length)
        full = first + (end - first) // choices["C"] * choices["C"]
        part = slice(full, end) if choices["tail"] else slice(first, full)
        state = None
        if choices["initial"] != NONE:
            state = h0[n].mT if choices["initial"] == V_FIRST else h0[n]
            state = state[None].contiguous()
        q, k, g, beta = (x[None, part].float() for x in inputs)
        with torch.no_grad():
            # Its body: the kit counts dispatched calls inside a backend as handing the call on.
            out, last = op.op.fn(
                q, k, v[None, part].float(), g, beta, initial_state=state, output_final_state=True, **options
            )
        o[part] = out[0].to(o.dtype)
        if choices["final"] != NONE:
            ht[n] = last[0].mT if choices["final"] == V_FIRST else last[0]
