"""QLoRA: a transformers model, quantised while it is loaded from its files, with PEFT's adapters, as under DDP."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import lightning_zero
from tests.libraries.models import MODELS
from tests.libraries.training import Learner, fit, same_learning
from tests.support import rank
from tests.support.training import same_tensors
from tests.trainer.cases import shared_folder

SIZES = {"hidden_size": 64, "intermediate_size": 128}
TARGETS = ["q_proj", "v_proj", "up_proj"]


def as_on_other_cpus(network: nn.Module) -> nn.Module:
    """On CPUs with AVX512-BF16, `Linear4bit` packs its codes in evaluation, which fails, or lets no gradients flow."""
    for layer in network.modules():
        layer.support_avx512bf16_for_cpu = False
    return network


def from_pretrained(kind: str) -> nn.Module:
    """The model as its users quantise it: whole, by each rank."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    in_4_bits = {
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    }
    chosen = {"load_in_8bit": True, "llm_int8_threshold": 0.0} if kind == "int8" else {"load_in_4bit": True} | in_4_bits
    network = AutoModelForCausalLM.from_pretrained(
        shared_folder(), quantization_config=BitsAndBytesConfig(**chosen), dtype=torch.float32
    )
    return as_on_other_cpus(network)


def loaded(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shared_folder()))
    lightning_zero.load_weights(network, shared_folder(), quantize=kind)
    return network


class QLoRA(Learner):
    def __init__(self, make) -> None:
        super().__init__("Llama", change=lambda model: None)
        self.make = make

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model

        if self.model is None:
            config = LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, task_type="CAUSAL_LM")
            self.model = get_peft_model(self.make().train(), config)

    def validation_step(self, batch, batch_idx) -> None:
        super().validation_step(batch, batch_idx)
        tokens = self.model.generate(input_ids=batch["input_ids"][:1], max_new_tokens=3, do_sample=False)
        self.validated.append(tokens)


def write_base() -> None:
    torch.manual_seed(5)
    network, folder = MODELS["Llama"].make(**SIZES), shared_folder()
    if rank() == 0:
        network.save_pretrained(folder)
    torch.distributed.barrier()


def fine_tune(kind: str) -> None:
    warnings.simplefilter("ignore")
    write_base()
    reference = fit("ddp", partial(QLoRA, partial(from_pretrained, kind)))
    for stage, make in ((1, loaded), (2, from_pretrained), (3, from_pretrained), (3, loaded)):
        run = fit(f"zero{stage}", partial(QLoRA, partial(make, kind)))
        same_learning(run, reference)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module", "QLoRA: a transformers model, quantised by `load_weights` or `from_pretrained`, with PEFT's LoRA"
)
@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_a_quantised_model_with_adapters_learns_as_under_ddp(run_on, kind):
    run_on(2, fine_tune, kind=kind)


def save(kind: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore")
    write_base()
    results = {}
    for strategy, make in (("ddp", from_pretrained), ("zero3", loaded)):
        run = fit(strategy, partial(QLoRA, partial(make, kind)))
        model = as_on_other_cpus(run.module.model.eval())
        folder = Path(f"{strategy}-{rank()}")
        model.save_pretrained(folder)
        again = PeftModel.from_pretrained(from_pretrained(kind), folder).eval()
        tokens = torch.arange(4, 12)[None]
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=0)
        merged = model.merge_and_unload()
        if strategy == "zero3" and rank() == 0:
            merged.save_pretrained(folder / "merged")
            loaded_again = as_on_other_cpus(AutoModelForCausalLM.from_pretrained(folder / "merged").eval())
            torch.testing.assert_close(loaded_again(tokens).logits, merged(tokens).logits, rtol=0, atol=0)
        results[strategy] = {name: value.clone() for name, value in merged.state_dict().items()}
    same_tensors(results["zero3"], results["ddp"], 0)


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour("The module", "QLoRA: `save_pretrained` of adapters and `merge_and_unload` after fit")
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_of_a_quantised_model_are_saved_and_merged_as_usual(run_on, kind):
    run_on(2, save, kind=kind)
