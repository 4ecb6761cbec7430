"""Model card for a run: a README.md for the Hugging Face Hub. Requires huggingface_hub and jinja2."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from lightning_zero.io.sizes import in_bytes
from lightning_zero.reporting.page import MAIN_PACKAGES, duration, number, rate

NAME = "README.md"
MARK = "<!-- lightning-zero report writes this file anew as long as this line is in it -->"


def may_write(path: Path) -> bool:
    """Whether there is no file at the path, or the file contains ``MARK``, which ``write`` puts into each card."""
    return not path.exists() or MARK in path.read_text()


def write(job: Mapping[str, Any], path: Path) -> None:
    """Write the model card for one job of a summary."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    manifest = job["manifest"]
    name = manifest["model"]["class"].rpartition(":")[2] if manifest else job["folder"]
    data = manifest.get("data", {})
    metrics = job["validation"] or {metric: value for metric, value in job["last"].items() if "/" not in metric}
    results = [
        EvalResult(
            task_type="other",  # the Hub's value for an unknown task
            dataset_type=data.get("class", "unknown"),
            dataset_name=data.get("class", "unknown"),
            dataset_revision=data.get("fingerprint"),
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in metrics.items()
    ]
    strategy = (job["strategy"] or "").lower().replace("zero stage ", "zero").removesuffix("strategy")
    grams = 1000 * job["cost"].get("co2_kg", 0.0)
    emissions: dict[str, Any] = {"emissions": grams, "source": "declared power and carbon intensity"}
    held = job["memory"]["measured"]
    card = ModelCard.from_template(
        ModelCardData(
            library_name="lightning",
            tags=["lightning_zero", *([strategy] if strategy else [])],
            model_name=name,
            eval_results=results or None,
            **({"co2_eq_emissions": emissions} if grams else {}),  # type: ignore[arg-type]
        ),
        template_str=(resources.files(__package__) / "card.md.jinja").read_text(),
        name=name,
        mark=MARK,
        job=job,
        manifest=manifest,
        data=data,
        metrics={metric: number(value) for metric, value in metrics.items()},
        facts={
            "strategy": job["strategy"],
            "ranks": job["ranks"],
            "precision": job["precision"],
            "parameters": job["parameters"] and f"{job['parameters']:,}",
            "steps": job["steps"],
            "time of the fit": duration(job["seconds"]),
            "throughput": rate(job),
            "peak memory a rank": in_bytes(sum(held.values())) if held else "",
        },
        packages={package: manifest["packages"].get(package) for package in MAIN_PACKAGES} if manifest else {},
    )
    card.save(path)
