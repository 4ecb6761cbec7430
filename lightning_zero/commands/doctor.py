"""`lightning-zero doctor`: measure this machine, and report what works on it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import asdict, replace
from typing import Any

from lightning_zero.commands.showing import Parser, positive, print_json
from lightning_zero.io.text import in_bytes, print_table


def parser() -> Parser:
    made = Parser(
        prog="lightning-zero doctor",
        description="Measure this machine for lightning-zero plan --resources FILE, and report what works on it.",
    )
    made.add_argument("--ranks", type=positive, default=2, help="number of processes to measure together (default: 2)")
    made.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    made.add_argument("--disk", help="folder on the disk for offload='nvme' (default: the folder for temporary files)")
    made.add_argument("--json", action="store_true", help="print JSON, which lightning-zero plan --resources reads")
    return made


def main(arguments: list[str]) -> int:
    parsed = parser().parse_args(arguments)
    if parsed.disk is not None and not os.path.isdir(parsed.disk):
        parser().error(f"argument --disk: {parsed.disk!r} is not a folder: create it on the disk to measure")
    from lightning_zero.planning.measure import disk_bandwidth, host_memory, measure
    from lightning_zero.reporting.manifest import installed_packages, machine

    try:
        resources, about = measure(parsed.ranks, parsed.device)
    except (AssertionError, RuntimeError, ValueError) as error:
        print(f"lightning-zero doctor: {error}", file=sys.stderr)
        return 1
    about["disk"] = parsed.disk or tempfile.gettempdir()
    findings = []
    try:
        # the ranks share the disk
        resources = replace(resources, disk_bandwidth=disk_bandwidth(about["disk"]) / parsed.ranks)
    except OSError as error:
        findings.append(
            f"The disk for offload='nvme' could not be measured ({error}): choose another with --disk FOLDER. "
            f"Without a measurement, plans assume {in_bytes(resources.disk_bandwidth)}/s."
        )
    about |= {"memory_bytes": host_memory(), "free_on_disk_bytes": shutil.disk_usage(about["disk"]).free}
    shown = ("python", "torch", "lightning", "pytorch-lightning", "torchmetrics", "hydra-core", "lightning_zero")
    versions = {name: version for name, version in installed_packages().items() if name in shown}
    found = {"versions": versions, "machine": {**machine(), **about}, "resources": asdict(resources)}
    findings += _findings(found)
    if parsed.json:
        print_json({**found, "findings": findings})
        return 0
    measured = {**found["machine"], **found["resources"]}
    print_table(
        [*found["versions"].items(), *((name.replace("_", " "), _said(name, measured[name])) for name in measured)]
    )
    for finding in findings:
        print(finding)
    return 0


def _findings(found: dict[str, Any]) -> list[str]:
    """Causes of slow training on this machine, with remedies where there are any."""
    machine, resources = found["machine"], found["resources"]
    said = []
    if machine.get("transport") == "gloo" and os.environ.get("LIGHTNING_ZERO_CROSS_MEMORY") != "0":
        said.append(
            "Ranks on this machine cannot read each other's memory (process_vm_readv is not permitted), so they "
            "exchange data over Gloo's sockets, which is slower. In a container, --cap-add=SYS_PTRACE permits it."
        )
    if machine["processors"] < machine["ranks"]:
        said.append(
            f"{machine['ranks']} ranks share {machine['processors']} processor(s), so they take turns. "
            "Use no more ranks than processors, or use GPUs."
        )
    if not machine["gpus"] and resources["flops"] < 1e12:
        said.append(
            f"No GPU is visible. Matrix multiplications reach {resources['flops'] / 1e9:.0f} GFLOP/s per rank, so "
            "training a model with 10^9 parameters takes "
            f"{6e9 / resources['flops']:.2g} s per token on each rank."
        )
    return said


def _said(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == []:
        return "none"
    if name.endswith("bytes") or name == "memory":
        return in_bytes(value)
    if name.endswith("bandwidth"):
        return f"{in_bytes(value)}/s"
    if name.endswith("flops"):
        return f"{value / 1e9:.4g} GFLOP/s"
    if name.endswith("seconds"):
        return f"{1e6 * value:.3g} microseconds"
    return ", ".join(value) if isinstance(value, list) else str(value)
