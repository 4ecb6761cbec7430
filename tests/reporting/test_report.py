"""`lightning-zero report` on real runs: a job on two ranks, a sweep, and a project with Lightning's own loggers."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_zero.commands import report
from lightning_zero.io.sizes import in_bytes
from lightning_zero.reporting import RunManifest
from tests.app.commands import TINY, finish, start, succeed
from tests.reporting.projects import Project, loader
from tests.strategy.test_two_dimensions import train

COST = ("--price-per-hour", "2.5", "--power-watts", "400", "--carbon-intensity", "300")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job on two ranks with its report."""
    folder = tmp_path_factory.mktemp("job")
    succeed("train", *TINY, "hydra.run.dir=job", folder=folder)
    said = succeed("report", "job", *COST, folder=folder)
    assert said.splitlines() == ["job/report.html", "job/README.md"]
    return folder / "job"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two jobs, logged by TensorBoard, with its report."""
    folder = tmp_path_factory.mktemp("sweep")
    tiny = [argument for argument in TINY if not argument.startswith("logger=")]
    succeed("train", "-m", *tiny, "stage=ddp,2", "hydra.sweep.dir=sweep", folder=folder)
    said = succeed("report", "sweep", "--price-per-hour", "2.5", folder=folder)
    assert said.splitlines() == ["sweep/report.html", "sweep/0/README.md", "sweep/1/README.md"]
    return folder / "sweep"


def summary_of(folder: Path, *arguments: str) -> dict[str, Any]:
    """The output of `lightning-zero report FOLDER --json`, called in this process, which is faster."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert report.main([str(folder), "--json", *arguments]) == 0
    return json.loads(printed.getvalue())


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


class Tables(HTMLParser):
    """The tables of a page as lists of rows by class, and the page's text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._name = ""
        self._is_cell = False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self._name = dict(attrs).get("class") or "other"
            self.tables.setdefault(self._name, [])
        elif tag == "tr":
            self.tables[self._name].append([])
        elif tag in ("td", "th"):
            self.tables[self._name][-1].append("")
            self._is_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.text += data + " "
        if self._is_cell:
            self.tables[self._name][-1][-1] += data


@pytest.mark.exhaustive
def test_curves_are_those_of_the_logger(job: Path) -> None:
    (found,) = summary_of(job)["jobs"]
    with (job / "logs" / "metrics.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    expected = [[int(row["step"]), float(row["validation/perplexity"])] for row in rows if row["validation/perplexity"]]
    assert found["metrics"]["validation/perplexity"] == expected and len(expected) == 3
    page = (job / "report.html").read_text()
    assert page.count("<svg") == page.count("<figure>") >= 4


@pytest.mark.exhaustive
def test_numbers_on_the_page_are_those_of_the_runs_records(job: Path) -> None:
    results, manifest = read_json(job / "results.json"), read_json(job / "manifest.json")
    page = Tables(job / "report.html")
    heading, *rows, total = page.tables["memory"]
    assert heading[1:] == ["measured", "predicted", "difference"]
    assert {name: measured for name, measured, *_ in rows} == {
        name: in_bytes(nbytes) for name, nbytes in results["peak_bytes"].items()
    }
    assert total[1] == in_bytes(sum(results["peak_bytes"].values()))
    moved = {(kind, link): (calls, size) for kind, link, calls, _, size in page.tables["communication"][1:]}
    assert moved == {
        (each["kind"], each["link"]): (f"{each['calls']:,}", in_bytes(each["bytes"]))
        for each in manifest["end"]["communication"]
    }
    assert manifest["end"]["engine"]["bytes"]["all_gather"] > 0
    for text in (
        f"{results['per_second']:,.0f} tokens a second",
        f"{results['validation']['perplexity']:.5g}",
        f"{results['parameters']:,}",
        manifest["data"]["fingerprint"],
        manifest["packages"]["torch"],
        "ZeRO stage 3",
    ):
        assert text in page.text, text


@pytest.mark.exhaustive
def test_predicted_memory_is_what_the_ranks_held(job: Path) -> None:
    memory = summary_of(job)["jobs"][0]["memory"]
    assert memory["predicted"]["peak_bytes"] == memory["measured"] == read_json(job / "results.json")["peak_bytes"]
    of_process = memory["predicted"]["process_peak_bytes"]
    assert of_process["activations"] > 0 and sum(of_process.values()) > sum(memory["measured"].values())
    without = summary_of(job, "--no-prediction")["jobs"][0]["memory"]
    assert without["predicted"] is None and without["measured"] == memory["measured"]


def test_cost_is_time_times_ranks_times_the_declared_rates(job: Path) -> None:
    (found,) = summary_of(job, *COST)["jobs"]
    hours = read_json(job / "manifest.json")["end"]["seconds"] * 2 / 3600
    expected = {"rank_hours": hours, "price": hours * 2.5, "kwh": hours * 0.4, "co2_kg": hours * 0.4 * 0.3}
    assert found["cost"] == pytest.approx(expected)
    assert set(summary_of(job, "--power-watts", "400")["jobs"][0]["cost"]) == {"rank_hours", "kwh"}
    assert f"{hours * 2.5:.5g}" in Tables(job / "report.html").text


def test_the_model_card_has_the_metadata_of_the_hub(job: Path) -> None:
    results, manifest = read_json(job / "results.json"), read_json(job / "manifest.json")
    card = ModelCard.load(job / "README.md")
    assert card.data.tags == ["lightning_zero", "zero3"] and card.data.library_name == "lightning"
    assert card.data.model_name == "LanguageModel"
    assert {each.metric_type: each.metric_value for each in card.data.eval_results} == results["validation"]
    assert {each.dataset_revision for each in card.data.eval_results} == {manifest["data"]["fingerprint"]}
    grams = manifest["end"]["seconds"] * 2 / 3600 * 0.4 * 300
    assert card.data.to_dict()["co2_eq_emissions"]["emissions"] == pytest.approx(grams)
    for text in ("| strategy | ZeRO stage 3 |", "| seed | 0 |", "`model.width=32`", manifest["packages"]["torch"]):
        assert text in card.text


def test_a_card_is_overwritten_unless_a_user_has_replaced_it(job: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(job, copy)
    succeed("report", "copy", "--no-prediction", folder=tmp_path)
    (copy / "README.md").write_text("my own words")
    code, _, errors = finish(start("report", "copy", folder=tmp_path))
    assert code == 2
    assert errors == (
        "lightning-zero report: copy/README.md exists and was not written by this command: choose another folder with "
        "--output\n"
    )
    said = succeed("report", "copy", "--output", "there", "--no-prediction", folder=tmp_path)
    assert said.split() == ["there/report.html", "there/README.md"]
    assert (copy / "README.md").read_text() == "my own words"


@pytest.mark.exhaustive
def test_a_sweep_is_one_page_that_compares_its_jobs_by_the_settings_that_differ(sweep: Path) -> None:
    page = Tables(sweep / "report.html")
    heading, *rows = page.tables["jobs"]
    results = [read_json(sweep / name / "results.json") for name in "01"]
    assert [row[0] for row in rows] == ["stage=ddp", "stage=2"]
    perplexity, memory, predicted = map(heading.index, ("validation perplexity", "peak memory a rank", "predicted"))
    for row, found in zip(rows, results, strict=True):
        assert row[perplexity] == f"{found['validation']['perplexity']:.5g}"
        assert row[memory] == row[predicted] == in_bytes(sum(found["peak_bytes"].values()))
    found = summary_of(sweep, "--price-per-hour", "2.5", "--no-prediction")
    assert found["cost"]["price"] == pytest.approx(sum(job["cost"]["price"] for job in found["jobs"]))
    manifests = [read_json(sweep / name / "manifest.json") for name in "01"]
    assert manifests[0]["data"] == manifests[1]["data"], "both jobs have the same data"
    assert ModelCard.load(sweep / "0" / "README.md").data.tags == ["lightning_zero", "ddp"]


@pytest.mark.exhaustive
def test_curves_are_read_from_tensorboards_files(sweep: Path) -> None:
    found = summary_of(sweep, "--no-prediction")["jobs"][1]
    curve = read_json(sweep / "1" / "results.json")["validation_curve"][1:]  # nothing is logged before the first step
    logged = [value for _, value in found["metrics"]["validation/perplexity"]]
    assert logged[: len(curve)] == pytest.approx([metrics["validation/perplexity"] for _, metrics in curve])


@pytest.mark.exhaustive
def test_a_job_without_records_is_shown_as_having_none(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep, tmp_path / "sweep")
    shutil.rmtree(tmp_path / "sweep/1/logs")
    (tmp_path / "sweep/1/results.json").unlink()
    (tmp_path / "sweep/1/manifest.json").unlink()
    said = succeed("report", "sweep", "--no-prediction", folder=tmp_path)
    assert said.split() == ["sweep/report.html", "sweep/0/README.md"]
    assert [row[1] for row in Tables(tmp_path / "sweep/report.html").tables["jobs"][1:]] == ["completed", "no records"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without `lightning-zero train`, with the callback and both of Lightning's loggers."""
    folder = tmp_path_factory.mktemp("project")
    seed_everything(0, verbose=False)
    Trainer(
        strategy="zero1",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=[CSVLogger(folder, name="csv", version=""), TensorBoardLogger(folder, name="board", version="")],
        log_every_n_steps=1,
        callbacks=[RunManifest(folder)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(Project(), loader())
    return folder


def test_a_run_without_lightning_zero_train_has_curves_memory_and_a_prediction(project: Path) -> None:
    (found,) = summary_of(project)["jobs"]
    assert [step for step, _ in found["metrics"]["train_loss"]] == list(range(8))
    assert found["memory"]["predicted"]["peak_bytes"] == found["memory"]["measured"]
    assert found["label"] == project.name


def fit_with_manifest(folder: Path, strategy: dict[str, Any]) -> None:
    train(strategy, callbacks=[RunManifest(folder)])


@pytest.mark.parametrize(
    ("options", "recorded"),
    [
        # Groups of two ranks on one machine stand for two machines of two ranks each, which hold the same.
        ({"shard_within": 2}, {"nodes": 2, "shard_within": "node"}),
        ({"tensor_parallel_size": 2, "timeout": timedelta(minutes=5)}, {}),
    ],
    ids=["machines", "tensor parallelism"],
)
def test_predicted_memory_is_what_the_ranks_of_a_node_or_a_mesh_held(run_on, tmp_path, options, recorded) -> None:
    run_on(4, fit_with_manifest, folder=tmp_path, strategy={"stage": 3, "unit_numel": 0, **options})
    manifest = read_json(tmp_path / "manifest.json")
    manifest["nodes"] = recorded.pop("nodes", 1)
    manifest["strategy"]["options"] |= recorded
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    memory = summary_of(tmp_path)["jobs"][0]["memory"]
    assert memory["not_predicted"] is None
    assert memory["predicted"]["peak_bytes"] == memory["measured"]


def test_manifests_without_the_number_of_nodes_are_for_one(project: Path, tmp_path: Path) -> None:
    manifest = read_json(project / "manifest.json")
    del manifest["nodes"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    memory = summary_of(tmp_path)["jobs"][0]["memory"]
    assert memory["predicted"]["peak_bytes"] == memory["measured"]


def test_records_of_both_loggers_give_the_same_curves(project: Path, tmp_path: Path) -> None:
    curves = []
    for name in ("csv", "board"):
        shutil.copytree(project / name, tmp_path / name)
        curves.append(summary_of(tmp_path / name)["jobs"][0]["metrics"]["train_loss"])
    of_csv, of_board = curves
    assert [step for step, _ in of_csv] == [step for step, _ in of_board]
    assert [loss for _, loss in of_csv] == pytest.approx([loss for _, loss in of_board])


def test_a_missing_prediction_is_explained(project: Path, tmp_path: Path) -> None:
    manifest = read_json(project / "manifest.json")

    def why(change: Callable[[dict[str, Any]], Any]) -> str:
        changed = json.loads(json.dumps(manifest))
        change(changed)
        (tmp_path / "manifest.json").write_text(json.dumps(changed))
        return summary_of(tmp_path)["jobs"][0]["memory"]["not_predicted"]

    assert "add the callback lightning_zero.reporting.RunManifest" in why(lambda found: found.pop("batch"))
    assert "is in a script" in why(lambda found: found["model"].update({"class": "__main__:Net"}))
    assert "cannot be restored from its text" in why(
        lambda found: found["strategy"]["options"].update(units={"repr": "<f>"})
    )
    assert "cannot be predicted: only ZeRO, DDP and a single device can" in why(
        lambda found: found["strategy"].update({"class": "a:FSDP", "stage": None})
    )
    assert "ModuleNotFoundError" in why(lambda found: found["model"].update({"class": "gone:Net"}))


def test_memory_over_time_is_what_the_monitor_logged(project: Path, tmp_path: Path) -> None:
    shutil.copy(project / "manifest.json", tmp_path)
    logger = CSVLogger(tmp_path, name="logs", version="")
    for step, parameters, gradients in ((10, 2.0, 0.5), (20, 2.0, 1.5), (30, 2.0, 1.0)):
        held = {"memory/parameters_MB": parameters, "memory/gradients_MB": gradients, "memory/peak_MB": 4.0}
        logger.log_metrics({**held, "memory/resident_MB": 50.0, "communication/all_gather/within_MB": 3.0}, step)
    logger.save()
    (found,) = summary_of(tmp_path)["jobs"]
    assert found["memory"]["over_time"] == {
        "parameters": [[10, 2e6], [20, 2e6], [30, 2e6]],
        "gradients": [[10, 5e5], [20, 1.5e6], [30, 1e6]],
        "peak": [[10, 4e6], [20, 4e6], [30, 4e6]],
    }
    assert report.main([str(tmp_path), "--output", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    for text in ("memory over time", "predicted peak", "peak so far", "resident", "communication, MB"):
        assert text in page, text


def test_versions_in_a_loggers_folder_are_runs_that_are_compared_by_their_settings(tmp_path: Path) -> None:
    for version, width in (("version_0", 8), ("version_1", 32)):
        logger = CSVLogger(tmp_path, name="lightning_logs", version=version)
        logger.log_hyperparams({"width": width, "depth": 2})
        logger.log_metrics({"loss": 1 / width}, 1)
        logger.save()
    found = summary_of(tmp_path)["jobs"]
    assert [(job["label"], job["last"], job["status"]) for job in found] == [
        ("width=8", {"loss": 1 / 8}, "unknown"),
        ("width=32", {"loss": 1 / 32}, "unknown"),
    ]
    one = tmp_path / "lightning_logs" / "version_0"
    assert report.main([str(one)]) == 0
    assert ModelCard.load(one / "README.md").data.eval_results[0].metric_value == 1 / 8
    assert "0.125" not in (one / "report.html").read_text().partition("<svg")[0], "metrics of no validation are curves"


def log_loss(folder: Path, **hyperparameters: Any) -> None:
    logger = CSVLogger(folder.parent, name=folder.name, version="")
    logger.log_hyperparams(hyperparameters)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.save()


def test_runs_with_equal_settings_are_labelled_by_as_much_of_their_paths_as_differs(tmp_path: Path) -> None:
    places = [f"{experiment}/lightning_logs/version_0" for experiment in ("a", "b")]
    for place in places:
        log_loss(tmp_path / place, width=8)
    assert [job["label"] for job in summary_of(tmp_path)["jobs"]] == places


def test_interpolations_and_texts_that_look_like_them_are_shown_as_text(tmp_path: Path) -> None:
    for name, depth in (("0", "${model.heads}"), ("1", "${model.layers}")):
        log_loss(tmp_path / name)
        # as a logger writes it where OmegaConf is not installed
        (tmp_path / name / "hparams.yaml").write_text(f"prompt: 'a price of ${{x'\ndepth: {depth}\n")
        (tmp_path / name / ".hydra").mkdir()
        (tmp_path / name / ".hydra/overrides.yaml").write_text(f"- model.depth={depth}\n- model.width=8\n")
    assert [(job["label"], job["config"]) for job in summary_of(tmp_path)["jobs"]] == [
        (f"model.depth={depth}", {"prompt": "a price of ${x", "depth": depth})
        for depth in ("${model.heads}", "${model.layers}")
    ]


def test_passwords_that_hydra_or_a_logger_has_written_are_not_shown(tmp_path: Path) -> None:
    for name, key in (("0", "abc"), ("1", "def")):
        log_loss(tmp_path / name, api_key=key)
        (tmp_path / name / ".hydra").mkdir()
        (tmp_path / name / ".hydra/overrides.yaml").write_text(f"- logger.api_key={key}")
    assert [(job["label"], job["overrides"], job["config"]) for job in summary_of(tmp_path)["jobs"]] == [
        (f"{name}", ["logger.api_key=***"], {"api_key": "***"}) for name in "01"
    ]


def test_a_run_that_did_not_end_is_reported_as_such_without_a_cost(project: Path, tmp_path: Path) -> None:
    manifest = read_json(project / "manifest.json")
    del manifest["end"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (found,) = summary_of(tmp_path, *COST)["jobs"]
    assert found["status"] == "did not end" and found["cost"] == {} and found["seconds"] is None
    assert report.main([str(tmp_path), *COST]) == 0
    assert "whose status is: did not end" in (tmp_path / "README.md").read_text()


def refused(*arguments: str) -> str:
    """Standard error of a report that fails."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            assert report.main([*arguments]) == 2
        except SystemExit as error:  # from argparse
            assert error.code == 2
    return printed.getvalue()


def test_a_folder_without_records_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken", "odd"):
        (tmp_path / name).mkdir()
    assert refused("empty") == (
        "lightning-zero report: empty has no records of a run: no manifest.json from RunManifest, no results.json from "
        "lightning-zero train, no metrics.csv from CSVLogger, and no event files from TensorBoard\n"
    )
    assert refused("nowhere") == (
        "lightning-zero report: nowhere is not a folder: pass the folder of a run or of a sweep\n"
    )
    (tmp_path / "broken/results.json").write_text('{"processes": ')
    assert re.fullmatch(r"lightning-zero report: broken/results\.json cannot be read as JSON: .*\n", refused("broken"))
    (tmp_path / "odd/metrics.csv").write_text("step,loss\n1,low\n")
    assert re.fullmatch(r"lightning-zero report: odd/metrics\.csv is not a CSVLogger file: .*low.*\n", refused("odd"))
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "broken",
        "empty",
        "metrics.csv",
        "odd",
        "results.json",
    ]


@pytest.mark.exhaustive
def test_packages_that_are_not_installed_are_named_in_one_line(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(sweep / "1", tmp_path / "job")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # Python then finds no such package
    assert refused("job") == (
        "lightning-zero report: job/logs has TensorBoard event files, but the package tensorboard is missing: "
        'pip install "lightning_zero[tensorboard]"\n'
    )
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert refused("job") == (
        'lightning-zero report: the package jinja2 is missing: pip install "lightning_zero[report]"\n'
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused("job") == (
        'lightning-zero report: the packages jinja2, matplotlib are missing: pip install "lightning_zero[report]"\n'
    )


def test_wrong_cost_options_are_refused() -> None:
    assert "'-1' must be a number above 0" in refused(".", "--price-per-hour", "-1")
    assert "'dear' must be a number above 0" in refused(".", "--power-watts", "dear")
    assert refused(".", "--carbon-intensity", "300") == (
        "lightning-zero report: --carbon-intensity requires --power-watts: CO2 is carbon intensity times energy\n"
    )
