"""Text generation of different lengths on each rank: every rank runs as many forward passes as its data needs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from lightning_zero import ZeroStrategy
from tests.support import rank, world_size
from tests.support.trainer import make_trainer

WORDS = 11
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


class Writer(nn.Module):
    """Reads a prompt once with its encoder, and writes with its decoder until it has written enough."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.encoder = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.decoder = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh())
        self.head = nn.Linear(6, WORDS)
        self.most = None

    def forward(self, words, memory):
        return self.head(self.decoder(self.embedding(words) + memory))

    def read(self, prompt):
        return self.encoder(self.embedding(prompt).mean(1, keepdim=True))

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, length: int = 3) -> torch.Tensor:
        memory = self.read(prompt)
        for number in range(length):
            if number == self.most:
                raise ValueError("the text is too long")
            prompt = torch.cat([prompt, self(prompt, memory)[:, -1:].argmax(-1)], dim=1)
        return prompt


GENERATE = Writer.generate
"""The project's own function, even while an engine exists."""


class Author(LightningModule):
    """Writes texts whose lengths are in the batches, wherever a project may do so."""

    def __init__(self, by_hand=False):
        super().__init__()
        self.writer = Writer()
        self.by_hand = by_hand
        self.written = []

    def write(self, prompt, length):
        try:
            return self.write_all(prompt, length)
        except ValueError:
            return prompt

    def write_all(self, prompt, length):
        if self.by_hand:
            with lightning_zero.uneven_forwards(self.writer):
                return GENERATE(self.writer, prompt, length)
        return self.writer.generate(prompt, length=length)

    def training_step(self, batch, batch_idx):
        prompt, target, length = batch
        text = self.write(prompt, int(length[0]))
        self.written.append(text)
        logits = self.writer(text, self.writer.read(prompt))
        return F.cross_entropy(logits[:, -1], target)

    def validation_step(self, batch, batch_idx):
        prompt, _, length = batch
        text = self.write(prompt, int(length[0]))
        self.written.append(text)
        # A collective operation may follow at once, as under DDP.
        lengths = self.all_gather(torch.tensor(text.shape[1])) if self.trainer.training else None
        self.written.append(lengths)
        self.log("last", text[:, -1].float().mean(), sync_dist=True)
        self.log("loss", self.writer(text, self.writer.read(prompt)).logsumexp(-1).mean())

    def predict_step(self, batch, batch_idx):
        prompt, _, length = batch
        return self.write(prompt, int(length[0]))

    def on_validation_epoch_end(self):  # outside of any step
        self.written.append(self.write(torch.arange(4)[None], 1 + 2 * rank()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(batches):
    generator = torch.Generator().manual_seed(10 + rank())
    count = 2 * batches
    prompts = torch.randint(WORDS, (count, 4), generator=generator)
    targets = torch.randint(WORDS, (count,), generator=generator)
    lengths = (torch.arange(count) // 2 * 3 + 4 * rank()) % 7  # by batch, different on each rank, some of them 0
    return DataLoader(TensorDataset(prompts, targets, lengths), batch_size=2)


def run(strategy, module, uneven_loaders):
    options = {"use_distributed_sampler": False, "max_epochs": 2, "num_sanity_val_steps": 0}
    make_trainer(strategy(), **options).fit(module, loader(3), loader(3))
    evaluated = loader(1 + 2 * rank() if uneven_loaders else 3)
    metrics = make_trainer(strategy(), **options).validate(module, evaluated, verbose=False)
    predictions = make_trainer(strategy(), **options).predict(module, evaluated)
    return module.written, predictions, metrics, module.state_dict()


def write_as_under_ddp(stage, by_hand=False, uneven_loaders=True, most=None, **options):
    torch.manual_seed(0)
    module = Author(by_hand)
    module.writer.most = most
    reference = copy.deepcopy(module)
    expected = run(lambda: "ddp", reference, uneven_loaders)
    got = run(lambda: ZeroStrategy(stage=stage, **options), module, uneven_loaders)
    texts = [text.shape[-1] for text in module.written if text is not None and text.dim() == 2]
    assert len(set(texts)) >= 3, texts
    same = {"rtol": 0, "atol": 0} if world_size() == 2 else {"rtol": 1e-5, "atol": 1e-6}  # three may add in two orders
    torch.testing.assert_close(got, expected, **same)
    assert not {"generate", "__reduce_ex__"} & vars(module.writer).keys(), "an ordinary module again"


@pytest.mark.exhaustive(but=1)
@pytest.mark.behaviour(
    "The module", "`generate`: texts that end at different lengths on different ranks, in any step or hook"
)
@STAGES
def test_ranks_write_texts_of_different_lengths(run_on, stage):
    run_on(2, write_as_under_ddp, stage=stage)


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("prefetch", [0, 3])
def test_three_ranks_write_texts_of_different_lengths_with_any_prefetch(run_on, prefetch):
    run_on(3, write_as_under_ddp, stage=3, prefetch=prefetch)


def test_a_rank_may_catch_an_error_of_its_own_generation(run_on):
    run_on(2, write_as_under_ddp, stage=3, most=5)


def test_a_project_can_declare_its_own_loops_uneven(run_on):
    run_on(2, write_as_under_ddp, stage=3, by_hand=True)


def copies():
    module = Author()
    kept = {}

    class Copying(Author):
        def validation_step(self, batch, batch_idx):
            kept["copy"] = copy.deepcopy(self.writer)
            kept["pickled"] = pickle.loads(pickle.dumps(self.writer))

    module = Copying()
    prompt = torch.arange(4)[None]
    expected = module.writer.generate(prompt, length=5)
    make_trainer("zero3").validate(module, loader(1), verbose=False)
    for other in kept.values():
        assert "generate" not in vars(other) and "__reduce_ex__" not in vars(other)
        assert torch.equal(other.generate(prompt, length=5), expected)
    assert torch.equal(module.writer.generate(prompt, length=5), expected)


def test_copies_of_the_module_generate_on_their_own(run_on):
    run_on(2, copies)


class Alone(Author):
    """One rank generates text, with full parameters."""

    def validation_step(self, batch, batch_idx):
        with lightning_zero.full_parameters(self):
            if rank() == 0:
                self.written.append(self.writer.generate(batch[0], 3))


def write_alone():
    torch.manual_seed(0)
    module = Alone()
    module.on_validation_epoch_end = lambda: None
    expected = module.writer.generate(next(iter(loader(1)))[0], 3)
    make_trainer("zero3", use_distributed_sampler=False).validate(module, loader(1), verbose=False)
    assert len(module.written) == (1 if rank() == 0 else 0)
    assert all(torch.equal(text, expected) for text in module.written)


def test_one_rank_alone_may_write_with_full_parameters(run_on):
    run_on(2, write_alone)


class Unlucky(Author):
    def write(self, prompt, length):
        if rank() == 1:
            self.writer.head.register_forward_hook(self.give_up)
        return super().write(prompt, 6)

    def give_up(self, *_):
        raise ValueError("out of words")


def fail_in_the_midst():
    with pytest.raises((ValueError, RuntimeError), match="out of words"):
        make_trainer("zero3").validate(Unlucky(), loader(2), verbose=False)


def test_a_failure_in_the_middle_of_a_text_ends_every_rank(run_on):
    run_on(2, fail_in_the_midst, timeout=30)
