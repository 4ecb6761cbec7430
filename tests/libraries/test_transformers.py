"""Tiny, random, unmodified transformers models: losses, weights and validation equal DDP's, bit for bit."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn.functional import linear
from torch.optim import AdamW

from lightning_zero import full_grad
from lightning_zero.engine.plan.units import plan_units
from tests.libraries.models import MODELS
from tests.libraries.training import Learner, fit, same_learning
from tests.support.selection import exhaustive_but
from tests.support.training import CLOSE, same_tensors

AT_ALL_STAGES = ["GPT-2", "Mixtral", "T5", "ResNet"]
IN_EVERY_RUN = [*AT_ALL_STAGES, "BERT", "CLIP", "Whisper", "Mamba", "ViT"]


def equal_to_ddp(name, stages=(3,), make=None, bound=0, **options):
    """Train a model under DDP and at these stages; see `same_tensors` for the bound."""
    warnings.simplefilter("ignore")
    learner = make or partial(Learner, name)
    reference = fit("ddp_find_unused_parameters_true" if MODELS[name].has_unused else "ddp", learner, **options)
    for stage in stages:
        same_learning(fit(f"zero{stage}", learner, **options), reference, bound)


@pytest.mark.exhaustive(but=2)
@pytest.mark.behaviour("The module", "Unmodified transformers models (text, vision, audio)")
@pytest.mark.parametrize("name", exhaustive_but(IN_EVERY_RUN, MODELS))
def test_a_model_learns_as_under_ddp_bit_for_bit(run_on, name):
    run_on(2, equal_to_ddp, name=name, stages=(1, 2, 3) if name in AT_ALL_STAGES else (3,))


# ALBERT has a test of its own below.
@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "BERT", "T5", "ConvNeXt", "Wav2Vec2"])
def test_a_model_learns_as_under_ddp_in_mixed_precision(run_on, name):
    run_on(2, equal_to_ddp, name=name, precision="bf16-mixed")


class Gradients(Callback):
    """Full gradients of the first step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not hasattr(self, "first"):
            self.first = {name: full_grad(parameter).clone() for name, parameter in pl_module.named_parameters()}


def layer_used_three_times():
    ours, theirs = Gradients(), Gradients()
    for strategy, gradients in (("zero3", ours), ("ddp", theirs)):
        fit(strategy, partial(Learner, "ALBERT"), precision="bf16-mixed", callbacks=[gradients])
    same_tensors(ours.first, theirs.first, bound=2**-8)


def test_a_layer_used_several_times_in_mixed_precision_is_within_a_rounding_of_ddp(run_on):
    """Under Lightning's autocast each use casts the weights anew, and gradients of the uses are added up in fp32.

    Here the weights are cast once, when they are gathered, and the gradients of the uses are added up in bf16: ALBERT's
    three uses make two sums, each of which rounds by 2**-9 at most. After that, everything is fp32.
    """
    run_on(2, layer_used_three_times)


def with_checkpointing(name, use_reentrant):
    learner = Learner(name)
    learner.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        learner.model.enable_input_require_grads()
    return learner


@pytest.mark.behaviour("The module", "`gradient_checkpointing_enable()` of transformers, reentrant and not")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "Mixtral", "T5"])
def test_gradient_checkpointing_changes_nothing(run_on, name, use_reentrant):
    run_on(2, equal_to_ddp, name=name, make=partial(with_checkpointing, name, use_reentrant))


class Curious(Learner):
    """Reads and modifies its model as projects do."""

    def __init__(self, name, **options):
        super().__init__(name, **options)
        self.model.resize_token_embeddings(43)
        self.numel, self.kept = self.model.num_parameters(), []

    def training_step(self, batch, batch_idx):
        assert self.model.num_parameters() == self.model.num_parameters(only_trainable=True) == self.numel
        assert self.model.dtype == torch.float32 and self.model.device == batch["input_ids"].device
        assert self.model.get_input_embeddings().weight.shape == (43, 16)
        output = self.model(**batch, output_hidden_states=True, output_attentions=True, use_cache=False)
        head = self.model.get_output_embeddings()
        logits = linear(output.hidden_states[-1], head.weight, head.bias)
        torch.testing.assert_close(logits, output.logits, rtol=1e-6, atol=1e-6)
        self.kept.append(output)
        penalty = sum(p.square().sum() for p in self.model.get_input_embeddings().parameters())
        return output["loss"] + output.attentions[0].square().mean() + 0.01 * penalty + 0.1 * logits.square().mean()

    def configure_optimizers(self):
        # gradients of the keys' biases are rounding errors, which Adam would scale up to full steps
        return AdamW(self.parameters(), lr=1e-2, eps=1e-3)

    def on_train_end(self):
        first = self.kept[0]
        assert all(hidden.isfinite().all() for hidden in first.hidden_states) and first.loss.isfinite()


def curious():
    # A parameter read outside of its layer has gradients from two places, which are added in another order.
    for name in ("GPT-2", "Llama", "Qwen3"):
        equal_to_ddp(name, (1, 2, 3), partial(Curious, name, attn_implementation="eager"), bound=CLOSE)


@pytest.mark.exhaustive
@pytest.mark.behaviour("The module", "A transformers model read from outside: tied heads, sizes, dtype, kept outputs")
def test_a_model_may_be_read_resized_and_asked_for_all_its_outputs(run_on):
    run_on(2, curious)


def dropped_layers():
    learner = partial(Learner, "Wav2Vec2", layerdrop=0.5)
    equal_to_ddp("Wav2Vec2", (1, 3), learner)


def test_layerdrop_that_is_the_same_on_every_rank_trains_as_under_ddp(run_on):
    run_on(2, dropped_layers)


# The largest unit's share of a model of real size (its default configuration). Shares above a tenth are those of
# embeddings tied to a head (in the root unit) and of models with few layers.
LARGEST_UNIT = {
    "GPT-2": 0.33,
    "Qwen3": 0.1,
    "Gemma 3": 0.25,
    "OPT": 0.33,
    "Mamba": 0.25,
    "BERT": 0.25,
    "RoBERTa": 0.33,
    "DistilBERT": 0.38,
    "ELECTRA": 0.3,
    "DeBERTa-v2": 0.25,
    "T5": 0.3,
    "BART": 0.15,
    "Whisper": 0.6,
    "ConvNeXt": 0.2,
    "ResNet": 0.3,
    "Swin": 0.3,
    "SegFormer": 0.25,
    "CLIP": 0.2,
}


def units_of_real_sizes():
    import transformers

    shares = {}
    for name, tiny in MODELS.items():
        cls = getattr(transformers, tiny.cls)
        with torch.device("meta"):
            model: nn.Module = cls(cls.config_class())
        sizes = [sum(p.numel() for p in plan.parameters.values()) for plan in plan_units(model)]
        shares[name] = max(sizes) / sum(sizes)
    return shares


def test_no_unit_holds_most_of_a_model_of_real_size(run_on):
    """Omit ALBERT, whose only layer is used repeatedly and thus is in the root unit, and BLOOM, which is tiny."""
    shares = run_on(1, units_of_real_sizes)[0]
    del shares["ALBERT"], shares["BLOOM"]
    for name, share in shares.items():
        assert share <= LARGEST_UNIT.get(name, 0.1), f"{name}: one unit holds {share:.0%}"
