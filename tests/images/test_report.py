"""The report page in a real browser, from file://: headless Chromium, driven through its own driver."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from farm_tool import page, records
from farm_tool.parts import Workplace

from op_builder.cells import cells, find_cell

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--window-size=1300,1000"),
)
BUILT = "cu121-sm86"


@pytest.fixture(scope="module")
def browser(debian: Callable[[Mapping[str, str]], None], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Chromium, which logs every request and every error of a script."""
    debian({"chromium": "chromium", "chromedriver": "chromium-driver"})
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driven = webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))
    yield driven
    driven.quit()


@pytest.fixture(scope="module")
def written(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page of a farm in which one cell's parts and image were built, and what it was made from."""
    data = page.gather(workplace, records.RESULTS)
    one = next(c for c in data["cells"] if c["cell"] == BUILT)
    part = {"op": "fused_adam", "variant": "sm86", "compiler": "nvrtc </script><b>", "key": "k", "sha256": "ab" * 32}
    one |= {
        "parts": [{**part, "size": 12345, "hit": False, "seconds": 1.5}, {**part, "size": 1, "hit": True}],
        "layers": {"base": 1_000_000, "ours": 30_000_000}, "image": "sha256:feed", "image_bytes": 31_000_000,
        "image_seconds": 9.5, "engine": "docker", "status": "built", "built": "today, commit abc",
    }  # fmt: skip
    path = tmp_path_factory.mktemp("report") / "farm.html"
    path.write_text(page.page(data), encoding="utf-8")
    return path, data


def detail(browser: Any) -> str:
    return str(browser.find_element("id", "detail").text)


def test_every_cell_is_a_square_of_its_colour(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    """Fault: a cell missing from the grid, or painted as if it had run."""
    path, data = written
    browser.get(path.as_uri())
    squares = browser.find_elements("css selector", "#grid button[data-cell]")
    assert {s.get_attribute("data-cell") for s in squares} == {cell.name for cell in cells()}
    assert len(squares) == len(cells())
    colours = {s.get_attribute("class"): s.value_of_css_property("background-color") for s in squares}
    assert len(set(colours.values())) == len(colours) >= 4, colours
    level = {c["cell"]: c["level"] for c in data["cells"]}
    assert all(s.get_attribute("class") == level[s.get_attribute("data-cell")] for s in squares)


def test_a_click_shows_manifest_size_seconds_and_what_ran(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    """Fault: a page that is a picture; or text of a manifest that becomes markup."""
    path, data = written
    browser.get(path.as_uri())
    assert "Click a square" in detail(browser)
    square = browser.find_element("css selector", f'button[data-cell="{BUILT}"]')
    assert square.text == "image"
    square.click()
    text = detail(browser)
    for wanted in (
        *find_cell(BUILT).tags, "fused_adam", "12345", "1.50", "from the store", "abababababababab", "31.0 MB", "9.5 s",
        "nvrtc </script><b>", data["levels"]["ptx"], "cuda121_torch2.4_sm86_0", "docker run --gpus all",
    ):  # fmt: skip
        assert wanted in text, (wanted, text)
    assert square.get_attribute("aria-pressed") == "true" and browser.current_url.endswith(f"#{BUILT}")
    browser.find_element("css selector", 'button[data-cell="cpu"]').click()
    assert "no GPU code" in detail(browser) and "--gpus" not in detail(browser)
    assert square.get_attribute("aria-pressed") == "false"


def test_a_link_opens_a_cell_and_the_keyboard_works(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    """Fault: a cell cannot be linked to; or only a mouse reaches it."""
    path, _ = written
    browser.get("about:blank")
    browser.get(f"{path.as_uri()}#{BUILT}")
    assert "fused_adam" in detail(browser)
    square = browser.find_element("css selector", 'button[data-cell="cu130-sm90"]')
    square.send_keys("\n")
    assert "cu130-sm90" in detail(browser)


def test_it_needs_nothing_but_itself(browser: Any, written: tuple[Path, dict[str, Any]]) -> None:
    """Fault: a font or a script from elsewhere; an error that only the console tells."""
    path, data = written
    browser.get(path.as_uri())
    browser.find_element("css selector", f'button[data-cell="{BUILT}"]').click()
    loaded = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded == []
    assert [line for line in browser.get_log("browser") if line["level"] == "SEVERE"] == []
    read = json.loads(browser.execute_script("return document.getElementById('data').textContent"))
    assert [c["cell"] for c in read["cells"]] == [c["cell"] for c in data["cells"]]
