"""The built site in a headless Chromium, as a reader uses it: navigation, search, copied code, a phone."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = pytest.mark.timeout(600)  # on a busy machine the site is built, and a browser started, in minutes

REPOSITORY = Path(__file__).resolve().parents[2]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def site_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=REPOSITORY, check=True)
    return folder


@pytest.fixture(scope="session")
def site(site_folder: Path) -> Iterator[str]:
    """The address of the site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site_folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def shown(browser: webdriver.Chrome, selector: str) -> list[WebElement]:
    """The visible elements, waited for."""
    found = WebDriverWait(browser, 20).until(
        lambda _: [each for each in browser.find_elements(By.CSS_SELECTOR, selector) if each.is_displayed()]
    )
    assert isinstance(found, list)
    return found


def test_a_reader_gets_to_a_page_by_the_navigation(browser: webdriver.Chrome, site: str) -> None:
    browser.get(site)
    (tab,) = (tab for tab in shown(browser, ".md-tabs__link") if tab.text == "How-to")
    tab.click()
    (link,) = (link for link in shown(browser, ".md-nav--primary a") if link.text == "Train on several machines")
    link.click()
    WebDriverWait(browser, 20).until(lambda _: browser.current_url.endswith("/how-to/several-machines/"))
    assert shown(browser, "h1")[0].text.startswith("Train on several machines")


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("did not complete: rank 1 was killed", "/reference/errors/"),
        ("after_fit", "/reference/configuration/"),
        ("full_optimizer_state", "/reference/api/"),
    ],
)
def test_the_search_finds_messages_options_and_functions(
    browser: webdriver.Chrome, site: str, words: str, page: str
) -> None:
    browser.get(site)
    shown(browser, ".md-search__input")[0].send_keys(words)
    WebDriverWait(browser, 20).until(
        lambda _: any(page in each.get_attribute("href") for each in shown(browser, ".md-search-result__link"))
    )


def test_every_block_of_code_is_shown_as_one(site_folder: Path) -> None:
    pages = sorted(site_folder.rglob("index.html"))
    assert len(pages) > 25 and not [str(page) for page in pages if "```" in page.read_text()]


def test_code_is_copied_as_it_is_shown(browser: webdriver.Chrome, site: str) -> None:
    browser.get(site + "how-to/plain-torch/")
    browser.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": site}
    )
    code = shown(browser, ".highlight")[0]
    button = WebDriverWait(browser, 20).until(lambda _: code.find_elements(By.TAG_NAME, "button"))[0]
    ActionChains(browser).move_to_element(code).move_to_element(button).click().perform()
    shown(browser, ".md-dialog--active")  # "Copied to clipboard"
    copied = browser.execute_async_script("navigator.clipboard.readText().then(arguments[0], arguments[0])")
    assert copied.startswith("import torch\n") and "engine = Engine(model, [optimizer], stage=3)" in copied


@pytest.mark.parametrize("page", ["", "tutorials/first-run/", "how-to/migrate/", "reference/api/", "reference/errors/"])
def test_a_page_fits_the_width_of_a_phone(browser: webdriver.Chrome, site: str, page: str) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    browser.get(site + page)
    shown(browser, "h1")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= phone["width"]
    shown(browser, "label.md-header__button[for=__drawer]")[0].click()
    assert shown(browser, ".md-sidebar--primary .md-nav__title")


def test_no_page_has_an_error_in_the_console_or_loads_from_another_host(browser: webdriver.Chrome, site: str) -> None:
    browser.get_log("browser")
    for page in ("", "reference/api/", "explanation/performance/"):
        browser.get(site + page)
        shown(browser, "h1")
        loaded = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
        assert [name for name in loaded if not name.startswith(site)] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
