# SPDX-License-Identifier: MIT
"""Bad input of the delta family: an error that names the argument, before anything runs."""

from __future__ import annotations

import pytest
import torch

from fla.ops._common.checks import ArgumentError, DtypeError
from fla.ops.delta_rule import chunk_delta_rule, fused_chunk_delta_rule, fused_recurrent_delta_rule
from fla.ops.delta_rule.parallel import parallel_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, chunk_gdn, fused_recurrent_gated_delta_rule
from fla.ops.kda import chunk_kda, fused_recurrent_kda

KDA = [chunk_kda, fused_recurrent_kda]
GDN = [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule]
DELTA = [chunk_delta_rule, fused_recurrent_delta_rule]
GATED = [*KDA, *GDN]
OPS = [*GATED, *DELTA]
CHUNKED = [chunk_kda, chunk_gated_delta_rule, chunk_delta_rule]
by_name = lambda op: op.__name__

B, T, H, HV, K, V = 2, 6, 2, 4, 8, 5


def good(op, batch=B):
    heads = H if op in DELTA else HV
    x = {
        "q": torch.randn(batch, T, H, K),
        "k": torch.randn(batch, T, H, K),
        "v": torch.randn(batch, T, heads, V),
        "beta": torch.rand(batch, T, heads),
    }
    if op in GATED:
        x["g"] = -torch.rand(batch, T, heads, *([K] if op in KDA else []))
    return x


def refuse(op, match, error=ArgumentError, batch=B, **changes):
    x = {**good(op, batch), **changes}
    with pytest.raises(error, match=match) as caught:
        op(**x)
    return caught.value


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_the_good_call_is_good(op) -> None:
    op(**good(op))


@pytest.mark.parametrize("op", OPS, ids=by_name)
@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g"])
def test_a_wrong_rank_or_shape_names_the_argument(op, name) -> None:
    x = good(op)
    if name not in x:
        pytest.skip("no gate")
    refuse(op, f"`{name}` must have shape", **{name: x[name].unsqueeze(0)})
    if name != "q":
        refuse(op, f"`{name}` must have shape .* from `q`", **{name: x[name][:, :-1]})
    refuse(op, "must have shape", **{name: x[name][:, :, :-1]} if name != "v" else {name: x[name][:1]})


@pytest.mark.parametrize("op", GATED, ids=by_name)
def test_value_heads_must_divide_into_groups(op) -> None:
    x = good(op)
    three = {name: x[name][:, :, :3] for name in ("v", "beta", "g")}
    refuse(op, "multiple of the number of query heads, got HV = 3, H = 2", **three)


@pytest.mark.parametrize("op", DELTA, ids=by_name)
def test_the_delta_rule_has_no_value_groups(op) -> None:
    refuse(op, "`v` must have shape .* H = 2", v=torch.randn(B, T, HV, V))


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_dtypes(op) -> None:
    x = good(op)
    for error in (TypeError, ValueError, AssertionError):
        refuse(
            op,
            "`q`, `k`, `v` must share one floating dtype, got q torch.float32, k torch.float16",
            error,
            k=x["k"].half(),
        )
    integers = {name: x[name].long() for name in ("q", "k", "v")}
    refuse(op, "`q` must be float16", DtypeError, **integers)
    refuse(op, "`beta` must be float16", DtypeError, beta=x["beta"].long())
    refuse(op, "`initial_state` must be float16", DtypeError, initial_state=torch.zeros(B, x["v"].shape[2], K, V).int())
    refuse(op, "`q` must be a tensor, got list", DtypeError, q=[1.0])
    op(**{**x, "beta": x["beta"].bfloat16()})


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_devices(op) -> None:
    x = good(op)
    refuse(op, "one device, got .* k on meta", k=x["k"].to("meta"))
    state = torch.zeros(B, x["v"].shape[2], K, V, device="meta")
    refuse(op, "one device, got .* initial_state on meta", initial_state=state)
    cu = torch.tensor([0, T], device="meta")
    refuse(op, "`cu_seqlens` must be on the device of the inputs, cpu, got meta", batch=1, cu_seqlens=cu)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_state_shape(op) -> None:
    heads = good(op)["v"].shape[2]
    refuse(
        op,
        f"`initial_state` must have shape .* = .2, {heads}, 8, 5., got",
        initial_state=torch.zeros(B, heads, K, V + 1),
    )
    refuse(op, "The number of initial states is expected to be equal", initial_state=torch.zeros(B + 1, heads, K, V))
    refuse(op, "other layout", initial_state=torch.zeros(B, heads, V, K))
    if op in GATED:
        refuse(
            op, "other layout: pass state_v_first=False", state_v_first=True, initial_state=torch.zeros(B, heads, K, V)
        )


@pytest.mark.parametrize("op", OPS, ids=by_name)
@pytest.mark.parametrize(
    ("offsets", "match", "error"),
    [
        (torch.tensor([[0, T]]), "must be 1-D with at least two entries, got shape .1, 2.", ArgumentError),
        (torch.tensor([0]), "must be 1-D with at least two entries, got shape .1.", ArgumentError),
        (torch.tensor([0.0, T]), "must be int32 or int64, got torch.float32", DtypeError),
        (torch.tensor([True, False]), "must be int32 or int64, got torch.bool", DtypeError),
        (torch.tensor([1, T]), "must start at 0, got 1", ArgumentError),
        (torch.tensor([0, 4, 2, T]), "must not decrease, got 4 followed by 2 at index 2", ArgumentError),
        (torch.tensor([0, 4]), "must end at the number of tokens, T = 6, got 4", ArgumentError),
        (torch.tensor([0, T + 1]), "must end at the number of tokens, T = 6, got 7", ArgumentError),
        ([0, T], "must be a tensor, got list", DtypeError),
    ],
    ids=str,
)
def test_offsets(op, offsets, match, error) -> None:
    refuse(op, f"`cu_seqlens` {match}", error, batch=1, cu_seqlens=offsets)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_offsets_and_the_batch(op) -> None:
    heads = good(op)["v"].shape[2]
    refuse(op, "The batch size is expected to be 1 rather than 2", ValueError, cu_seqlens=torch.tensor([0, T]))
    states = torch.zeros(3, heads, K, V)
    cu = torch.tensor([0, 2, T])
    refuse(
        op, "number of initial states is expected to be equal", ValueError, batch=1, cu_seqlens=cu, initial_state=states
    )


@pytest.mark.parametrize("op", CHUNKED, ids=by_name)
def test_offsets_on_the_cpu(op) -> None:
    cu = torch.tensor([0, 2, T])
    refuse(op, "without `cu_seqlens`", batch=1, cu_seqlens_cpu=cu)
    refuse(op, "copy of `cu_seqlens` with 3 entries, got 2", batch=1, cu_seqlens=cu, cu_seqlens_cpu=cu[1:] - 2)
    refuse(op, "same offsets", batch=1, cu_seqlens=cu, cu_seqlens_cpu=torch.tensor([0, 3, T]))
    op(**good(op, 1), cu_seqlens=cu, cu_seqlens_cpu=cu)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_keywords(op) -> None:
    with pytest.raises(TypeError, match="unknown_option"):
        op(**good(op), unknown_option=1)


@pytest.mark.parametrize("op", GATED, ids=by_name)
def test_renamed_and_removed_keywords(op) -> None:
    x = good(op)
    with pytest.raises(DeprecationWarning, match="head_first"):
        op(**x, head_first=True)
    state = torch.randn(B, HV, V, K)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o, _ = op(**x, initial_state=state, transpose_state_layout=True)
    assert torch.equal(o, op(**x, initial_state=state, state_v_first=True)[0])
    with pytest.raises(ValueError, match="transpose_state_layout"):
        op(**x, state_v_first=True, transpose_state_layout=True)


@pytest.mark.parametrize("op", GATED, ids=by_name)
def test_gate_parameters(op) -> None:
    channels = HV * (K if op in KDA else 1)
    refuse(op, "use_gate_in_kernel=True needs `A_log`", use_gate_in_kernel=True)
    refuse(op, "`A_log` was given, but the gate is not computed in the op", A_log=torch.zeros(HV))
    refuse(op, "`dt_bias` was given, but", dt_bias=torch.zeros(channels))
    refuse(op, "`A_log` must have 4 elements", use_gate_in_kernel=True, A_log=torch.zeros(H))
    wrong = torch.zeros(channels + 1)
    refuse(
        op, f"`dt_bias` must have {channels} elements", use_gate_in_kernel=True, A_log=torch.zeros(HV), dt_bias=wrong
    )
    refuse(op, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True", ValueError, allow_neg_eigval=True)


@pytest.mark.parametrize("bound", [None, 0.0, -6.0, 1.0])
def test_the_bound_of_a_safe_gate(bound) -> None:
    refuse(
        chunk_kda,
        "safe_gate=True needs `lower_bound` in",
        ValueError,
        safe_gate=True,
        use_gate_in_kernel=True,
        A_log=torch.zeros(HV),
        lower_bound=bound,
    )


@pytest.mark.parametrize(
    ("op", "allowed"), [(chunk_kda, (32, 64)), (chunk_gdn, (16, 32, 64)), (chunk_delta_rule, (16, 32, 64))]
)
def test_chunk_size(op, allowed) -> None:
    for size in (8, 16, 32, 64, 128):
        if size in allowed:
            op(**good(op), chunk_size=size)
        else:
            refuse(op, "`chunk_size` must be", ValueError, chunk_size=size)
    refuse(op, "`chunk_size` must be an int", TypeError, chunk_size=64.0)
    if op is chunk_kda:
        refuse(op, "^`chunk_size` must be either 32 or 64", ValueError, chunk_size=16)


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_scale_is_a_number(op) -> None:
    refuse(op, "`scale` must be a number or None, got str", DtypeError, scale="big")


@pytest.mark.parametrize("op", [chunk_kda, chunk_gated_delta_rule], ids=by_name)
def test_context_parallelism_says_that_it_is_missing(op) -> None:
    refuse(op, "cp_context", NotImplementedError, cp_context=object())


@pytest.mark.parametrize("op", [*KDA, chunk_gated_delta_rule, chunk_delta_rule], ids=by_name)
def test_required_tensors(op) -> None:
    refuse(op, "`beta` must be a tensor, got NoneType", beta=None)
    if op in GATED:
        refuse(op, "`g` must be a tensor, got NoneType", g=None)


@pytest.mark.parametrize("op", OPS, ids=by_name)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_that_no_op_does_without(op, name) -> None:
    refuse(op, f"`{name}` must be a tensor, got NoneType", **{name: None})


@pytest.mark.parametrize("op", OPS, ids=by_name)
def test_a_state_that_is_no_tensor(op) -> None:
    refuse(op, "`initial_state` must be a tensor, got list", DtypeError, initial_state=[1])


@pytest.mark.parametrize("op", KDA, ids=by_name)
def test_a_bound_that_is_no_number(op) -> None:
    refuse(op, "`lower_bound` must be a number or None, got str", DtypeError, use_gate_in_kernel=True, lower_bound="-5")


def test_recurrent_gdn_needs_what_its_flags_use() -> None:
    x = good(fused_recurrent_gated_delta_rule)
    x.pop("g")
    with pytest.raises(ValueError, match="needs `g`"):
        fused_recurrent_gated_delta_rule(**x, use_gate_in_kernel=True, A_log=torch.zeros(HV))
    x.pop("beta")
    with pytest.raises(ValueError, match="needs `beta`"):
        fused_recurrent_gated_delta_rule(**x, use_beta_sigmoid_in_kernel=True)


def test_the_rest_of_the_delta_rule() -> None:
    with pytest.raises(NotImplementedError, match="chunk_delta_rule"):
        fused_chunk_delta_rule(**good(chunk_delta_rule))
    with pytest.raises(TypeError):
        fused_chunk_delta_rule(1)
    refuse(fused_recurrent_delta_rule, "`scale` must be positive", AssertionError, scale=0.0)
    with pytest.raises(ArgumentError, match="`beta` must have shape"):
        parallel_delta_rule(**{**good(chunk_delta_rule), "beta": torch.rand(B, T, H + 1)})


def test_graph_mode_fixes_the_number_of_sequences() -> None:
    cu = torch.tensor([0, 2, T])
    refuse(
        chunk_kda,
        "max_num_seqs . 1 = 5 entries",
        AssertionError,
        batch=1,
        cu_seqlens=cu,
        use_graph=True,
        max_num_seqs=4,
    )
    refuse(chunk_kda, "must end at", batch=1, cu_seqlens=torch.tensor([0, 2, 4]), max_num_seqs=2)


def test_intermediate_states_are_for_inference() -> None:
    refuse(chunk_kda, "inference_mode", AssertionError, return_intermediate_states=True)
    with torch.inference_mode():
        refuse(chunk_kda, "exclude each other", AssertionError, return_intermediate_states=True, disable_recompute=True)
