"""How modules and callbacks use parameters during a run."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import SGD, Adam

from lightning_zero import ZeroStrategy
from tests.support.training import CLOSE, same_values
from tests.support.workers import rank
from tests.trainer.cases import Net, behaviours, fit, same_as_under_ddp, shared_folder, trained, weights

# ------------------------------------------------------------------------------------------ frozen and added parameters


class FrozenBackbone(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False).eval()

    def configure_optimizers(self) -> Any:
        return Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class BiasesOnly(FrozenBackbone):
    def __init__(self) -> None:
        super().__init__()
        for name, p in self.named_parameters():
            p.requires_grad_("bias" in name)


class Adapter(nn.Module):
    """A frozen layer and, in parallel, a trained product of two thin matrices (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Adapted(FrozenBackbone):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0] = Adapter(block[0])

    def on_train_end(self) -> None:  # merged, as for export
        with torch.no_grad():
            for block in self.blocks:
                block[0].base.weight += block[0].b @ block[0].a
                block[0].b.zero_()


def freeze(strategy: str) -> Any:
    """A frozen backbone; biases only; adapters next to frozen layers, merged at the end"""
    return [trained(strategy, kind()) for kind in (FrozenBackbone, BiasesOnly, Adapted)]


class Extractor(nn.Sequential):
    """Layers to be compiled by TorchScript; each rank constructs other values."""

    def __init__(self) -> None:
        torch.manual_seed(rank())
        super().__init__(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.requires_grad_(False)
        torch.manual_seed(0)


def loaded(module: Any) -> Any:
    """A TorchScript module as `torch.jit.load` returns it: its parameters are not `nn.Parameter`s."""
    file = io.BytesIO()
    torch.jit.save(module, file)
    file.seek(0)
    module = torch.jit.load(file)
    for p in module.parameters():
        p.requires_grad_(False)
    return module


class Extracts(Net):
    """Has TorchScript modules beside its layers, among its blocks, and one that shares parameters with a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(Extractor())
        self.traced = torch.jit.trace(Extractor().eval(), torch.ones(2, 6))
        self.shared = Extractor()
        self.compiled = torch.jit.script(self.shared)
        self.blocks.append(loaded(torch.jit.script(Extractor())))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scripted(x) + self.traced(x) + self.shared(x) + self.compiled(x))

    def configure_optimizers(self) -> Any:
        return Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def extract(strategy: str) -> Any:
    """Frozen TorchScript modules, scripted, traced or loaded, which stay whole on every rank"""
    saving = ModelCheckpoint(shared_folder(), save_last=True)
    first = trained(strategy, Extracts(), callbacks=[saving], enable_checkpointing=True)
    saved = torch.load(shared_folder() / "last.ckpt", weights_only=False)["state_dict"]
    return first, saved, trained(strategy, Extracts(), ckpt_path=shared_folder() / "last.ckpt", max_epochs=3)


def extract_with(unit_numel: int | None, precision: str) -> None:
    def run(strategy: Any) -> Any:
        torch.manual_seed(0)
        return trained(strategy, Extracts(), precision=precision, max_epochs=1)

    found = run(ZeroStrategy(3, unit_numel=unit_numel, activation_checkpointing="units", checkpoint="sharded"))
    same_values(found, run("ddp"), "stage 3")


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("unit_numel", [None, 1])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_torchscript_modules_may_stand_among_checkpointed_blocks(run_on, unit_numel, precision):
    run_on(2, extract_with, unit_numel=unit_numel, precision=precision)


class UnfreezesTorchScript(Extracts):
    def on_train_epoch_start(self) -> None:
        for p in self.scripted.parameters():
            p.requires_grad_(self.current_epoch == 1)


class TrainsTorchScript(Extracts):
    def setup(self, stage: str) -> None:
        for p in self.scripted.parameters():
            p.requires_grad_(True)


def train_torchscript(stage: int, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"^scripted\.0\.weight, .*: trained parameters of a TorchScript module"):
        trained(f"zero{stage}", kind())


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [TrainsTorchScript, UnfreezesTorchScript])
def test_trained_parameters_of_torchscript_modules_are_refused_with_advice(run_on, stage, kind):
    run_on(2, train_torchscript, stage=stage, kind=kind)


class Probes(Net):
    """Differentiates outside of `training_step`, as for a Fisher information or a saliency map."""

    def on_train_epoch_start(self) -> None:
        self.by_backward = [p.grad * 1 for p in self.differentiated("backward")]
        self.by_grad = self.differentiated("grad")

    on_train_end = on_train_epoch_start

    def differentiated(self, how: str) -> list[Tensor]:
        self.zero_grad()
        loss = self.loss((torch.full((2, 6), 1.0 + rank()), torch.tensor([0, 1])))
        parameters = list(self.parameters())
        if how == "grad":
            return [value.detach() * 1 for value in torch.autograd.grad(loss, parameters)]
        loss.backward()
        return parameters


def probe(strategy: str) -> Any:
    torch.manual_seed(0)
    _, module = fit(strategy, Probes(), max_epochs=1)
    return module.by_backward, module.by_grad, weights(module)


def probe_outside_of_training_steps(stage: int) -> None:
    by_backward, by_grad, trained_weights = probe(f"zero{stage}")
    own_by_backward, own_by_grad, expected_weights = probe("ddp")
    same_values(by_grad, own_by_grad, "torch.autograd.grad")
    same_values(own_by_backward, own_by_grad, "DDP's backward")
    for value in own_by_backward:
        dist.all_reduce(value)
    same_values(by_backward, [value / 2 for value in own_by_backward], "the means")
    same_values(trained_weights, expected_weights, "weights")


@pytest.mark.behaviour(
    "The module",
    "`backward()` outside of `training_step`, which DDP does not reduce",
    notes=dict.fromkeys((1, 2, 3), "the mean over ranks; `torch.autograd.grad` gives a rank's own gradients"),
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_backward_outside_of_a_training_step_averages_gradients_and_autograd_grad_does_not(run_on, stage):
    run_on(2, probe_outside_of_training_steps, stage=stage)


class FrozenLater(Net):
    """Freezes a block in mid-epoch, and another part at the next epoch; gradient hooks see what is trained."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.blocks[0].requires_grad_(False)
        if self.global_step == 4:
            self.head.requires_grad_(False)
            self.blocks[0][2].requires_grad_(True)

    def on_after_backward(self) -> None:
        self.seen.append([p.grad is not None for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.05, momentum=0.9)


def freeze_in_mid_run(strategy: str) -> Any:
    """Freezing and unfreezing at any step"""
    return trained("ddp_find_unused_parameters_true" if strategy == "ddp" else strategy, FrozenLater())


class GrowingOptimizer(Net):
    """Adds the head to the optimizer, with another learning rate, during a run."""

    def configure_optimizers(self) -> Any:
        return Adam([*self.blocks.parameters(), self.scale], lr=self.lr)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.optimizers().add_param_group({"params": list(self.head.parameters()), "lr": 0.05})


def add_a_group(strategy: str) -> Any:
    """`add_param_group` in mid-run"""
    return trained(strategy, GrowingOptimizer())


# ----------------------------------------------------------------------------------------------------- reads and writes


class ClipsWeights(Net):
    """Clips weights after each step, as a Wasserstein GAN's critic does; also bounds row norms and decays by hand."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for p in self.blocks.parameters():
                p.clamp_(-0.2, 0.2)
            self.head.weight.renorm_(2, 0, 0.5)
            self.head.bias.data.mul_(0.9)
            self.scale.data = self.scale.data.clamp(0.5, 1.0)


def clip_weights(strategy: str) -> Any:
    """Weights clipped, renormalised or decayed by hand after a step"""
    return trained(strategy, ClipsWeights())


class WritesInStep(Net):
    """Constrains weights at the beginning of each step, and adds penalties on them to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
            self.blocks[0][0].weight.clamp_(-0.3, 0.3)
            self.blocks[1][0].bias.data[0] = 0.3
        loss = super().training_step(batch, batch_idx)
        weight = self.blocks[0][0].weight
        orthogonality = (weight @ weight.T - torch.eye(6)).square().sum()
        return loss + 1e-3 * orthogonality + 1e-3 * sum(p.norm() for p in self.parameters())


def write_in_a_step(strategy: str) -> Any:
    """Weights written and penalised inside `training_step`"""
    return trained(strategy, WritesInStep())


class Bounded(nn.Linear):
    """Bounds its weight in each forward, as layers with a Lipschitz constant do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
            self.bias.data.mul_(0.9)
        return super().forward(x)


class BoundsInForward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Bounded(6, 6))


def write_in_forward(strategy: str) -> Any:
    """A layer that writes to its own weight in forward, after other layers have used theirs"""
    return trained(strategy, BoundsInForward())


class Looks(Net):
    """Reads weights as projects do for logs and plots."""

    def on_train_batch_end(self, *_: Any) -> None:
        weight = self.head.weight
        self.seen.append([weight.norm().detach(), weight.std().item(), float(weight.detach().abs().max())])
        self.seen.append(weight.detach().numpy().tolist())
        self.seen.append([p.detach().flatten()[0].item() for p in self.parameters()])
        self.seen.append([sum(p.numel() for p in self.parameters()), [tuple(p.shape) for p in self.parameters()]])
        self.seen.append(torch.histc(weight.detach(), 4).tolist())
        self.log("weight", weight.norm())


def read_weights(strategy: str) -> Any:
    """`self.layer.weight.norm()` and other reads in hooks see the whole weight"""
    return trained(strategy, Looks())


class Copies(Callback):
    """A frozen copy of the module, as a teacher, a target network or an average."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.teacher = copy.deepcopy(pl_module.blocks).requires_grad_(False).eval()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            pl_module.seen.append(self.teacher(batch[0]).clone())
            for target, online in zip(self.teacher.parameters(), pl_module.blocks.parameters()):
                target.data.mul_(0.9).add_(online.data, alpha=0.1)


class Teacher(Net):
    """A target network inside the module itself: a copy that follows the weights and that the loss compares with."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.blocks).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.target(batch[0])
        return super().loss(batch) + F.mse_loss(self.blocks(batch[0]), target)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for target, online in zip(self.target.parameters(), self.blocks.parameters()):
                target.lerp_(online, 0.2)


def copy_modules(strategy: str) -> Any:
    """`copy.deepcopy` of a part in a hook; a teacher or target network that follows the weights"""
    return [trained(strategy, callbacks=[Copies()]), trained(strategy, Teacher())]


class Initialised(Net):
    """Reinitialises weights wherever a project might: after construction, in `setup`, and once they are sharded."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def again(self, where: str) -> None:
        if where == self.where:
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for module in self.modules():
                    if isinstance(module, nn.Linear):
                        nn.init.orthogonal_(module.weight, generator=generator)
                        nn.init.zeros_(module.bias)
                nn.init.normal_(self.blocks[0][0].weight, std=0.2, generator=generator)
                nn.init.uniform_(self.blocks[1][0].weight, -0.3, 0.3, generator=generator)
                nn.init.constant_(self.scale, 0.7)

    def configure_model(self) -> None:
        self.again("configure_model")

    def setup(self, stage: str) -> None:
        self.again("setup")

    def on_fit_start(self) -> None:
        self.again("on_fit_start")

    def on_train_start(self) -> None:
        self.again("on_train_start")


class InitialisedAtRandom(Net):
    """Reinitialises from the global random generator, which must continue as under DDP."""

    def on_fit_start(self) -> None:
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.seen.append(torch.rand(3))


def initialise(strategy: str) -> Any:
    """Custom initialisation after construction, in `setup`, `configure_model`, `on_fit_start` and `on_train_start`"""
    places = ("configure_model", "setup", "on_fit_start", "on_train_start")
    modules = [*(Initialised(where) for where in places), InitialisedAtRandom()]
    return [trained(strategy, module, max_epochs=1) for module in modules]


def start_from_rank_0(strategy: str) -> Any:
    """Ranks that construct the module differently start from rank 0's parameters and buffers"""
    torch.manual_seed(rank())
    module = Net()
    module.register_buffer("offset", torch.rand(3))
    torch.manual_seed(0)
    return trained(strategy, module)


class LateLayers(Net):
    """Creates its model in `configure_model`, as large models do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def configure_model(self) -> None:
        if self.head is None:
            self.head = nn.Linear(6, 3)


def create_late(strategy: str) -> Any:
    """Layers created in `configure_model`"""
    return trained(strategy, LateLayers())


# -------------------------------------------------------------------------------------------------- computed parameters


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).t()


class Computed(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = self.blocks[1][0]
        if kind == "weight_norm":
            parametrizations.weight_norm(layer)
        elif kind == "old weight_norm":
            nn.utils.weight_norm(layer)
        elif kind == "spectral_norm":
            parametrizations.spectral_norm(layer)
        elif kind == "old spectral_norm":
            nn.utils.spectral_norm(layer)
        elif kind == "parametrization":
            parametrize.register_parametrization(layer, "weight", Symmetric())
            parametrize.register_parametrization(self, "scale", nn.Softplus())
        elif kind == "pruning":
            prune.l1_unstructured(layer, "weight", amount=0.4)


def compute_parameters(strategy: str) -> Any:
    """`weight_norm`, `spectral_norm`, parametrizations and pruning, of both kinds"""
    kinds = ["weight_norm", "old weight_norm", "spectral_norm", "old spectral_norm", "parametrization", "pruning"]
    return {kind: trained(strategy, Computed(kind), max_epochs=1) for kind in kinds}


# ------------------------------------------------------------------------------------------------------------- buffers


class Statistics(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(6), persistent=False)

    def loss(self, batch: Any) -> Tensor:
        self.count += 1 + rank()
        self.largest = torch.maximum(self.largest, batch[0].amax(0))
        return super().loss(batch) + self.largest.mean()


def keep_statistics(strategy: str) -> Any:
    """Buffers follow rank 0's, as under DDP: BatchNorm, counters, buffers that are not saved"""
    return trained(strategy, Statistics())


class Doubling(nn.BatchNorm1d):
    """Stands in for `nn.SyncBatchNorm`, which exists on GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Converts(LayerSync):
    def apply(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            module.__class__ = Doubling if type(module) is nn.BatchNorm1d else type(module)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            module.__class__ = nn.BatchNorm1d if type(module) is Doubling else type(module)
        return model


def synchronise_statistics(strategy: str) -> Any:
    """`sync_batchnorm=True`: layers are converted for the run and converted back at its end"""
    module = Statistics()
    results = trained(strategy, module, plugins=[Converts()]), [type(part).__name__ for part in module.modules()]
    with pytest.raises(ValueError, match="SyncBatchNorm"):  # torch's own, on a CPU
        trained(strategy, Statistics(), sync_batchnorm=True)
    return results


# ----------------------------------------------------------------------------------------------- gradients and hooks


class EditsGradients(Net):
    """Looks at and edits gradients as projects do: centralisation, scaling, checks that all values are finite."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                if p.dim() > 1:
                    p.grad.add_(-p.grad.mean(dim=1, keepdim=True))
            self.head.bias.grad = self.head.bias.grad * 0.5
            self.head.weight.grad[0].zero_()
            self.blocks[0][0].bias.grad = None
            self.scale.grad += 0.01
        finite = [bool(torch.isfinite(p.grad).all()) for p in self.parameters() if p.grad is not None]
        self.seen.append([finite, float(self.head.weight.grad.abs().max())])


def edit_gradients(strategy: str) -> Any:
    """Gradients edited by hand: centralised, replaced, dropped, zeroed in part, checked to be finite"""
    return trained(strategy, EditsGradients())


class Vectors(Net):
    """Weights as one vector, as in evolution strategies and meta-learning."""

    def on_train_batch_end(self, *_: Any) -> None:
        vector = nn.utils.parameters_to_vector(self.parameters()).detach()
        self.seen.append(vector.clone())
        nn.utils.vector_to_parameters(vector * 0.99, self.parameters())


def convert_to_vectors(strategy: str) -> Any:
    """`parameters_to_vector` and `vector_to_parameters`"""
    return trained(strategy, Vectors())


class HooksEverywhere(Net):
    """The project's hooks on modules, parameters and tensors, which see the same values as under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.blocks[1].register_forward_hook(lambda module, args, out: out + module[0].bias)
        self.head.register_full_backward_hook(lambda module, before, after: self.note("backward", after[0]))
        self.head.weight.register_hook(lambda gradient: gradient * 2)

    def note(self, where: str, value: Tensor) -> None:
        self.seen.append([where, value.detach().clone()])

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: self.note("output", gradient))
        return out


def hook_modules(strategy: str) -> Any:
    """A project's hooks on modules, parameters and outputs, in forward and backward"""
    return trained(strategy, HooksEverywhere())


class Collections(Net):
    """Parameters in lists and dicts, and torch's layers that use weights of submodules directly."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.ones(3), torch.ones(2, 2)])
        self.named = nn.ParameterDict({"gain": torch.ones(6)})
        self.bag = nn.EmbeddingBag(5, 6, mode="sum")
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.bag(torch.arange(len(x)).view(-1, 1))).unsqueeze(0) * self.named["gain"]
        x = self.encoder(self.attention(x, x, x)[0]).squeeze(0)
        return super().forward(x) * self.listed[0].mean() + self.listed[1].sum()


def collect_parameters(strategy: str) -> Any:
    """`nn.ParameterList`, `nn.ParameterDict`, `nn.MultiheadAttention`, `nn.TransformerEncoderLayer` and the like"""
    return trained(strategy, Collections())


class Inner(Net):
    """A LightningModule inside another one; it logs and has helper methods."""

    def penalty(self) -> Tensor:
        return 0.01 * self.head.weight.square().sum()


class Outer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.alias = self.inner.head.weight  # the same parameter under a second name

    def loss(self, batch: Any) -> Tensor:
        return self.inner.loss(batch) + self.inner.penalty() + super().loss(batch) + self.alias.abs().mean()


def nest_modules(strategy: str) -> Any:
    """A LightningModule inside another; a parameter under two names"""
    return trained(strategy, Outer())


class WithoutSync(Net):
    """Accumulates in manual optimization, without communication where that is possible."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for half in (slice(0, 2), slice(2, 4)):
            with optimizer.toggle_model(sync_grad=half.start == 2):
                self.manual_backward(self.loss([part[half] for part in batch]) / 2)
        optimizer.step()
        optimizer.zero_grad()


def accumulate_by_hand(strategy: str) -> Any:
    """`optimizer.toggle_model(sync_grad=False)` while micro-batches are accumulated by hand"""
    return trained(strategy, WithoutSync())


@pytest.mark.exhaustive(but=2)
@behaviours(
    "The module",
    freeze,
    freeze_in_mid_run,
    extract,
    add_a_group,
    clip_weights,
    copy_modules,
    initialise,
    start_from_rank_0,
    create_late,
    compute_parameters,
    edit_gradients,
    convert_to_vectors,
    hook_modules,
    collect_parameters,
    keep_statistics,
    synchronise_statistics,
    write_in_forward,
)
def test_parameters_equal_ddps_bit_for_bit(run_on, case):
    run_on(2, same_as_under_ddp, case=case)


@pytest.mark.exhaustive(but=1)
@behaviours("The module", read_weights, write_in_a_step, nest_modules, accumulate_by_hand)
def test_parameters_are_close_to_ddps_where_sums_are_taken_in_another_order(run_on, case):
    run_on(2, same_as_under_ddp, case=case, bound=CLOSE)
