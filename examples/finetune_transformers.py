"""Fine-tunes a causal language model from transformers, with or without LoRA, and writes it by `save_pretrained`.

    python examples/finetune_transformers.py                       # a tiny Llama, from random weights
    python examples/finetune_transformers.py model.path=FOLDER data.path=TEXT_FILE model.lora.rank=8 precision=bf16
    python examples/finetune_transformers.py optimizer=muon        # Muon for matrices of blocks, AdamW for the rest
    torchrun --nproc-per-node 2 examples/finetune_transformers.py stage=2

finetune_transformers/config.yaml has every value that can be overridden.
"""

import re
import sys
import time
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NoReturn

import hydra
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.text import Perplexity

import lightning_zero  # also registers the strategies, so that `trainer.strategy=zero2` works as well
from lightning_zero.monitoring import ZeroMonitor
from lightning_zero.reporting import results
from lightning_zero.zoo.supervised import groups_of


def stop(reason: object) -> NoReturn:
    """Ends this rank; rank 0 prints one line."""
    if rank_zero_only.rank > 0:
        time.sleep(10)  # torchrun kills the other ranks when one has ended: rank 0 must print first
        raise SystemExit(1)
    line = str(reason).strip().splitlines()[0]
    raise SystemExit(f"finetune_transformers: {line}")


try:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        ByT5Tokenizer,
        LlamaConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        get_cosine_schedule_with_warmup,
        logging,
    )
except ModuleNotFoundError as error:
    stop(f"the package {error.name} is missing: pip install 'lightning_zero[demo,libraries]'")

logging.set_verbosity_error()  # load_pretrained reports what does not fit
logging.disable_progress_bar()
IGNORED = -100  # label for tokens that are not predicted, as in transformers and torch


def load_tokenizer(path: str | None) -> PreTrainedTokenizerBase:
    """The folder's own tokenizer; bytes if there is none.

    Raises:
        ValueError: The tokenizer has no EOS token.
    """
    if path is None or not (Path(path) / "tokenizer_config.json").is_file():
        return ByT5Tokenizer(extra_ids=0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model.path={path}: its tokenizer has no EOS token, which ends a document")
    return tokenizer


def load_network(model: DictConfig, vocabulary: int) -> PreTrainedModel | PeftModel:
    """The network that the config names. Weights stay in their files until the strategy shards them.

    Raises:
        ValueError: The folder contains no network, its weights do not fit its config.json, or the LoRA rank is wrong.
        OSError: There are no weights in the folder.
    """
    if model.path is None:
        network = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=vocabulary,
                hidden_size=64,
                intermediate_size=192,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    else:
        network = load_pretrained(model.path)
    if network.get_input_embeddings().num_embeddings < vocabulary:
        raise ValueError(f"model.path={model.path}: its tokenizer has {vocabulary} tokens, but its embedding has fewer")
    if model.gradient_checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    network = network if model.lora.rank is None else add_lora(network, model.lora)
    return network.train()  # from_pretrained leaves it in eval mode, without dropout


def load_pretrained(path: str) -> PreTrainedModel:
    if not (Path(path) / "config.json").is_file():
        raise ValueError(f"model.path={path}: no config.json there; expected a folder that save_pretrained has written")
    # transformers fills tensors missing from the files with random numbers, and only warns
    network, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True)
    for kind in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, info[f"{kind}_keys"])):
            raise ValueError(f"model.path={path}: the weights do not fit config.json, {kind}: {', '.join(names[:5])}")
    return network


def add_lora(network: PreTrainedModel, lora: DictConfig) -> PeftModel:
    """Adds adapters and freezes the weights."""
    if not isinstance(lora.rank, int) or lora.rank < 1:
        raise ValueError(f"model.lora.rank={lora.rank}: expected a whole number, 1 or more, or null for no LoRA")
    arguments = OmegaConf.to_container(lora)
    return get_peft_model(network, LoraConfig(task_type="CAUSAL_LM", r=arguments.pop("rank"), **arguments))


class Blocks(LightningDataModule):
    """Documents, each followed by an EOS, packed into blocks of tokens with labels; the last blocks are held out.

    Arguments:
        data: See config.yaml.
        tokenizer: Must have an EOS token.
        ranks: Number of ranks; each needs its own block for validation.

    Raises:
        ValueError: The text is too short.
    """

    def __init__(self, data: DictConfig, tokenizer: PreTrainedTokenizerBase, ranks: int) -> None:
        super().__init__()
        self.batch_size = data.batch_size
        self.ranks = ranks
        text = "\n\n".join(topics.values()) if data.path is None else Path(data.path).read_text(encoding="utf-8")
        documents = re.split(r"\n\s*\n", text.strip())
        encoded = tokenizer(documents, add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([token for document in encoded for token in (*document, tokenizer.eos_token_id)])
        count = len(tokens) // data.block
        held_out = max(ranks, count * data.validation_percent // 100)
        if count <= held_out:
            needed = (ranks + 1) * data.block
            raise ValueError(f"data.path={data.path}: {len(tokens)} tokens are too few, at least {needed} are needed")

        blocks = tokens[: count * data.block].view(count, data.block)
        labels = blocks.clone()
        labels[:, 1:][blocks[:, :-1] == tokenizer.eos_token_id] = IGNORED  # a document's start is unpredictable
        self.training = TensorDataset(blocks[:-held_out], labels[:-held_out])
        self.validation = TensorDataset(blocks[-held_out:], labels[-held_out:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.training, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        # every block once, so that perplexity does not depend on the number of ranks; Lightning would repeat some
        sampler = UnrepeatedDistributedSampler(self.validation, self.ranks, self.trainer.global_rank, shuffle=False)
        return DataLoader(self.validation, self.batch_size, sampler=sampler)


class FineTuning(LightningModule):
    """Trains on blocks of tokens: cross entropy, perplexity, and a sample of text after each validation.

    Arguments:
        make_network: Called in `configure_model`, where Lightning expects a large model to be made.
        tokenizer: Decodes the samples.
        optimizer: Makes the optimizer from parameter groups.
        warmup_steps: Steps until the full learning rate, after which it follows a cosine.
        prompt_tokens: Tokens from a validation block with which a sample begins.
        generate: Arguments of `generate`.
    """

    counted = "tokens"  # what `count` counts, for the report

    def __init__(
        self,
        make_network: partial[PreTrainedModel | PeftModel],
        tokenizer: PreTrainedTokenizerBase,
        optimizer: partial[torch.optim.Optimizer],
        warmup_steps: int,
        prompt_tokens: int,
        generate: dict[str, Any],
    ) -> None:
        super().__init__()
        self.make_network = make_network
        self.tokenizer = tokenizer
        self.optimizer = optimizer
        self.warmup_steps = warmup_steps
        self.prompt_tokens = prompt_tokens
        self.generate = generate
        self.network: PreTrainedModel | PeftModel | None = None
        self.loss = MeanMetric()
        self.perplexity = Perplexity(ignore_index=IGNORED)
        self.sample = ""

    def configure_model(self) -> None:
        if self.network is None:
            self.network = self.make_network()

    @staticmethod
    def count(batch: tuple[Tensor, Tensor]) -> int:
        return batch[0].numel()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        tokens, labels = batch
        loss = self.network(input_ids=tokens, labels=labels, use_cache=False).loss
        self.log("training/loss", loss)
        return loss

    def on_validation_epoch_start(self) -> None:
        for metric in (self.loss, self.perplexity):  # bf16-true casts them too, but bf16 counts only up to 256
            metric.set_dtype(torch.float32)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> None:
        tokens, labels = batch
        output = self.network(input_ids=tokens, labels=labels, use_cache=False)
        targets = labels[:, 1:]
        self.loss.update(output.loss, weight=(targets != IGNORED).sum())
        self.perplexity.update(output.logits[:, :-1].float(), targets)
        self.log("validation/loss", self.loss)
        self.log("validation/perplexity", self.perplexity, prog_bar=True)
        if batch_index == 0:
            self.prompt = tokens[:1, : self.prompt_tokens]

    def on_validation_epoch_end(self) -> None:
        with isolate_rng():  # sampling must not change training's random numbers
            torch.manual_seed(self.global_rank)
            tokens = self.network.generate(
                input_ids=self.prompt,
                attention_mask=torch.ones_like(self.prompt),
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.eos_token_id,
                **self.generate,
            )
        self.sample = self.tokenizer.decode(tokens[0], skip_special_tokens=True)
        written = self.all_gather(torch.tensor(tokens.shape[1] - self.prompt.shape[1], device=self.device))
        self.print(f"step {self.global_step}: validation perplexity {self.perplexity.compute():.8g}")
        self.print(f"tokens written by each rank: {written.view(-1).tolist()}; rank 0: {self.sample!r}")

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = self.optimizer(groups_of(self, self.optimizer))
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_cosine_schedule_with_warmup(optimizer, self.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def save(network: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Writes folder/model, and with LoRA also folder/adapter, whose weights are merged into the model."""
    if isinstance(network, PeftModel):
        network.save_pretrained(folder / "adapter")
        network = network.merge_and_unload()
    network.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


@hydra.main(version_base="1.3", config_path="finetune_transformers", config_name="config")
def main(config: DictConfig) -> None:
    seed_everything(config.seed, workers=True)
    monitor = ZeroMonitor(length_fn=FineTuning.count)
    callbacks = [monitor, LearningRateMonitor(), instantiate(config.checkpoint)]
    trainer: Trainer = instantiate(config.trainer, callbacks=callbacks, logger=instantiate(config.logger))
    try:
        for name, file in (("resume", config.resume), ("data.path", config.data.path)):
            if file is not None and not Path(file).is_file():
                raise ValueError(f"{name}={file}: no such file")
        tokenizer = load_tokenizer(config.model.path)
        make_network = partial(load_network, config.model, len(tokenizer))
        make_network()  # finds errors before any process is started
        data = Blocks(config.data, tokenizer, ranks=trainer.num_devices * trainer.num_nodes)
    except (OSError, ValueError) as error:
        stop(error)
    make_module = partial(
        FineTuning,
        tokenizer=tokenizer,
        optimizer=instantiate(config.optimizer),
        warmup_steps=config.warmup_steps,
        prompt_tokens=config.prompt_tokens,
        generate=OmegaConf.to_container(config.generate),
    )

    module = make_module(make_network)
    trainer.fit(module, data, ckpt_path=config.resume)
    best = trainer.checkpoint_callback.best_model_path  # "" if the run was too short for a validation
    (metrics,) = trainer.validate(module, data, ckpt_path=best or None, verbose=False)

    folder = Path(trainer.strategy.broadcast(config.folder))
    with lightning_zero.full_parameters(module):  # needed if the module stays sharded after the run
        if trainer.is_global_zero:
            save(module.network, tokenizer, folder)
    if trainer.is_global_zero:
        results.write_report(folder, results.collect(trainer, monitor, metrics, best), module.sample)
        print("model", folder / "model", flush=True)
    trainer.strategy.barrier()
    (saved,) = trainer.validate(make_module(partial(load_pretrained, folder / "model")), data, verbose=False)
    if trainer.is_global_zero:
        print(f"perplexity {metrics['validation/perplexity']:.8g}, of the saved {saved['validation/perplexity']:.8g}")


if __name__ == "__main__":
    # Hydra reads a bare number as a number, but the group `stage` has names: stage=3 -> stage='3'
    sys.argv = [re.sub(r"^stage=(\d)$", r"stage='\1'", argument) for argument in sys.argv]
    main()
