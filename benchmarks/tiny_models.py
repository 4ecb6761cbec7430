"""Small projects as their authors write them: tiny modules that an ordinary loop calls many times a step.

No code here depends on a strategy. Each project has a few thousand parameters and its own data.
"""

import copy
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

NODES, FEATURES = 12, 8
PIXELS = 32
STATE, ACTION = 8, 2


class GNN(LightningModule):
    """Message passing over a graph: a loop over rounds and edges, one small network for messages, one for updates."""

    def __init__(self, width: int = 16, rounds: int = 3) -> None:
        super().__init__()
        self.rounds = rounds
        self.encode = nn.Linear(FEATURES, width)
        self.message = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.update = nn.GRUCell(width, width)
        self.readout = nn.Linear(width, 1)
        self.edges = [(node, (node + step) % NODES) for node in range(NODES) for step in (1, 5)]

    def forward(self, nodes: Tensor) -> Tensor:
        hidden = [torch.relu(self.encode(nodes[:, node])) for node in range(NODES)]
        for _ in range(self.rounds):
            inbox: list[list[Tensor]] = [[] for _ in range(NODES)]
            for source, target in self.edges:
                inbox[target].append(self.message(torch.cat([hidden[source], hidden[target]], dim=1)))
            hidden = [self.update(sum(received), node) for received, node in zip(inbox, hidden)]
        return self.readout(torch.stack(hidden).mean(dim=0)).squeeze(1)

    def training_step(self, batch: Any, _: int) -> Tensor:
        nodes, target = batch
        loss = functional.mse_loss(self(nodes), target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        nodes = torch.randn(samples, NODES, FEATURES)
        return TensorDataset(nodes, nodes.mean(dim=(1, 2)))


class MoCo(LightningModule):
    """Momentum contrast: the key encoder is a running average of the query encoder, by a loop over parameters."""

    def __init__(self, width: int = 64, dimension: int = 16, queue: int = 64, momentum: float = 0.99) -> None:
        super().__init__()
        self.momentum, self.temperature = momentum, 0.1
        self.encoder_q = nn.Sequential(
            nn.Linear(PIXELS, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, dimension),
        )  # fmt: skip
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for parameter in self.encoder_k.parameters():
            parameter.requires_grad = False
        self.register_buffer("queue", functional.normalize(torch.randn(dimension, queue), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters()):
            k.data = k.data * self.momentum + q.data * (1.0 - self.momentum)

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        keys = self.all_gather(keys).flatten(0, 1)
        position = int(self.position)
        self.queue[:, position : position + len(keys)] = keys.T
        self.position[0] = (position + len(keys)) % self.queue.shape[1]

    def training_step(self, batch: Any, _: int) -> Tensor:
        (images,) = batch
        query = functional.normalize(self.encoder_q(images + 0.1 * torch.randn_like(images)), dim=1)
        with torch.no_grad():
            self.update_key_encoder()
            keys = functional.normalize(self.encoder_k(images + 0.1 * torch.randn_like(images)), dim=1)
        positive = (query * keys).sum(dim=1, keepdim=True)
        negative = query @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], dim=1) / self.temperature
        loss = functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        self.enqueue(keys)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.encoder_q.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        return TensorDataset(torch.randn(samples, PIXELS))


class Perceptron(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, width: int = 32) -> None:
        super().__init__(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
        )


class SAC(LightningModule):
    """Soft actor-critic on stored transitions: three alternating optimizers, and slowly updated target networks."""

    def __init__(self, gamma: float = 0.99, tau: float = 0.005, alpha: float = 0.2) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gamma, self.tau, self.alpha = gamma, tau, alpha
        self.actor = Perceptron(STATE, 2 * ACTION)
        self.critic1, self.critic2 = Perceptron(STATE + ACTION, 1), Perceptron(STATE + ACTION, 1)
        self.target1, self.target2 = copy.deepcopy(self.critic1), copy.deepcopy(self.critic2)
        for parameter in [*self.target1.parameters(), *self.target2.parameters()]:
            parameter.requires_grad = False

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(state).chunk(2, dim=1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        log_probability = normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_probability.sum(dim=1, keepdim=True)

    def soft_update(self, critic: nn.Module, target: nn.Module) -> None:
        for parameter, average in zip(critic.parameters(), target.parameters()):
            average.data.copy_(self.tau * parameter.data + (1.0 - self.tau) * average.data)

    def training_step(self, batch: Any, _: int) -> Tensor:
        state, action, reward, done, following = batch
        actor_optimizer, critic1_optimizer, critic2_optimizer = self.optimizers()

        with torch.no_grad():
            next_action, log_probability = self.act(following)
            pair = torch.cat([following, next_action], dim=1)
            value = torch.min(self.target1(pair), self.target2(pair)) - self.alpha * log_probability
            expected = reward + self.gamma * (1.0 - done) * value

        losses = []
        pair = torch.cat([state, action], dim=1)
        for critic, optimizer in ((self.critic1, critic1_optimizer), (self.critic2, critic2_optimizer)):
            loss = functional.mse_loss(critic(pair), expected)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            losses.append(loss.detach())

        new_action, log_probability = self.act(state)
        pair = torch.cat([state, new_action], dim=1)
        loss = (self.alpha * log_probability - torch.min(self.critic1(pair), self.critic2(pair))).mean()
        actor_optimizer.zero_grad()
        self.manual_backward(loss)
        actor_optimizer.step()

        self.soft_update(self.critic1, self.target1)
        self.soft_update(self.critic2, self.target2)
        total = loss.detach() + sum(losses)
        self.log("train_loss", total)
        return total

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(module.parameters(), lr=3e-4) for module in (self.actor, self.critic1, self.critic2)]

    @staticmethod
    def dataset(samples: int) -> Dataset[Any]:
        state = torch.randn(samples, STATE)
        action = torch.rand(samples, ACTION) * 2 - 1
        following = state + 0.1 * torch.randn(samples, STATE)
        reward = state.sum(dim=1, keepdim=True) * action.mean(dim=1, keepdim=True)
        return TensorDataset(state, action, reward, (torch.rand(samples, 1) < 0.05).float(), following)


MODELS: dict[str, type[Any]] = {"gnn": GNN, "moco": MoCo, "sac": SAC}
