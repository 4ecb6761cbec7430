"""Counts the graphs that Dynamo compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters


class CountingBackend:
    """A backend for ``torch.compile`` that counts graphs, operators and graph breaks since its creation."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self._graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self._graphs.append(graph)
        return aot_eager(graph, inputs)

    def counts(self) -> dict[str, int]:
        return {
            "graphs": len(self._graphs),
            "unique graphs": counters["stats"]["unique_graphs"],
            "operators": sum(node.op == "call_function" for graph in self._graphs for node in graph.graph.nodes),
            "breaks": sum(counters["graph_break"].values()),
        }
