"""Pages of `lightning-zero report` in a headless Chromium: offline, complete, and readable on a phone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.app.commands import TINY, succeed

pytestmark = pytest.mark.timeout(600)

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two jobs on two ranks with its report, and the report of its second job in a folder `alone`."""
    folder = tmp_path_factory.mktemp("report")
    succeed("train", "-m", *TINY, "stage=ddp,3", "hydra.sweep.dir=sweep", folder=folder)
    succeed("report", "sweep", folder=folder)
    succeed("report", "sweep/1", "--output", "alone", folder=folder)
    return folder / "sweep"


@pytest.fixture(params=["sweep", "alone"])
def page(sweep: Path, request: pytest.FixtureRequest) -> str:
    """The address of a page in a file, with no server that could serve anything else."""
    return (sweep.parent / request.param / "report.html").as_uri()


def test_every_figure_is_drawn(browser: webdriver.Chrome, page: str) -> None:
    browser.get(page)
    figures = browser.find_elements(By.CSS_SELECTOR, "figure")
    titles = {figure.find_element(By.TAG_NAME, "figcaption").text for figure in figures}
    assert {"loss", "validation/loss", "validation/perplexity"} <= titles
    for figure in figures:
        image = figure.find_element(By.TAG_NAME, "img")
        assert image.size["width"] > 250 and image.size["height"] > 120
        assert browser.execute_script("return arguments[0].complete && arguments[0].naturalWidth > 0", image)


def test_nothing_is_loaded_and_nothing_fails(browser: webdriver.Chrome, page: str) -> None:
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page)
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"}
    assert page in asked and {url for url in asked if not url.startswith("data:")} == {page}
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_page_is_readable_on_a_phone(browser: webdriver.Chrome, page: str) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    browser.get(page)
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE["width"]


def test_numbers_are_shown_as_they_are_in_the_records(browser: webdriver.Chrome, sweep: Path) -> None:
    browser.get((sweep / "report.html").as_uri())
    heading, *rows = browser.find_elements(By.CSS_SELECTOR, "table:first-of-type tr")[:3]
    names = [cell.text for cell in heading.find_elements(By.TAG_NAME, "td")]
    for number, row in enumerate(rows):
        shown = dict(zip(names, (cell.text for cell in row.find_elements(By.TAG_NAME, "td")), strict=True))
        results = json.loads((sweep / str(number) / "results.json").read_text())
        assert (shown["job"], shown["status"]) == (str(number), "completed")
        overrides = yaml.safe_load((sweep / str(number) / ".hydra/overrides.yaml").read_text())
        assert overrides[-1] in ("stage=ddp", 'stage="3"') and shown["overrides"] == " ".join(overrides)
        assert shown["validation/loss"] == f"{results['validation']['loss']:.5g}"
