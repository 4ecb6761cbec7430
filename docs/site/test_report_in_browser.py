"""Pages of `lightning-zero report` in a headless Chromium: offline, complete, and readable on a phone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By

from lightning_zero.io.sizes import in_bytes
from tests.app.commands import TINY, succeed

pytestmark = pytest.mark.timeout(600)

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two jobs on two ranks with its report, and the report of its second job in a folder `alone`."""
    folder = tmp_path_factory.mktemp("report")
    succeed("train", "-m", *TINY, "stage=ddp,3", "hydra.sweep.dir=sweep", folder=folder)
    succeed("report", "sweep", "--price-per-hour", "2.5", folder=folder)
    succeed("report", "sweep/1", "--output", "alone", folder=folder)
    return folder / "sweep"


@pytest.fixture(params=["sweep", "alone"])
def page(sweep: Path, request: pytest.FixtureRequest) -> str:
    """The address of a page in a file, with no server that could serve anything else."""
    return (sweep.parent / request.param / "report.html").as_uri()


def test_every_figure_is_drawn_with_its_text(browser: webdriver.Chrome, page: str) -> None:
    browser.get(page)
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    figures = browser.find_elements(By.CSS_SELECTOR, "figure")
    assert len(figures) >= 4
    titles = {figure.find_element(By.TAG_NAME, "figcaption").text for figure in figures}
    assert {"loss", "perplexity", "peak memory of rank 0", "bytes moved"} <= titles
    for figure in figures:
        drawing = figure.find_element(By.TAG_NAME, "svg")
        assert drawing.size["width"] > 250 and drawing.size["height"] > 120
        # lines or bars, and the numbers at the axes
        assert drawing.find_elements(By.CSS_SELECTOR, "path") and drawing.find_elements(By.CSS_SELECTOR, "text")


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
    heights = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].map(each => each.getBoundingClientRect())"
        ".map(each => Math.min(each.width, each.height))"
    )
    assert len(heights) > 50 and min(heights) >= 5, "numbers of one digit are narrow; none is a dot"
    lines = browser.execute_script(
        "return [...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().height)"
    )
    assert sorted(lines)[len(lines) // 2] >= 10, "a line of text in a figure has ten pixels"


def test_numbers_are_shown_as_they_are_in_the_records(browser: webdriver.Chrome, sweep: Path) -> None:
    browser.get((sweep / "report.html").as_uri())
    heading, *rows = browser.find_elements(By.CSS_SELECTOR, "table.jobs tr")
    names = [cell.text for cell in heading.find_elements(By.TAG_NAME, "th")]
    assert len(rows) == 2
    for number, row in enumerate(rows):
        shown = dict(zip(names, (cell.text for cell in row.find_elements(By.CSS_SELECTOR, "th, td")), strict=True))
        results = json.loads((sweep / str(number) / "results.json").read_text())
        assert shown["job"] == ("stage=ddp", "stage=3")[number] and shown["status"] == "completed"
        assert shown["validation loss"] == f"{results['validation']['loss']:.5g}"
        assert shown["throughput"] == f"{results['per_second']:,.0f} tokens a second"
        assert shown["peak memory a rank"] == shown["predicted"] == in_bytes(sum(results["peak_bytes"].values()))


def test_the_table_of_jobs_leads_to_each_job(browser: webdriver.Chrome, sweep: Path) -> None:
    browser.get((sweep / "report.html").as_uri())
    browser.find_element(By.LINK_TEXT, "stage=3").click()
    assert browser.current_url.endswith("#job-1")
    assert browser.find_element(By.ID, "job-1").text == "stage=3"
