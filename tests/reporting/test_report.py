"""`lightning-zero report` shows what a run has recorded; it executes nothing, and follows no links."""

from __future__ import annotations

import base64
import contextlib
import csv
import html
import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from lightning_zero.commands import report
from lightning_zero.io.plain import as_markdown
from lightning_zero.io.text import in_bytes
from lightning_zero.reporting import RunManifest
from tests.app.commands import TINY, succeed
from tests.reporting.projects import Project, loader


def reported(*arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, called in this process, which is faster."""
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = report.main(list(map(str, arguments)))
    return code, printed.getvalue(), errors.getvalue()


def records_of(folder: Path) -> list[dict[str, Any]]:
    code, printed, errors = reported(folder, "--json")
    assert code == 0, errors
    return json.loads(printed)


def refused(*arguments: Any) -> str:
    """The one-line error of a report that fails."""
    code, printed, errors = reported(*arguments)
    assert (code, printed) == (2, "") and errors.count("\n") == 1, errors
    return errors.removesuffix("\n").removeprefix("lightning-zero report: ")


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def texts_of(page: Path) -> list[str]:
    """The texts of a page's cells and headings."""
    return [html.unescape(each) for each in re.findall(r"<(?:td|h\d|summary|figcaption)>([^<]*)<", page.read_text())]


def figures_of(page: Path) -> dict[str, str]:
    """The page's figures as SVG, by title."""
    figures = re.findall(
        r'<figcaption>(.*?)</figcaption><img alt=".*?" src="data:(.*?);base64,(.*?)">', page.read_text()
    )
    assert {kind for _, kind, _ in figures} <= {"image/svg+xml"}
    return {html.unescape(title): base64.b64decode(image).decode() for title, _, image in figures}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without `lightning-zero train`, with the callback and Lightning's logger, and its report."""
    folder = tmp_path_factory.mktemp("project")
    seed_everything(0, verbose=False)
    Trainer(
        strategy="zero1",
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=CSVLogger(folder, name="csv", version=""),
        log_every_n_steps=1,
        callbacks=[RunManifest(folder)],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(Project(), loader())
    assert reported(folder) == (0, f"{folder}/report.html\n{folder}/README.md\n", "")
    return folder


def test_the_page_shows_what_the_run_has_recorded(project: Path) -> None:
    manifest, shown = read_json(project / "manifest.json"), texts_of(project / "report.html")
    assert manifest["end"]["engine"]["peak"]["parameters"] > 0
    for text in (
        manifest["data"]["fingerprint"],
        manifest["packages"]["torch"],
        manifest["seeds"]["seed_everything"],
        manifest["started"],
        in_bytes(manifest["end"]["engine"]["peak"]["parameters"]),
        f"{manifest['end']['seconds']:.5g}",
        "tests.reporting.projects:Project",
        "model.width",
        "completed",
    ):
        assert text in shown, text


def test_curves_are_those_of_the_logger(project: Path) -> None:
    with (project / "csv" / "metrics.csv").open() as stream:
        expected = [[int(row["step"]), float(row["train_loss"])] for row in csv.DictReader(stream)]
    (found,) = records_of(project)
    assert found["metrics"] == {"train_loss": expected} and len(expected) == 8
    figures = figures_of(project / "report.html")
    assert list(figures) == ["train_loss"] and figures["train_loss"].count("<use") >= 8


def test_the_model_card_has_the_metadata_of_the_hub(project: Path) -> None:
    manifest, card = read_json(project / "manifest.json"), ModelCard.load(project / "README.md")
    (loss,) = card.data.eval_results
    assert (loss.metric_type, loss.metric_value) == (
        "train_loss",
        records_of(project)[0]["metrics"]["train_loss"][-1][1],
    )
    assert loss.dataset_revision == manifest["data"]["fingerprint"]
    assert (card.data.model_name, card.data.library_name, card.data.tags) == (
        "Project",
        "lightning",
        ["lightning_zero"],
    )
    assert f"| torch | {as_markdown(manifest['packages']['torch'])} |" in card.text and "| numpy |" not in card.text
    assert f"| fingerprint | {manifest['data']['fingerprint']} |" in card.text


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two jobs of `lightning-zero train`, with its report."""
    folder = tmp_path_factory.mktemp("sweep")
    succeed("train", "-m", *TINY, "stage=ddp,2", "hydra.sweep.dir=sweep", folder=folder)
    said = succeed("report", "sweep", folder=folder)
    assert said.splitlines() == ["sweep/report.html", "sweep/0/README.md", "sweep/1/README.md"]
    return folder / "sweep"


@pytest.mark.exhaustive
def test_a_sweep_is_one_page_with_all_jobs_in_each_figure(sweep: Path) -> None:
    shown, figures = texts_of(sweep / "report.html"), figures_of(sweep / "report.html")
    results = [read_json(sweep / name / "results.json") for name in "01"]
    for found in results:
        assert f"{found['validation']['perplexity']:.5g}" in shown and f"{found['per_second']:.5g}" in shown
    assert any("stage=ddp" in text for text in shown) and "ZeRO stage 2" in shown
    assert all(f"> {name}</text>" in figures["validation/perplexity"] for name in "01")
    manifests = [read_json(sweep / name / "manifest.json") for name in "01"]
    assert manifests[0]["data"] == manifests[1]["data"], "both jobs have the same data"


@pytest.mark.exhaustive
def test_a_job_without_records_is_shown_as_having_none(sweep: Path, tmp_path: Path) -> None:
    shutil.copytree(sweep, tmp_path / "sweep")
    shutil.rmtree(tmp_path / "sweep/1/logs")
    for name in ("results.json", "manifest.json", "README.md"):
        (tmp_path / "sweep/1" / name).unlink()
    assert reported(tmp_path / "sweep")[1].split() == [f"{tmp_path}/sweep/report.html", f"{tmp_path}/sweep/0/README.md"]
    assert [run["name"] for run in records_of(tmp_path / "sweep")] == ["0", "1"]


def log_loss(folder: Path, loss: float = 1.0, name: str = "loss") -> None:
    logger = CSVLogger(folder.parent, name=folder.name, version="")
    logger.log_metrics({name: loss}, 1)
    logger.save()


def test_versions_in_a_loggers_folder_are_runs_that_are_compared(tmp_path: Path) -> None:
    for version in ("version_0", "version_10", "version_2"):
        log_loss(tmp_path / "lightning_logs" / version, loss=len(version))
    assert [(run["name"], run["metrics"]) for run in records_of(tmp_path)] == [
        (f"lightning_logs/{version}", {"loss": [[1, float(len(version))]]})
        for version in ("version_0", "version_2", "version_10")
    ]


def test_a_card_is_overwritten_unless_a_user_has_replaced_it(tmp_path: Path) -> None:
    log_loss(tmp_path)
    assert reported(tmp_path)[0] == reported(tmp_path)[0] == 0
    (tmp_path / "README.md").write_text("my own words")
    message = refused(tmp_path)
    assert message == (
        f"{tmp_path}/README.md exists and was not written by this command: choose another folder with --output"
    )
    assert reported(tmp_path, "--output", tmp_path / "there")[0] == 0
    assert (tmp_path / "README.md").read_text() == "my own words"


def test_passwords_that_hydra_or_a_manifest_contain_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/overrides.yaml").write_text("- logger.api_key=abc\n- model.depth=${model.width}")
    (tmp_path / "manifest.json").write_text(json.dumps({"config": {"logger": {"hf_token": "abc"}}}))
    (found,) = records_of(tmp_path)
    assert found["overrides"] == ["logger.api_key=***", "model.depth=${model.width}"]
    assert found["manifest"] == {"config": {"logger": {"hf_token": "***"}}}


# -- nothing is executed -----------------------------------------------------------------------------------------------

HOSTILE = (
    "<script>x</script>\"'`]()| [a](javascript:x) ![b](//c) *d* _e_ \n# f\r---\u202e www.g.h {{i}} {% j %} $k$ &lt;"
)


@pytest.fixture
def hostile(project: Path, tmp_path: Path) -> Path:
    """A run whose every text and name is hostile, and whose classes would leave a file if they were imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Net: pass\n")
    manifest = read_json(project / "manifest.json")

    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {f"{name}{HOSTILE}": spoiled(each) for name, each in value.items()} | value
        return HOSTILE if isinstance(value, str) else value

    manifest = spoiled(manifest) | {"model": {"class": "planted:Net"}, "config": {"model": {"_target_": "planted.Net"}}}
    manifest["strategy"] = {"class": "os:system", "stage": 3, "options": {"units": {"class": "planted:Net"}}}
    manifest["data"] = {"class": HOSTILE, "fingerprint": HOSTILE}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "results.json").write_text(json.dumps({"strategy": HOSTILE, HOSTILE: HOSTILE}))
    (folder / ".hydra").mkdir()
    (folder / ".hydra/overrides.yaml").write_text(json.dumps([HOSTILE]))
    log_loss(folder / "logs", name=HOSTILE.replace("\n", "").replace("\r", ""))
    return folder


def test_a_report_imports_nothing_that_a_run_folder_names(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hostile.parent)
    monkeypatch.syspath_prepend(hostile.parent)
    assert reported(hostile)[0] == 0
    assert "planted" not in sys.modules and not (hostile.parent / "executed").exists()


def test_data_is_escaped_on_the_page(hostile: Path) -> None:
    assert reported(hostile)[0] == 0
    page = (hostile / "report.html").read_text()
    tags = {"!doctype", "html", "head", "meta", "style", "title", "body", "h1", "h3", "table", "tr", "td"}
    tags |= {"section", "figure", "figcaption", "img", "details", "summary"}
    assert set(re.findall(r"<([!\w]+)", page)) == tags
    assert set(re.findall(r"<\w+ (\w+)=", page)) <= {"lang", "charset", "name", "http", "alt"}
    assert "\u202e" not in page and page.count("x&lt;/script&gt;") > 20
    for figure in figures_of(hostile / "report.html").values():
        assert "<script" not in figure


def test_data_is_escaped_in_the_model_card(hostile: Path) -> None:
    assert reported(hostile)[0] == 0
    metadata, text = ModelCard.load(hostile / "README.md").data, (hostile / "README.md").read_text()
    assert metadata.eval_results[0].dataset_name == HOSTILE.replace("\n", " ").replace("\r", " ").replace("\u202e", " ")
    _, _, body = text.partition("\n---\n")
    body = re.sub(r"^<!-- .* -->$", "", body, flags=re.MULTILINE)
    for character in "<>`[]()!*{}$\"'\u202e\r":
        assert character not in body, character
    assert all(re.fullmatch(r"(#+ .*|(\|[^|]*){2}\||)", line) for line in body.splitlines())
    assert "www." not in body and not re.search(r"(^|\s)_|_(\s|$)", body)


def plant(link: Path, target: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.unlink(missing_ok=True)
    link.symlink_to(target)


@pytest.mark.parametrize("name", ["report.html", "README.md", "0/README.md", "0"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_report_is_not_written_through_a_link(name: str, is_there: bool, tmp_path: Path) -> None:
    target = tmp_path / "another"
    if is_there and name == "0":
        target.mkdir()
    elif is_there:
        target.write_text("<!-- lightning-zero report writes this file anew as long as this line is in it -->")
    before = target.read_text() if target.is_file() else None
    log_loss(tmp_path / "run" / ("0" if "0" in name else ""))
    output = tmp_path / "output" if name == "0" else tmp_path / "run"
    plant(output / name, target)
    assert refused(tmp_path / "run", "--output", output).endswith(
        "is a link, or is in a folder that is a link, and is not written: choose another folder with --output"
    )
    assert (target.read_text() if target.is_file() else None) == before
    assert not target.is_dir() or not os.listdir(target)


@pytest.mark.parametrize(
    "name", ["manifest.json", "results.json", "logs/metrics.csv", ".hydra/overrides.yaml", ".hydra"]
)
def test_a_report_does_not_publish_what_a_link_points_to(name: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text("{}")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "overrides.yaml").write_text("['a secret']")
    plant(tmp_path / "run" / name, tmp_path / "private" / ("" if name == ".hydra" else "overrides.yaml"))
    assert "which leads out of this folder" in refused(tmp_path / "run")


def test_a_pipe_among_the_records_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.csv")
    path = f"{tmp_path}/metrics.csv"
    assert refused(tmp_path) == f"{path} cannot be read: {path} is not a regular file"


# -- damaged records ---------------------------------------------------------------------------------------------------


def test_a_folder_without_records_is_refused_in_one_line(tmp_path: Path) -> None:
    assert refused(tmp_path) == (
        f"{tmp_path} has no records of a run: no manifest.json from RunManifest, no results.json from lightning-zero "
        "train, and no metrics.csv from CSVLogger"
    )
    assert refused(tmp_path / "none") == f"{tmp_path}/none is not a folder: pass the folder of a run or of a sweep"


DAMAGED: dict[str, tuple[bytes, ...]] = {
    "manifest.json": (b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"a": 1' + b"0" * 5_000 + b"}"),
    "results.json": (
        b'{"loss_curve": 3}',
        b'{"loss_curve": [[1]]}',
        b'{"loss_curve": [["a", 1]]}',
        b'{"validation_curve": [[1, 2]]}',
        b'{"validation_curve": [[1, {"a": "b"}]]}',
        b"\xff",
    ),
    "metrics.csv": (
        b"step,loss\n1,low\n",
        b"step,loss\ninf,1\n",
        b"step,loss\n1e999,1\n",
        b"\xff",
        b'step,"' + b"a" * 200_000,
    ),
    ".hydra/overrides.yaml": (
        b"a: b",
        b"[[1], 2]",
        b"[",
        b"\xff",
        b"!!python/object:os.system {}",
        b"[" * 5_000,
        b"- " + b"a" * 70_000,
    ),
}


@pytest.mark.parametrize(("name", "content"), [(name, each) for name, many in DAMAGED.items() for each in many])
def test_a_damaged_record_is_named_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / name).write_bytes(content)
    assert refused(tmp_path).startswith(f"{tmp_path}/{name}")


@pytest.mark.exhaustive
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_records_of_any_content_give_a_report_or_one_line(project: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Values of other types, and files that end too early."""
    values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9), st.lists)
    manifest = place = read_json(project / "manifest.json")
    name = data.draw(st.sampled_from(sorted(place)))
    while isinstance(place[name], dict) and place[name] and data.draw(st.booleans()):
        place = place[name]
        name = data.draw(st.sampled_from(sorted(place)))
    place[name] = data.draw(values)
    text = json.dumps(manifest).encode()
    end = data.draw(st.sampled_from([len(text), len(text) - 1, 1]))
    (tmp_path / "manifest.json").write_bytes(text[:end])
    results = data.draw(st.dictionaries(st.sampled_from(["loss_curve", "validation_curve", "strategy"]), values))
    (tmp_path / "results.json").write_text(json.dumps(results))
    code, _, errors = reported(tmp_path)
    assert code == 0 or (code == 2 and errors.count("\n") == 1 and f"{tmp_path}/" in errors), errors


def test_packages_that_are_not_installed_are_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_loss(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # Python then finds no such package
    assert refused(tmp_path) == 'not installed: huggingface_hub. Run pip install "lightning_zero[report]"'
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert refused(tmp_path).startswith("not installed: huggingface_hub, matplotlib. ")
    assert records_of(tmp_path)[0]["metrics"] == {"loss": [[1, 1.0]]}


def test_an_output_that_cannot_be_written_is_named_in_one_line(tmp_path: Path) -> None:
    log_loss(tmp_path / "run")
    (tmp_path / "file").touch()
    assert str(tmp_path / "file") in refused(tmp_path / "run", "--output", tmp_path / "file")
