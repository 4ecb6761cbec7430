"""Each option refuses values of a wrong type with one line that names the option; values are found by search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lightning_zero.fabric
from lightning_zero import OffloadConfig, ResilienceConfig, ZeroAutoStrategy, ZeroStrategy
from lightning_zero.engine import EngineConfig
from lightning_zero.io.annotations import check_fields, described, matches
from lightning_zero.strategies.base import SET_BY_STRATEGIES, StrategyOptions, TrainerOptions

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.complex_numbers(),
    st.sampled_from(["auto", "cpu", "nvme", "full", "units", "node", "memory", "exact", "gloo", "yes", "3", "\u00b2"]),
    st.sampled_from([np.zeros(3), np.float32(1), torch.zeros(2, 3), torch.tensor(1), torch.float16, Fraction(1, 2)]),
    st.sampled_from([int, nn.Linear, nn.Linear(1, 1), object(), len, Path("x"), timedelta(0), timedelta(seconds=-1)]),
    st.sampled_from([OffloadConfig(), ResilienceConfig()]),
)
VALUES = st.recursive(
    LEAVES,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), each, max_size=2),
    max_leaves=4,
)


def names_in(config: type, without: tuple[str, ...] = ()) -> list[str]:
    return [each.name for each in dataclasses.fields(config) if each.name not in without]


def of_fields(
    prefix: str, config: type, make: Callable[..., Any] | None = None
) -> st.SearchStrategy[tuple[Callable[..., Any], str, str]]:
    return st.tuples(st.just(make or config), st.sampled_from(names_in(config)), st.just(prefix))


OPTIONS = st.one_of(
    of_fields("", EngineConfig),
    of_fields("", StrategyOptions),
    of_fields("", TrainerOptions),
    of_fields("offload: ", OffloadConfig),
    of_fields("resilience: ", ResilienceConfig),
    of_fields("offload: ", OffloadConfig, lambda **given: EngineConfig(offload=given)),
    of_fields("resilience: ", ResilienceConfig, lambda **given: TrainerOptions(resilience=given)),
    st.tuples(
        st.just(ZeroStrategy),
        st.sampled_from(names_in(TrainerOptions, SET_BY_STRATEGIES)),
        st.just(""),
    ),
    st.tuples(
        st.just(lightning_zero.fabric.ZeroStrategy),
        st.sampled_from(names_in(StrategyOptions, SET_BY_STRATEGIES)),
        st.just(""),
    ),
)


@pytest.mark.exhaustive
@settings(max_examples=800, deadline=None, derandomize=True, database=None)
@given(OPTIONS, VALUES)
def test_a_wrong_value_gives_one_line_that_names_the_option(option: tuple[Any, str, str], value: Any) -> None:
    make, name, prefix = option
    try:
        made = make(**{name: value})
    except (TypeError, ValueError) as error:
        option_named = prefix.removesuffix(": ") or name
        assert str(error).startswith((f"{option_named}: ", f"{option_named}=")), error
        assert "\n" not in str(error) and len(str(error)) < 500, error
    else:
        if dataclasses.is_dataclass(made):
            check_fields(made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"async_save": "yes"}, "async_save='yes' must be True or False."),
        ({"timeout": math.nan}, "timeout=nan must be None, or a timedelta or number of seconds above 0."),
        ({"timeout": math.inf}, "timeout=inf must be None, or a timedelta or number of seconds above 0."),
        ({"timeout": "30"}, "timeout='30' must be a timedelta, a number or None."),
        ({"checkpoint": ["full"]}, "checkpoint=['full'] must be 'full' or 'sharded'."),
        ({"prefetch": 1.0}, "prefetch=1.0 must be an integer of at least 0."),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be 'auto', an integer of at least 1 or None."),
        ({"process_group_backend": 5}, "process_group_backend=5 must be a string or None."),
        ({"resilience": {"job": 5}}, "resilience: job=5 must be a string or None."),
        ({"offload": {"fraction": math.nan}}, "offload: fraction=nan must be a number of at least 0."),
        ({"offload": {"overlap": 1}}, "offload: overlap=1 must be True or False."),
        ({"whole_parameters": "no"}, "whole_parameters='no' must be True or False, a function or None."),
        ({"shard_within": True}, "shard_within=True must be 'node', an integer of at least 2 or None."),
        ({"bucket_numel": np.zeros(99)}, "bucket_numel=array([0., 0., "),
    ],
)
def test_the_line_names_the_value_and_what_is_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ZeroStrategy(**given)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("resources", [5, [], {"flops": "fast"}, {"flop": 1.0}, {}])
def test_zero_auto_names_wrong_resources(resources: Any) -> None:
    with pytest.raises(ValueError, match=r"^resources[ =].*") as caught:
        ZeroAutoStrategy(resources=resources)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "right", "wrong", "words"),
    [
        (int, [3, -1], [True, 3.0, "3", None], "an integer"),
        (float, [3, 3.5, math.nan], [True, "3", None, 1j], "a number"),
        (bool, [True], [1, "true"], "True or False"),
        (str | Path | None, ["a", Path("a"), None], [b"a", 3], "a string, a Path or None"),
        (dict[str, float], [{}, {"a": 1}], [{"a": "b"}, {1: 1}, [], None], "a dict"),
        (list[list[Any]], [[], [[1, "a"]]], [[1], "ab", {}], "a list"),
        (type[nn.Module], [nn.Linear], [int, nn.Linear(1, 1)], "a type"),
        (Callable[[int], bool], [len, int], ["len", None], "a function"),
        (torch.dtype, [torch.half], ["half"], "a dtype"),
    ],
    ids=str,
)
def test_types_are_checked_as_annotated(annotation: Any, right: list[Any], wrong: list[Any], words: str) -> None:
    assert [matches(value, annotation) for value in right + wrong] == [True] * len(right) + [False] * len(wrong)
    assert described(annotation) == words
