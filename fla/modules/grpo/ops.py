# SPDX-License-Identifier: MIT
"""GRPO losses. The log-probability of a token is minus its cross entropy, so that engine does the work over classes."""

from __future__ import annotations

import torch
from torch import Tensor

from fla.backends import CallFacts, dispatch
from fla.modules._dtype import upcast
from fla.modules.fused_cross_entropy.ops import cross_entropy_loss
from fla.ops._common.checks import ArgumentError, check_floating, check_same_device

__all__ = ["fused_grpo_loss", "grpo_loss_torch", "grpo_loss_with_old_logps"]

_IGNORED = -100
_FACTS = CallFacts(
    tensors=("logits",), key="logits", value="logits", initial_state=None, state_v_first=None, cu_seqlens=None
)


def _check(
    logits: Tensor, ref_logp: Tensor, input_ids: Tensor, advantages: Tensor, completion_mask: Tensor | None
) -> None:
    if logits.dim() != 3 or logits.shape[1] < 1:
        raise ArgumentError(f"`logits` must have shape [B, L + 1, V], got {list(logits.shape)}.")
    B, L, V = logits.shape[0], logits.shape[1] - 1, logits.shape[2]
    check_floating(logits=logits, ref_logp=ref_logp, advantages=advantages)
    check_same_device(
        logits=logits,
        ref_logp=ref_logp,
        input_ids=input_ids,
        advantages=advantages,
        completion_mask=completion_mask,
    )
    for name, tensor, shape in (
        ("ref_logp", ref_logp, (B, L)),
        ("advantages", advantages, (B,)),
        ("completion_mask", completion_mask, (B, L)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ArgumentError(f"`{name}` must have shape {list(shape)}, got {list(tensor.shape)}.")
    if input_ids.dim() != 2 or input_ids.shape[0] != B or input_ids.shape[1] < L:
        raise ArgumentError(
            f"`input_ids` must have shape [B, K + L] with B = {B}, L = {L}, got {list(input_ids.shape)}."
        )
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"`input_ids` must be int64 or int32, got {input_ids.dtype}.")
    if input_ids.device.type == "cpu" and L and not torch.compiler.is_compiling():
        ids = input_ids[:, -L:]
        wrong = (ids < 0) | (ids >= V)
        if completion_mask is not None:
            wrong = wrong & completion_mask.bool()
        if wrong.any():
            raise ArgumentError(f"`input_ids` of the completion must lie in [0, {V}), got {int(ids[wrong][0])}.")


def covers(logits: Tensor) -> tuple[bool, str | None]:
    """Verifier of the Triton path."""
    if logits.dtype == torch.float64:
        return False, "the Triton kernels compute in float32, float64 runs in PyTorch"
    return True, None


def grpo_rows(
    logits: Tensor,
    ref_logp: Tensor,
    input_ids: Tensor,
    advantages: Tensor,
    beta: float,
    completion_mask: Tensor | None,
    save_kl: bool,
    inplace: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fused_grpo_loss` on checked arguments; the cross entropy inside is dispatched on its own."""
    B, L, V = logits.shape[0], logits.shape[1] - 1, logits.shape[2]
    # All L + 1 rows, the last one ignored: a slice of the logits would have to be copied.
    target = input_ids.new_full((B, L + 1), _IGNORED)
    ids = input_ids[:, input_ids.shape[1] - L :]
    keep = None if completion_mask is None else completion_mask.bool()
    target[:, :L] = ids if keep is None else ids.where(keep, _IGNORED)
    # A traced graph may not write over its input.
    inplace = inplace and not torch.compiler.is_compiling()
    cost, _ = cross_entropy_loss(logits.reshape(-1, V), target.flatten(), inplace_backward=inplace)
    lp = -cost.view(B, L + 1)[:, :L]
    d = ref_logp.detach().to(lp.dtype) - lp
    if keep is not None:
        # Before exp: what stands at a masked place, even NaN, must not reach a gradient.
        d = d.where(keep, 0.0)
    kl = torch.expm1(d) - d
    loss = beta * kl - advantages.detach().to(lp.dtype)[:, None] * torch.exp(lp - lp.detach())
    if keep is not None:
        loss = loss.where(keep, 0.0)
    return (loss, kl) if save_kl else loss


# Without `outputs`: torch.compile traces the body, and the engine's gradient is computed once, not run again.
@dispatch("modules", facts=_FACTS, validate=_check, triton="fla.modules.grpo.ops:grpo_rows", triton_verifier=covers)
def fused_grpo_loss(
    logits: Tensor,
    ref_logp: Tensor,
    input_ids: Tensor,
    advantages: Tensor,
    beta: float = 0.1,
    completion_mask: Tensor | None = None,
    save_kl: bool = False,
    inplace: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """GRPO loss of every token right after sampling, when the policy still equals the one that sampled.

    With ``lp = log_softmax(logits)[id]`` and ``d = ref_logp - lp``: ``kl = exp(d) - d - 1`` and
    ``loss = beta * kl - A * exp(lp - lp.detach())``, whose value is ``beta * kl - A``.

    Args:
        logits: ``[B, L + 1, V]``; row `t` predicts the completion's token `t`, the last row is not used.
        ref_logp: ``[B, L]``, log-probabilities under the reference model; a constant.
        input_ids: ``[B, K + L]``, prompt and completion, int64 or int32.
        advantages: ``[B]``, `A` of every sequence; a constant.
        beta: weight of the KL divergence.
        completion_mask: ``[B, L]``, zero for tokens that do not count; their ids may be anything.
        save_kl: return the divergence too.
        inplace: the backward pass may overwrite ``logits`` with their gradient.

    Returns:
        ``loss`` ``[B, L]`` float32 (float64 for float64 logits), or ``(loss, kl)``; 0 where masked. Both carry
        gradients.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit, or (on the CPU) an id that is not a class.
    """
    return grpo_rows(logits, ref_logp, input_ids, advantages, beta, completion_mask, save_kl, inplace)


def grpo_loss_torch(
    logits: Tensor,
    ref_logp: Tensor,
    input_ids: Tensor,
    advantages: Tensor,
    beta: float = 0.1,
    completion_mask: Tensor | None = None,
    save_kl: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`fused_grpo_loss` written out. For tests."""
    L = logits.shape[1] - 1
    every = torch.log_softmax(upcast(logits)[:, :L], -1)
    lp = every.gather(-1, input_ids[:, input_ids.shape[1] - L :, None].long()).squeeze(-1)
    d = ref_logp.to(lp.dtype) - lp
    kl = torch.exp(d) - d - 1
    loss = beta * kl - torch.exp(lp - lp.detach()) * advantages.to(lp.dtype)[:, None]
    if completion_mask is not None:
        loss, kl = loss * completion_mask, kl * completion_mask
    return (loss, kl) if save_kl else loss


def grpo_loss_with_old_logps(
    logps: Tensor,
    ref_logps: Tensor,
    old_logps: Tensor,
    pad_mask: Tensor,
    logits_to_keep: int,
    rewards: Tensor,
    beta: float = 0.2,
    epsilon: float = 0.2,
) -> Tensor:
    """The clipped GRPO objective, negated and averaged over the tokens that count; a scalar to minimise.

    ``-sum(m * (min(A * r, A * clip(r, 1 - eps, 1 + eps)) - beta * kl)) / sum(m)`` with ``r = exp(logps - old_logps)``,
    ``kl = exp(d) - d - 1`` for ``d = ref_logps - logps``, and `A` the rewards of the group less their mean, over their
    standard deviation (unbiased, plus 1e-8).

    Args:
        logps: ``[B, T]``, log-probabilities of the tokens; the last ``logits_to_keep`` count.
        ref_logps, old_logps: ``[B, T]``, those under the reference model and the model that sampled; constants.
        pad_mask: ``[B, T']``, its last ``logits_to_keep`` columns are zero for tokens that do not count.
        logits_to_keep: length of the completions.
        rewards: `B` rewards, one for each sequence of the group.
        beta: weight of the KL divergence.
        epsilon: clip range of the ratio.

    Returns:
        A float32 scalar (float64 for float64 inputs), 0 when no token counts.

    Raises:
        ArgumentError: a group of one, or shapes or dtypes that do not fit.
    """
    check_floating(logps=logps, ref_logps=ref_logps, old_logps=old_logps)
    if logps.dim() != 2 or logps.shape[0] < 2:
        raise ArgumentError(f"`logps` must have shape [B, T] with a group of B > 1 samples, got {list(logps.shape)}.")
    B = logps.shape[0]
    for name, tensor in (("logps", logps), ("ref_logps", ref_logps), ("old_logps", old_logps), ("pad_mask", pad_mask)):
        if tensor.dim() != 2 or tensor.shape[0] != B or not 0 <= logits_to_keep <= tensor.shape[1]:
            raise ArgumentError(
                f"`{name}` must have shape [B, T] with B = {B} and T >= logits_to_keep = {logits_to_keep}, "
                f"got {list(tensor.shape)}."
            )
    if rewards.numel() != B:
        raise ArgumentError(f"`rewards` must have {B} elements, one for each sample, got {list(rewards.shape)}.")

    def tail(t: Tensor) -> Tensor:
        return t[:, t.shape[1] - logits_to_keep :]

    keep = tail(pad_mask).bool()
    lp = upcast(tail(logps))
    d = (upcast(tail(ref_logps)).detach() - lp).where(keep, 0.0)
    ratio = torch.exp((lp - upcast(tail(old_logps)).detach()).where(keep, 0.0))
    r = rewards.detach().flatten().to(lp.dtype)
    advantage = ((r - r.mean()) / (r.std() + 1e-8))[:, None]
    gain = torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - epsilon, 1 + epsilon))
    objective = (gain - beta * (torch.expm1(d) - d)).where(keep, 0.0)
    return -objective.sum() / keep.sum().clamp(min=1)
