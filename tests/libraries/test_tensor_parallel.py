"""Transformers models split by their own tensor-parallel plans, with ZeRO over the other mesh dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from lightning_zero.engine import Engine
from tests.engine.test_tensor_parallel import mesh_of
from tests.support.training import same_tensors

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    options = {"head_dim": 4} if name == "Qwen3" else {}
    config = getattr(transformers, f"{name}Config")(**SIZES, **options, tie_word_embeddings=False)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def tokens(step: int, of: int) -> torch.Tensor:
    return torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(10 * step + of))


def learn(name: str, stage: int) -> None:
    alone = made(name)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    for step in range(3):
        for part in range(2):
            (alone(input_ids=tokens(step, part), labels=tokens(step, part)).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    model, mesh = made(name), mesh_of(2)
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2))
    apply_tensor_parallelism(model, mesh["tensor_parallel"], plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = Engine(model, [optimizer], mesh=mesh, stage=stage)
    assert any(slot.share.is_divided for slot in (p.slot for p in model.parameters()))
    for step in range(3):
        batch = tokens(step, mesh["data_parallel"].get_local_rank())
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    same_tensors(engine.full_state_dict(), alone.state_dict(), bound=1e-5)
    with torch.no_grad():
        found, expected = (each(input_ids=tokens(9, 9)).logits for each in (model, alone))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    engine.close()


@pytest.mark.exhaustive(but=1)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_a_model_split_by_its_tensor_parallel_plan_learns_as_in_one_process(run_on, name, stage):
    run_on(4, learn, name=name, stage=stage)
