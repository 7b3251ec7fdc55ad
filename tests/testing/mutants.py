# SPDX-License-Identifier: MIT
"""Backends that are wrong on purpose, on top of core's PyTorch path of ``chunk_kda``, and one that is right.

Each says in ``killers`` which cases of the kit must catch it, and in ``says`` what one of them must say. The kit is no
better than what it catches here: whoever finds a wrong backend that passes adds it to this list first.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from fla.backends import BaseBackend, Capability, needs_backward, reference_only, use_backend
from fla.ops.kda import chunk_kda

core = chunk_kda.op.fn
CHUNK = 64


class Right(BaseBackend):
    """Right in everything."""

    backend_type = "right"
    killers: tuple[str, ...] = ()
    says = ""

    def chunk_kda(self, **x: Any) -> Any:
        return core(**x)


class RightForwardOnly(Right):
    """Right, bfloat16 and float32 at two pairs of head dimensions, without gradients, GVA or V-first states."""

    backend_type = "right_forward_only"
    capability = Capability(
        device_types=("cpu",),
        dtypes=("bfloat16", "float32"),
        head_dims=((32, 32), (32, 16)),
        gva=False,
        varlen=True,
        initial_state=True,
        state_layouts=("k_first",),
        backward=False,
    )

    def chunk_kda_verifier(self, use_gate_in_kernel: bool, lower_bound: float | None) -> Any:
        if use_gate_in_kernel and lower_bound is None:
            return False, "only the bounded gate is computed in the kernel"
        return True, None

    def chunk_kda(self, **x: Any) -> Any:
        with torch.no_grad():
            return core(**x)


class RightFused(Right):
    """Right, for the one form in which everything happens in the kernel."""

    backend_type = "right_fused"

    def chunk_kda_verifier(self, **x: Any) -> Any:
        flags = ("use_gate_in_kernel", "use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "safe_gate")
        missing = [flag for flag in flags if not x[flag]]
        return (False, f"{missing[0]} must be True") if missing else (True, None)


class RightPair(Right):
    """Right, with a forward and a backward of its own for compiled training."""

    backend_type = "right_pair"

    def chunk_kda_fwd(self, **x: Any) -> Any:
        return core(**x), ()

    def chunk_kda_bwd(self, args: Any, saved: Any, grads: Any, needed: Any) -> list[Tensor | None]:
        fresh = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in args]
        with torch.enable_grad():
            results = [x for x in chunk_kda.op.body(*fresh) if x is not None]
        leaves = [x for x in fresh if isinstance(x, Tensor)]
        wanted = [x for x, need in zip(leaves, needed, strict=True) if need]
        found = iter(torch.autograd.grad(results, wanted, grads, allow_unused=True))
        return [next(found) if need else None for need in needed]


class ShuffledPair(RightPair):
    """Its backward mixes up q and k."""

    backend_type = "shuffled_pair"
    killers = ("backward-pair",)

    def chunk_kda_bwd(self, args: Any, saved: Any, grads: Any, needed: Any) -> list[Tensor | None]:
        dq, dk, *rest = super().chunk_kda_bwd(args, saved, grads, needed)
        return [dk, dq, *rest]


class WrongScale(Right):
    """Takes the default scale from the value dimension."""

    backend_type = "wrong_scale"
    killers = ("forward-plain-float32", "backward-plain")

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "scale": x["v"].shape[-1] ** -0.5 if x["scale"] is None else x["scale"]})


class IgnoresScale(Right):
    backend_type = "ignores_scale"
    killers = ("scale-1.0", "scale-0.3")

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "scale": None})


class StaleBuffer(Right):
    """Hands out the same output buffer again."""

    backend_type = "stale_buffer"
    killers = ("repeatable", "repeatable-no_state")
    says = "a later call changed the output of an earlier one"

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, Tensor] = {}

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if o.requires_grad:
            return o, state
        buffer = self.kept.setdefault((o.shape, o.dtype), torch.empty_like(o))
        return buffer.copy_(o), state


class AccumulatesState(Right):
    """Adds final states into a workspace that is cleared once."""

    backend_type = "accumulates_state"
    killers = ("repeatable",)
    says = "differs from run to run"

    def __init__(self) -> None:
        super().__init__()
        self.workspace: dict[Any, Tensor] = {}

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if state is None:
            return o, None
        left = self.workspace.get(state.shape)
        self.workspace[state.shape] = state.detach().clone()
        return o, state if left is None else state + 1e-7 * left


class UnwrittenState(Right):
    """Does not write the final state of an empty sequence."""

    backend_type = "unwritten_state"
    killers = ("poisoned-packed-several_empty", "poisoned-packed-all_empty")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if state is None or x["cu_seqlens"] is None or needs_backward(x):
            return o, state
        written = torch.empty_like(state)
        filled = x["cu_seqlens"].diff() > 0
        written[filled] = state[filled]
        return o, written


class UnwrittenTail(Right):
    """Leaves the rows of a last partial chunk of one token unwritten."""

    backend_type = "unwritten_tail"
    killers = ("poisoned-T65", "poisoned-T1")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if needs_backward(x) or o.shape[1] % CHUNK != 1 or x["cu_seqlens"] is not None:
            return o, state
        written = torch.empty_like(o)
        written[:, :-1] = o[:, :-1]
        return written, state


class WrongStateLayout(Right):
    """Returns K-first states whatever is asked for; the shapes are square."""

    backend_type = "wrong_state_layout"
    capability = Capability(head_dims=((32, 32),))
    killers = ("state-v_first-final", "state-v_first-initial-final", "backward-v_first")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        return o, state.mT.contiguous() if state is not None and x["state_v_first"] else state


class ReadsStateTransposed(Right):
    """Takes V-first initial states for K-first ones; the shapes are square."""

    backend_type = "reads_state_transposed"
    capability = Capability(head_dims=((32, 32),))
    killers = ("state-v_first-initial", "state-v_first-T1", "state-v_first-T0")

    def chunk_kda(self, **x: Any) -> Any:
        if x["state_v_first"] and x["initial_state"] is not None:
            x["initial_state"] = x["initial_state"].mT
        return core(**x)


class DroppedGradient(Right):
    """Forgets the gradient of beta."""

    backend_type = "dropped_gradient"
    killers = ("backward-plain", "backward-of_beta_alone")
    says = "the gradient of beta is missing"

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "beta": x["beta"].detach()})


class DetachedState(Right):
    """No gradient flows back through the final state."""

    backend_type = "detached_state"
    killers = ("backward-through_state", "backward-plain")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        return o, None if state is None else state.detach()


class NoGraph(Right):
    """Accepts calls that need a gradient and returns results that know of none."""

    backend_type = "no_graph"
    killers = ("backward-plain", "backward-T65")
    says = "takes no part in autograd"

    def chunk_kda(self, **x: Any) -> Any:
        with torch.no_grad():
            return core(**x)


class _Contiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor) -> Tensor:
        return o.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        flat = grad.as_strided((min(grad.numel(), grad.untyped_storage().nbytes() // grad.element_size()),), (1,))
        return torch.cat([flat, flat.new_zeros(grad.numel() - flat.numel())]).view(grad.shape)


class ContiguousUpstream(Right):
    """Its backward takes the incoming gradient for contiguous."""

    backend_type = "contiguous_upstream"
    killers = ("backward-of_sum",)

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        return _Contiguous.apply(o), state


class BoundaryDecay(Right):
    """Skips the decay of the first token of each packed sequence."""

    backend_type = "boundary_decay"
    killers = ("packed-two", "packed-one_token_each", "backward-packed-middle_empty")

    def chunk_kda(self, **x: Any) -> Any:
        if x["cu_seqlens"] is not None and not x["use_gate_in_kernel"]:
            first = torch.zeros(x["g"].shape[1] + 1, dtype=torch.bool)
            first[x["cu_seqlens"].long()] = True
            x["g"] = x["g"].masked_fill(first[:-1].view(1, -1, 1, 1), 0.0)
        return core(**x)


class LeakingState(Right):
    """Does not reset the state after a sequence of whole chunks."""

    backend_type = "leaking_state"
    killers = ("packed-whole_chunks-no_state", "packed-one_token_between-no_state")

    def chunk_kda(self, **x: Any) -> Any:
        if x["cu_seqlens"] is None or x["initial_state"] is not None:
            return core(**x)
        bounds = x["cu_seqlens"].tolist()
        kept = [0, *(b for a, b in itertools.pairwise(bounds) if (b - a) % CHUNK or b == a)]
        if kept[-1] != bounds[-1]:
            kept.append(bounds[-1])
        o, _ = core(**{**x, "cu_seqlens": torch.tensor(kept), "cu_seqlens_cpu": None})
        return o, core(**x)[1]


class IgnoredInitialState(Right):
    backend_type = "ignored_initial_state"
    killers = ("state-k_first-initial", "state-k_first-T0", "backward-of_state_alone")

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "initial_state": None})


class MutatesInput(Right):
    """Normalises keys where they lie, in the form that normalises at all."""

    backend_type = "mutates_input"
    killers = ("inputs_kept-l2norm",)
    says = "k was changed"

    def chunk_kda(self, **x: Any) -> Any:
        result = core(**x)
        if x["use_qk_l2norm_in_kernel"] and not needs_backward(x):
            x["k"].copy_(torch.nn.functional.normalize(x["k"], dim=-1))
        return result


class MutatesInBackward(Right):
    backend_type = "mutates_in_backward"
    killers = ("backward-inputs_kept",)
    says = "beta was changed"

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if o.requires_grad:
            o.register_hook(lambda grad: (x["beta"].data.mul_(0.5), None)[1])
        return o, state


class MutatesOffsets(Right):
    backend_type = "mutates_offsets"
    killers = ("inputs_kept-packed",)
    says = "cu_seqlens was changed"

    def chunk_kda(self, **x: Any) -> Any:
        result = core(**x)
        if x["cu_seqlens"] is not None:
            x["cu_seqlens"].data.add_(1)
        return result


class LastChunk(Right):
    """The last token of a partial chunk does not see itself."""

    backend_type = "last_chunk"
    killers = ("forward-plain-float32", "length-T65")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if o.shape[1] % CHUNK and x["cu_seqlens"] is None:
            beta = x["beta"].clone()
            beta[:, -1] = -1e4 if x["use_beta_sigmoid_in_kernel"] else 0.0
            o = core(**{**x, "beta": beta})[0]
        return o, state


class OneTokenTail(Right):
    """Ignores the last token where it is alone in its chunk."""

    backend_type = "one_token_tail"
    killers = ("length-T65", "length-T129", "backward-T65")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if o.shape[1] % CHUNK == 1 and o.shape[1] > 1:
            o = torch.cat([o[:, :-1], torch.zeros_like(o[:, -1:])], 1)
        return o, state


class SkipsSingleTokens(Right):
    """Packed sequences of one token are not worth a block."""

    backend_type = "skips_single_tokens"
    killers = ("packed-one_token_each", "packed-one_token_between")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if x["cu_seqlens"] is not None:
            alone = x["cu_seqlens"][:-1][x["cu_seqlens"].diff() == 1].long()
            o = o.index_fill(1, alone, 0.0)
        return o, state


class Overclaims(Right):
    """Accepts the bounded gate and computes the other one."""

    backend_type = "overclaims"
    killers = ("forward-bounded_gate-float32", "forward-all_bounded-float32", "backward-bounded_gate")

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "lower_bound": None})


class OverclaimsGroups(Right):
    """Accepts more value heads than key heads and fails on them."""

    backend_type = "overclaims_groups"
    killers = ("gva-x2-T70", "backward-gva-x3")

    def chunk_kda(self, **x: Any) -> Any:
        if x["q"].shape[2] != x["v"].shape[2]:
            raise RuntimeError("q and v must have as many heads")
        return core(**x)


class WrongDtype(Right):
    """Returns 16-bit outputs as float32."""

    backend_type = "wrong_dtype"
    killers = ("forward-plain-bfloat16", "forward-plain-float16")
    says = "output must have dtype torch.bfloat16"

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        return o.float() if o.dtype.itemsize == 2 else o, state


class NarrowState(Right):
    """Rounds final states to the dtype of q."""

    backend_type = "narrow_state"
    killers = ("forward-plain-bfloat16",)
    says = "final state must have dtype torch.float32"

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        return o, None if state is None else state.to(o.dtype)


class UnaskedState(Right):
    """Returns a final state that nobody asked for."""

    backend_type = "unasked_state"
    killers = ("state-k_first", "backward-no_state")
    says = "final state must be None"

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "output_final_state": True})


class HandsOn(Right):
    """Runs nothing of its own: it calls the op again, without itself."""

    backend_type = "hands_on"
    killers = ("forward-plain-float32",)
    says = "hands the call on instead of computing it"

    def chunk_kda(self, **x: Any) -> Any:
        with use_backend("torch"):
            return chunk_kda(**x)


class HandsOnUnseen(HandsOn):
    backend_type = "hands_on_unseen"

    def chunk_kda(self, **x: Any) -> Any:
        with reference_only():
            return chunk_kda(**x)


class Fails(Right):
    """Accepts everything, and raises; users see core's results and nothing else."""

    backend_type = "fails"
    killers = ("forward-plain-float32",)

    def chunk_kda(self, **x: Any) -> Any:
        raise RuntimeError("no kernel image is available")


class RefusesAll(Right):
    """Never runs."""

    backend_type = "refuses_all"
    killers = ("usable",)
    says = "no form of the op is accepted"

    def chunk_kda_verifier(self, **x: Any) -> Any:
        return False, "K must be 96"


class RefusesSilently(Right):
    """Refuses GVA and says nothing."""

    backend_type = "refuses_silently"
    killers = ("gva-x2-T70",)
    says = "refuses without a reason"

    def chunk_kda_verifier(self, q: Tensor, v: Tensor) -> Any:
        return q.shape[2] == v.shape[2]


class BrokenVerifier(Right):
    """Its verifier has a bug that shows with packed sequences."""

    backend_type = "broken_verifier"
    killers = ("packed-two",)
    says = "the verdict is an error"

    def chunk_kda_verifier(self, cu_seqlens: Tensor | None) -> Any:
        return cu_seqlens is None or cu_seqlens.number_of_sequences > 1  # type: ignore[attr-defined]


class ReadsValues(Right):
    """Its verifier reads values, which meta tensors do not have."""

    backend_type = "reads_values"
    killers = ("meta-packed",)
    says = "explain on meta tensors"

    def chunk_kda_verifier(self, cu_seqlens: Tensor | None) -> Any:
        return cu_seqlens is None or int(cu_seqlens[-1]) >= 0, "the last offset is negative"


class Underdelivers(Right):
    """Declares gradients and refuses every call that needs one."""

    backend_type = "underdelivers"
    capability = Capability(backward=True, dtypes=("float32", "bfloat16"))
    killers = ("declared-backward",)
    says = "the capability declares this"

    def chunk_kda_verifier(self, q: Tensor, k: Tensor) -> Any:
        return not needs_backward((q, k)), "no backward"


class NotDeterministic(Right):
    """Rounds differently from run to run."""

    backend_type = "not_deterministic"
    killers = ("repeatable", "repeatable-packed", "backward-repeatable")
    says = "differs from run to run"

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        return o * (1 + 1e-6 * torch.rand_like(o)), state


class NotDeterministicBackward(Right):
    backend_type = "not_deterministic_backward"
    killers = ("backward-repeatable",)
    says = "differs from run to run"

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if o.requires_grad:
            o.register_hook(lambda grad: grad * (1 + 1e-6 * torch.rand_like(grad)))
        return o, state


class WrongHeads(Right):
    """Gives value head i the key head i % H."""

    backend_type = "wrong_heads"
    killers = ("gva-x2-T70", "gva-x3-T1", "backward-gva-x2")

    def chunk_kda(self, **x: Any) -> Any:
        group = x["v"].shape[2] // x["q"].shape[2]
        return core(**{**x, "q": x["q"].repeat(1, 1, group, 1), "k": x["k"].repeat(1, 1, group, 1)})


class SwallowsInt32(Right):
    """Reads int64 offsets, and takes int32 ones for one sequence."""

    backend_type = "swallows_int32"
    killers = ("packed-int32",)

    def chunk_kda(self, **x: Any) -> Any:
        if x["cu_seqlens"] is not None and x["cu_seqlens"].dtype == torch.int32:
            N = x["cu_seqlens"].numel() - 1
            offsets = torch.tensor([0] * N + [x["q"].shape[1]])
            return core(**{**x, "cu_seqlens": offsets, "cu_seqlens_cpu": None})
        return core(**x)


class AliasesState(Right):
    """Without tokens the initial state itself is the final state."""

    backend_type = "aliases_state"
    killers = ("inputs_kept-T0",)
    says = "final state lies in the memory of state"

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if o.shape[1] == 0 and state is not None and x["initial_state"] is not None:
            return o, x["initial_state"]
        return o, state


class SharedResults(Right):
    """Output and final state are two views of one allocation."""

    backend_type = "shared_results"
    killers = ("inputs_kept",)
    says = "the final state lies in the memory of output"

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if state is None or state.dtype != o.dtype:
            return o, state
        both = torch.cat([o.flatten(), state.flatten()])
        return both[: o.numel()].view(o.shape), both[o.numel() :].view(state.shape)


class StatesOfOthers(Right):
    """Numbers the final states by the sequences that have tokens."""

    backend_type = "states_of_others"
    killers = ("packed-leading_empty", "packed-middle_empty", "backward-packed-leading_empty")

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if state is not None and x["cu_seqlens"] is not None:
            filled = x["cu_seqlens"].diff() > 0
            state = torch.cat([state[filled], state[~filled]])
        return o, state


class AssumesContiguous(Right):
    """Takes v for contiguous."""

    backend_type = "assumes_contiguous"
    killers = ("strides-head_first", "strides-column", "strides-padded", "backward-strides-head_first")

    def chunk_kda(self, **x: Any) -> Any:
        v = x["v"]
        strides = torch.empty(v.shape, device="meta").stride()
        return core(**{**x, "v": v.as_strided(v.shape, strides)})


class NeedsStateInFloat32(Right):
    """Reads any initial state as if it were float32."""

    backend_type = "needs_state_in_float32"
    killers = ("state-in-bfloat16", "state-in-float16")

    def chunk_kda(self, **x: Any) -> Any:
        state = x["initial_state"]
        if state is not None and state.dtype.itemsize == 2:
            x["initial_state"] = torch.zeros_like(state, dtype=torch.float32)
        return core(**x)


class InferenceOnlyState(Right):
    """Keeps what it computed under inference_mode and no_grad needing a gradient."""

    backend_type = "always_needs_grad"
    killers = ("without_grad",)

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        return o.requires_grad_() if not o.requires_grad and not o.is_inference() else o, state


class GateOfFirstHead(Right):
    """Uses one rate of decay for all heads in the gate that it computes."""

    backend_type = "gate_of_first_head"
    killers = ("forward-gate-float32", "backward-gate")

    def chunk_kda(self, **x: Any) -> Any:
        if x["A_log"] is not None:
            x["A_log"] = x["A_log"][:1].expand_as(x["A_log"])
        return core(**x)


class GateInBfloat16(Right):
    """Rounds gates that come in float32."""

    backend_type = "gate_in_bfloat16"
    killers = ("forward-plain-float32",)

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "g": x["g"].bfloat16()})


class StateGradientTransposed(Right):
    """The gradient of a V-first initial state is K-first."""

    backend_type = "state_gradient_transposed"
    capability = Capability(head_dims=((32, 32),))
    killers = ("backward-v_first",)

    def chunk_kda(self, **x: Any) -> Any:
        state = x["initial_state"]
        if state is not None and x["state_v_first"]:
            # The right value, the gradient of its transpose.
            x["initial_state"] = state.detach() + (state.mT - state.mT.detach())
        return core(**x)


class LeavesModesOn(Right):
    """Leaves grad mode off behind it."""

    backend_type = "leaves_modes_on"
    killers = ("inputs_kept", "backward-inputs_kept")
    says = "grad mode"

    def chunk_kda(self, **x: Any) -> Any:
        result = core(**x)
        torch.set_grad_enabled(False)
        return result


class SeedsGenerator(Right):
    """Sets the seed of the caller's random numbers."""

    backend_type = "seeds_generator"
    killers = ("inputs_kept",)
    says = "random"

    def chunk_kda(self, **x: Any) -> Any:
        torch.manual_seed(0)
        return core(**x)


class ForgetsIntermediateStates(Right):
    """Returns the states after chunks for those before."""

    backend_type = "forgets_intermediate_states"
    killers = ("forward-intermediate_states-float32",)

    def chunk_kda(self, **x: Any) -> Any:
        result = core(**x)
        return (*result[:2], result[2].roll(-1, 1)) if x["return_intermediate_states"] else result


class IgnoresIntermediateStates(Right):
    """Accepts the flag and does not look at it."""

    backend_type = "ignores_intermediate_states"
    killers = ("forward-intermediate_states-float32",)
    says = "3 results are due, got 2"

    def chunk_kda(self, **x: Any) -> Any:
        return core(**{**x, "return_intermediate_states": False})


class UnwrittenPadding(Right):
    """In graph mode, leaves the rows after the last sequence unwritten."""

    backend_type = "unwritten_padding"
    killers = ("poisoned-graph",)

    def chunk_kda(self, **x: Any) -> Any:
        o, state = core(**x)
        if not x["use_graph"] or x["cu_seqlens"] is None or needs_backward(x):
            return o, state
        written, end = torch.empty_like(o), int(x["cu_seqlens"][-1])
        written[:, :end] = o[:, :end]
        return written, state


def _all(base: type[Right]) -> list[type[Right]]:
    return [found for child in base.__subclasses__() for found in (child, *_all(child))]


RIGHT: tuple[type[Right], ...] = (Right, RightForwardOnly, RightFused, RightPair)
MUTANTS: tuple[type[Right], ...] = tuple(m for m in _all(Right) if m not in RIGHT)
