"""PEFT adapters on frozen models: they train as under DDP, only they need training memory, and they can be saved."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

import lightning_zero
from tests.libraries.models import MODELS
from tests.libraries.training import Learner, fit, same_learning
from tests.support import rank, world_size
from tests.support.training import same_tensors


def adapted(model, **options):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, **options))


ADAPTERS = {
    "Llama": {"target_modules": "all-linear"},
    "GPT-2": {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    "T5": {"target_modules": ["q", "v"], "modules_to_save": ["lm_head"]},
    "ViT": {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["classifier"]},
}


def learner(name, **options):
    return Learner(name, change=partial(adapted, **ADAPTERS[name], **options))


def adapters_learn(name, dora):
    warnings.simplefilter("ignore")
    make = partial(learner, name, use_dora=dora)
    reference = fit("ddp", make)
    for stage in (1, 2, 3):
        run = fit(f"zero{stage}", make)
        same_learning(run, reference)
        for parameter_name, parameter in run.module.named_parameters():
            assert parameter.requires_grad == any(key in parameter_name for key in ("lora_", "modules_to_save"))
        costs_follow_what_trains(run, stage)


def costs_follow_what_trains(run, stage):
    """A frozen parameter costs its own size; a trainable one adds its share of a gradient and of two Adam moments."""
    trainable = [p.numel() for p in run.module.parameters() if p.requires_grad]
    held, size = run.reports[-1].at_rest, world_size()
    # each parameter begins at a multiple of 32 elements, and each shard of a bucket ends at one
    most = sum(32 * -(-numel // 32) for numel in trainable) + 32 * size * len(run.units)
    assert 0 < held["optimizer"] <= 8 * most / size, held
    assert 0 < held["gradients"] <= 4 * most / size, held
    whole = sum(p.numel() for p in run.module.parameters())
    padding = 32 * len(list(run.module.parameters())) + 64 * size * len(run.units)
    assert held["parameters"] <= 4 * (whole + padding) / (size if stage == 3 else 1), held


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The module", "PEFT: LoRA and DoRA on a transformers model, `modules_to_save` too")
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_learn_as_under_ddp_and_the_frozen_base_needs_memory_only_for_weights(run_on, name, dora):
    run_on(2, adapters_learn, name=name, dora=dora)


def after_fit():
    from peft import PeftModel, get_peft_model_state_dict

    warnings.simplefilter("ignore")
    run = fit("zero3", partial(learner, "Llama", use_dora=True))
    model = run.module.model.eval()
    batch = {name: torch.stack([value] * 2) for name, value in MODELS["Llama"].sample(torch.Generator()).items()}
    loss = model(**batch).loss
    adapters = get_peft_model_state_dict(model)
    assert adapters and all("lora_" in name for name in adapters)
    folder = Path(f"adapters-{rank()}")
    model.save_pretrained(folder)
    torch.manual_seed(0)
    fresh = MODELS["Llama"].make()
    fresh.load_state_dict(model.unload().state_dict())
    again = PeftModel.from_pretrained(fresh, folder).eval()
    torch.testing.assert_close(again(**batch).loss, loss, rtol=0, atol=0)
    merged = again.merge_and_unload()
    torch.testing.assert_close(merged(**batch).loss, loss, rtol=1e-5, atol=1e-6)
    assert not any("lora_" in name for name in merged.state_dict())


def test_after_fit_adapters_are_saved_loaded_and_merged_as_usual(run_on):
    run_on(2, after_fit)


class Configured(Learner):
    """Adds the adapters in `configure_model`."""

    def configure_model(self):
        if not hasattr(self.model, "peft_config"):
            self.model = adapted(self.model, **ADAPTERS["Llama"])


class Saving(Callback):
    """Saves adapters during training, in a hook that every rank runs."""

    def __init__(self):
        self.refused = ""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            try:
                module.model.save_pretrained("refused")
            except RuntimeError as error:
                self.refused = str(error)
            with lightning_zero.full_parameters(module):
                if rank() == 0:
                    module.model.save_pretrained("adapters")
            trainer.save_checkpoint("adapters.ckpt")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value for name, value in state.items() if "lora_" in name}


def in_the_midst():
    from safetensors.torch import load_file

    warnings.simplefilter("ignore")
    make = partial(Configured, "Llama")
    reference = fit("ddp", make, limit_train_batches=2)
    for stage in (1, 3):
        saving = Saving()
        run = fit(f"zero{stage}", make, callbacks=[saving], limit_train_batches=2)
        same_learning(run, reference)
        assert "no memory of its own" in saving.refused and "full_parameters(module)" in saving.refused
        if rank() == 0:
            trained = {name: value for name, value in run.weights.items() if "lora_" in name}
            saved = load_file("adapters/adapter_model.safetensors")
            names = {name: "model." + name.replace(".weight", ".default.weight") for name in saved}
            assert set(names.values()) == set(trained)
            same_tensors({names[name]: saved[name] for name in names}, {n: trained[n] for n in names.values()}, 0)
            same_tensors(torch.load("adapters.ckpt", weights_only=True)["state_dict"], trained, 0)


@pytest.mark.behaviour("The module", "PEFT: saving only the adapters during training")
def test_adapters_made_in_configure_model_are_saved_alone_during_training(run_on):
    run_on(2, in_the_midst)


# -- weights with the adapters merged, during training -----------------------------------------------------------------


def kinds_of_adapters():
    from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoraConfig, OFTConfig, VeraConfig

    layers = {"target_modules": ["q_proj", "down_proj"]}
    return {
        "LoRA": LoraConfig(r=2, modules_to_save=["lm_head"], **layers),
        "DoRA": LoraConfig(r=2, use_dora=True, use_rslora=True, **layers),
        "embedding": LoraConfig(r=2, target_modules=["embed_tokens"]),
        "tokens": LoraConfig(r=2, trainable_token_indices=[1, 5], **layers),
        "AdaLoRA": AdaLoraConfig(init_r=2, target_r=1, total_step=10, **layers),
        "IA3": IA3Config(feedforward_modules=["down_proj"], **layers),
        "LoHa": LoHaConfig(r=2, **layers),
        "OFT": OFTConfig(oft_block_size=4, **layers),
        "VeRA": VeraConfig(r=2, save_projection=False, target_modules=["q_proj", "o_proj"]),
    }


class Nested(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.network, self.head = model, torch.nn.Linear(2, 2)


def merged_while_sharded(kind, stage):
    from peft import get_peft_model

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = MODELS["Llama"].make()
    names = set(model.state_dict())
    module = Nested(get_peft_model(model, kinds_of_adapters()[kind])).eval()
    for parameter in module.network.parameters():  # adapters begin as zeros
        if parameter.requires_grad:
            torch.nn.init.uniform_(parameter, 0.1, 0.5)
    engine = lightning_zero.engine.Engine(module, stage=stage)
    before = engine.full_state_dict()
    found = dict(lightning_zero.iter_full_parameters(module, 10_000, merge_adapters=True))
    inner = dict(lightning_zero.iter_full_parameters(module.network, merge_adapters=True))
    same_tensors(engine.full_state_dict(), before, 0)
    engine.close()
    expected = module.network.merge_and_unload().state_dict()
    assert set(expected) == names
    same_tensors(inner, expected, 0)
    expected = {f"network.{name}": value for name, value in expected.items()}
    same_tensors(found, expected | {f"head.{name}": value for name, value in module.head.state_dict().items()}, 0)


@pytest.mark.exhaustive(but=3)
@pytest.mark.behaviour("The module", "PEFT: weights with the adapters merged, during training")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", kinds_of_adapters())
def test_merged_weights_are_streamed_as_merge_and_unload_computes_them(run_on, kind, stage):
    run_on(2, merged_while_sharded, kind=kind, stage=stage)


def refused_merges():
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    warnings.simplefilter("ignore")
    tied = MODELS["Llama"].make(tie_word_embeddings=True)
    on_head = get_peft_model(tied, LoraConfig(r=2, target_modules=["lm_head"]))
    prompts = get_peft_model(
        MODELS["Llama"].make(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2, token_dim=16)
    )
    odd = get_peft_model(MODELS["Llama"].make(), LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True))
    torch.save(MODELS["Llama"].make().state_dict(), "llama.pt")
    in_4_bits = MODELS["Llama"].make()
    lightning_zero.load_weights(in_4_bits, "llama.pt", quantize="nf4")
    in_4_bits = get_peft_model(in_4_bits, LoraConfig(r=2, target_modules=["q_proj"]))
    said = {
        on_head: "lm_head change a weight that is tied to base_model.model.model.embed_tokens.weight",
        prompts: "has adapters that are not part of layers",
        odd: "q_proj cannot be merged .*lora_bias",
        in_4_bits: "q_proj cannot be merged, since it is quantised",
    }
    for module, text in said.items():
        engine = lightning_zero.engine.Engine(module, stage=3)
        with pytest.raises(ValueError, match=f"{text}.*leave out merge_adapters=True"):
            lightning_zero.iter_full_parameters(module, merge_adapters=True)
        assert dict(lightning_zero.iter_full_parameters(module)).keys() == module.state_dict().keys()
        engine.close()


def test_adapters_that_cannot_be_merged_are_refused_before_anything_is_gathered(run_on):
    run_on(2, refused_merges)
