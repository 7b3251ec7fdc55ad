# SPDX-License-Identifier: MIT
"""The KDA models: keys, losses, outputs, packing, checkpointing, saving, initialisation."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor, nn

from fla.models import KDAConfig, KDAForCausalLM, KDAModel
from fla.models.utils import Cache
from fla.modules import FusedCrossEntropyLoss, FusedLinearCrossEntropyLoss
from fla.utils import assert_close

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "hidden_ratio": 2,
    "intermediate_size": 40,
}


# 4.56 renamed it.
DTYPE = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"


def make(**kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(**{**TINY, **kwargs}))
    with torch.no_grad():  # logits apart from zero, so that differences show
        for p in model.parameters():
            p.mul_(1 if p.dim() < 2 else 4)
    return model


def tokens(B: int = 2, T: int = 12) -> Tensor:
    torch.manual_seed(1)
    return torch.randint(3, 61, (B, T))


def test_class_attributes():
    assert KDAForCausalLM.base_model_prefix == "model"
    assert KDAForCausalLM._no_split_modules == ["KDABlock"]
    assert KDAForCausalLM.__name__ == KDAForCausalLM.__qualname__ == "KDAForCausalLM"
    assert "lm_head.weight" in KDAForCausalLM._tied_weights_keys
    assert type(make().model) is KDAModel
    assert type(make().model.layers[0]).__name__ == "KDABlock"


def test_models_are_copied_and_pickled():
    model, x = make().eval(), tokens()
    with torch.no_grad():
        ref = model(x).logits
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x).logits, ref)


# Losses


def reference_loss(model: Any, x: Tensor, labels: Tensor) -> Tensor:
    logits = model(x).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fuse", [True, False])
def test_loss_and_gradients_of_every_criterion(training: bool, fuse: bool):
    model, x = make(fuse_cross_entropy=fuse).train(training), tokens()
    labels = x.clone()
    labels[0, :5] = -100
    out = model(x, labels=labels)
    # The linear loss runs in training only, and never forms the logits.
    assert (out.logits is None) == (training and fuse)
    ref = reference_loss(model, x, labels)
    assert_close("loss", ref, out.loss, 1e-5)
    parameters = list(model.parameters())
    for e, g in zip(torch.autograd.grad(ref, parameters), torch.autograd.grad(out.loss, parameters), strict=True):
        assert_close("grad", e, g, 1e-4)


# G19
@pytest.mark.parametrize("training", [True, False])
def test_logits_without_labels(training: bool):
    assert make().train(training)(tokens()).logits.shape == (2, 12, 61)


@pytest.mark.parametrize("fuse", [True, False])
def test_shifted_labels_and_item_counts(fuse: bool):
    model, x = make(fuse_cross_entropy=fuse), tokens()
    shifted = torch.cat([x[:, 1:], torch.full((2, 1), -100)], 1)
    plain = model(x, labels=x).loss
    assert_close("loss", plain, model(x, shift_labels=shifted).loss, 1e-6)
    for count in (44, torch.tensor(44)):
        assert_close("loss", plain * 22 / 44, model(x, labels=x, num_items_in_batch=count).loss, 1e-5)


def test_own_criterion():
    model, x = make().eval(), tokens()
    model.criterion = nn.CrossEntropyLoss(ignore_index=7, label_smoothing=0.1)
    out = model(x, labels=x, num_items_in_batch=10)
    targets = torch.cat([x[:, 1:], torch.full((2, 1), 7)], 1).flatten()
    ref = F.cross_entropy(out.logits.flatten(0, 1), targets, ignore_index=7, label_smoothing=0.1, reduction="sum") / 10
    assert_close("loss", ref, out.loss, 1e-5)
    assert model.criterion.reduction == "mean"
    model.train()
    model.criterion = FusedLinearCrossEntropyLoss(num_chunks=2)
    model(x, labels=x).loss.backward()
    model.criterion = nn.Identity()
    with pytest.raises(ValueError, match="reduction"):
        model.eval()(x, labels=x, num_items_in_batch=3)


def test_l2warp_in_both_losses():
    def gradient(training: bool, fuse: bool) -> Tensor:
        model = make(use_l2warp=True, fuse_cross_entropy=fuse).train(training)
        model(tokens(), labels=tokens()).loss.backward()
        return model.lm_head.weight.grad

    ref = make()
    logits = ref(tokens()).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    peak = logits.max(-1).values
    torch.autograd.backward([loss, peak], [torch.ones(()), peak.detach() * 1e-4 / peak.numel()])
    for training, fuse in ((True, True), (False, True), (False, False)):
        assert_close("grad", ref.lm_head.weight.grad, gradient(training, fuse), 1e-5)


# Outputs


# TR1: both names.
@pytest.mark.filterwarnings("ignore:`num_logits_to_keep`")
def test_positions_to_keep():
    model, x = make().eval(), tokens()
    full = model(x).logits
    assert_close("logits", full[:, -1:], model(x, logits_to_keep=1).logits, 1e-6)
    assert_close("logits", full[:, -3:], model(x, num_logits_to_keep=3).logits, 1e-6)
    assert_close("logits", full[:, [0, 5]], model(x, logits_to_keep=torch.tensor([0, 5])).logits, 1e-6)
    assert model(x, logits_to_keep=None).logits.shape == full.shape
    assert model(x, logits_to_keep=1, labels=x).logits.shape == full.shape
    with pytest.raises(ValueError, match="num_logits_to_keep"):
        model(x, logits_to_keep=1, num_logits_to_keep=3)


def test_tuple_output_and_hidden_states():
    model, x = make().eval(), tokens()
    out = model(x, labels=x, output_hidden_states=True, use_cache=True)
    values = model(x, labels=x, output_hidden_states=True, use_cache=True, return_dict=False)
    assert len(values) == 4
    assert torch.equal(values[0], out.loss)
    assert torch.equal(values[1], out.logits)
    assert isinstance(values[2], Cache)
    assert len(values[3]) == 3
    assert torch.equal(values[3][0], model.model.embeddings(x))
    assert_close("last", model.model(x).last_hidden_state, values[3][-1], 1e-6)
    assert len(model.model(x, return_dict=False)) == 2
    assert len(make()(x, return_dict=False)) == 1


def test_use_cache_follows_the_configuration_and_the_mode():
    x = tokens()
    assert isinstance(make().eval()(x).past_key_values, Cache)
    assert make()(x).past_key_values is None
    assert make(use_cache=False).eval()(x).past_key_values is None


def test_inputs_are_ids_or_embeddings():
    model, x = make().eval(), tokens()
    assert torch.equal(model(inputs_embeds=model.model.embeddings(x)).logits, model(x).logits)
    for kwargs in ({}, {"input_ids": x, "inputs_embeds": model.model.embeddings(x)}):
        with pytest.raises(ValueError, match="exactly one"):
            model(**kwargs)


def test_fused_norms_and_mlp_change_nothing():
    x = tokens()
    ref = make().eval()(x).logits
    for flags in ({"fuse_norm": False}, {"fuse_swiglu": False}):
        assert_close("logits", ref, make(**flags).eval()(x).logits, 1e-5)


def test_attention_weights_are_not_there():
    assert make().eval()(tokens(), output_attentions=True).attentions is None


# Packing and padding


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_packed_training_is_separate_training(checkpointing: bool):
    packed, separate = make(), make()
    if checkpointing:
        packed.gradient_checkpointing_enable()
    x = tokens(3, 11)
    rows = [x[0], x[1, :4], x[2]]
    cu = torch.tensor([0, 11, 15, 26])
    labels = torch.cat([torch.cat([torch.tensor([-100]), row[1:]]) for row in rows])[None]
    loss = packed(torch.cat(rows)[None], labels=labels, cu_seqlens=cu, num_items_in_batch=1).loss
    ref = sum(separate(row[None], labels=row[None], num_items_in_batch=1).loss for row in rows)
    assert_close("loss", ref, loss, 1e-5)
    ref.backward()
    loss.backward()
    for (name, a), b in zip(separate.named_parameters(), packed.parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-4)


def test_a_batch_and_the_same_batch_packed():
    model, x = make(), tokens(4, 16)
    ref = model.model(x).last_hidden_state
    out = model.model(x.view(1, -1), cu_seqlens=torch.arange(0, 65, 16, dtype=torch.int32)).last_hidden_state
    assert_close("hidden", ref.reshape(1, 64, -1), out, 1e-4)


def test_padding_changes_no_valid_position():
    model, x = make().eval(), tokens()
    mask = torch.ones_like(x)
    mask[0, :4] = 0
    logits = model(x, attention_mask=mask).logits
    assert_close("logits", model(x[:1, 4:]).logits, logits[:1, 4:], 1e-5)
    assert_close("logits", model(x[1:]).logits, logits[1:], 1e-5)


# Training


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing(reentrant: bool, method: str):
    x, models = tokens(), [make(), make()]
    enable = getattr(models[1], method, None)
    if enable is None:
        pytest.skip(f"this transformers has no {method}")
    enable({"use_reentrant": reentrant})
    models[1].enable_input_require_grads()
    losses = [model(x, labels=x, use_cache=True).loss for model in models]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert_close(name, a.grad, b.grad, 1e-6)
    cache = Cache()
    models[1](x, past_key_values=cache, use_cache=True)
    assert len(cache) == 0
    models[1].eval()
    assert len(models[1](x, past_key_values=cache, use_cache=True).past_key_values) == 2


@pytest.mark.parametrize("fuse", [True, False])
def test_training_lowers_the_loss_under_autocast(fuse: bool):
    torch.manual_seed(0)
    model, x = KDAForCausalLM(KDAConfig(**TINY, fuse_cross_entropy=fuse)), tokens(4, 16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    assert loss.dtype == torch.float32


def test_bfloat16_weights_train():
    model, x = make().bfloat16(), tokens()
    model(x, labels=x).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_compiled_forward_is_the_forward():
    model, x = make(num_hidden_layers=1).eval(), tokens()
    torch.compiler.reset()  # the decoder's code is shared, and Dynamo counts compilations by code
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert_close("logits", model(x, use_cache=False).logits, compiled(x, use_cache=False).logits, 1e-5)


def test_compiled_training_has_the_same_gradients():
    model, x = make(num_hidden_layers=1), tokens(1, 20)
    torch.compiler.reset()  # the decoder's code is shared, and Dynamo counts compilations by code
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    a, b = model(x, labels=x).loss, compiled(x, labels=x).loss
    assert_close("loss", a, b, 1e-5)
    a.backward()
    b.backward()
    for (name, p), q in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert_close(name, p.grad, q.grad, 1e-4)


# Saving, loading, initialisation


@pytest.mark.parametrize("tied", [True, False])
def test_saved_models_come_back(tied: bool, tmp_path: Path):
    model, x = make(tie_word_embeddings=tied).eval(), tokens()
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    model.save_pretrained(tmp_path)
    back = KDAForCausalLM.from_pretrained(tmp_path).eval()
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), back.state_dict().values(), strict=True))
    assert (back.lm_head.weight is back.model.embeddings.weight) == tied
    with torch.no_grad():
        assert torch.equal(back(x).logits, model(x).logits)
        assert back.model.layers[0].attn.A_log._no_weight_decay
        half = KDAForCausalLM.from_pretrained(tmp_path, **{DTYPE: torch.bfloat16}).eval()
        assert half.lm_head.weight.dtype == torch.bfloat16
        assert_close("logits", model(x).logits, half(x).logits.float(), 0.1)
    assert torch.equal(KDAModel.from_pretrained(tmp_path).norm.weight, model.model.norm.weight)


def test_missing_weights_are_initialised_and_loaded_ones_kept(tmp_path: Path):
    model = make()
    state = {k: v for k, v in model.state_dict().items() if "A_log" not in k and "g_proj" not in k}
    model.save_pretrained(tmp_path, state_dict=state)
    back = KDAForCausalLM.from_pretrained(tmp_path)
    for name, p in back.state_dict().items():
        if name in state:
            assert torch.equal(p, state[name]), name
        else:
            assert p.isfinite().all(), name
    A = back.model.layers[0].attn.A_log.exp()
    assert ((A >= 1 - 1e-5) & (A <= 16)).all()
    assert back.model.layers[1].attn.g_proj[0].weight.std() < 0.05


def test_models_built_on_the_meta_device_are_initialised_afterwards():
    with torch.device("meta"):
        model = KDAForCausalLM(KDAConfig(**TINY))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(torch.nan)
        model.apply(lambda m: setattr(m, "_is_hf_initialized", False))
        model.post_init()
    assert all(p.isfinite().all() for p in model.parameters())
    assert (model.model.norm.weight == 1).all()


# TR3: the layer's own initialisation survives that of the model.
def test_initialisation():
    torch.manual_seed(0)
    model = KDAForCausalLM(KDAConfig(**{**TINY, "num_heads": 8, "initializer_range": 0.1, "pad_token_id": 0}))
    attn = model.model.layers[0].attn
    assert 0.09 < attn.q_proj.weight.std() < 0.11
    assert 0.09 < model.model.embeddings.weight.std() < 0.11
    assert model.model.embeddings.weight[0].abs().sum() > 0
    assert (attn.g_proj[1].bias == 0).all()
    assert (attn.o_norm.weight == 1).all()
    A, dt = attn.A_log.exp(), F.softplus(attn.dt_bias)
    assert ((A >= 1 - 1e-5) & (A <= 16)).all()
    assert A.std() > 1
    assert ((dt > 0.99e-3) & (dt < 0.101)).all()
    assert attn.A_log._no_weight_decay
    with pytest.raises(ValueError, match="prenorm_residual_strategy"):
        model._init_weights(attn, prenorm_residual_strategy="half")
    model._init_weights(attn, prenorm_residual_strategy="zero")
    assert (attn.o_proj.weight == 0).all()


def test_embeddings_and_head_can_be_replaced():
    model = make()
    assert model.get_input_embeddings() is model.model.embeddings
    assert model.get_decoder() is model.model
    model.resize_token_embeddings(70)
    assert model(torch.full((1, 3), 69)).logits.shape == (1, 3, 70)
    head = model.get_output_embeddings()
    model.set_output_embeddings(None)
    model.set_output_embeddings(head)
    assert model.lm_head is head


def test_classes_of_the_losses_are_public():
    assert FusedCrossEntropyLoss().reduction == "mean"
