"""The report page in headless Chromium: clicks, no errors, no requests, dark mode, a phone."""

import shutil

import pytest

from reports.__main__ import ReportsConfig, write_reports
from reports.runs import AXES

BROWSER = shutil.which("chromium")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def pages(compared):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reports.page.MAX_PANELS", 2)  # a panel takes a tenth of a second
        write_reports(ReportsConfig([str(compared[0])]))
        write_reports(ReportsConfig([str(run) for run in compared]))
    return [compared[0] / "report.html", compared[0].parent / "report.html"]


@pytest.fixture(scope="module")
def browser():
    if not BROWSER:
        pytest.skip("needs chromium: `make browser` installs it where apt can")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make browser")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def show(browser):
    """Open a page in a window; no message, error or request may occur."""
    events = []

    def show(file, viewport=DESK, scheme="light"):
        window = browser.new_page(viewport=viewport, color_scheme=scheme)
        window.on("console", lambda message: events.append(message.text))
        window.on("pageerror", lambda error: events.append(str(error)))
        window.on("request", lambda r: events.append(r.url) if r.url.startswith("http") else None)
        window.goto(file.as_uri())
        return window

    yield show
    assert events == []


@pytest.mark.parametrize("index", [0, 1], ids=["run", "comparison"])
def test_a_click_shows_the_curves_against_another_axis(pages, show, index):
    window = show(pages[index])

    def shown():
        return [axis for axis in AXES if window.locator(f".against-{axis}").is_visible()]

    assert shown() == ["steps"]
    for axis in reversed(AXES):
        window.get_by_label(axis, exact=True).click()
        assert shown() == [axis]
    window.get_by_text("configuration").first.click()
    assert window.get_by_text("batch_size: 8").first.is_visible()
    broken = "[...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert window.evaluate(broken) == 0 < window.evaluate("document.images.length")


@pytest.mark.parametrize("index", [0, 1], ids=["run", "comparison"])
def test_a_page_has_a_dark_mode_and_fits_a_phone(pages, show, index):
    light, dark = (show(pages[index], scheme=scheme).screenshot() for scheme in ("light", "dark"))
    assert light != dark
    window = show(pages[index], viewport=PHONE)
    assert window.evaluate("document.scrollingElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_a_click_enlarges_a_picture_and_a_second_click_restores_it(pages, show, viewport):
    window = show(pages[0], viewport=viewport)
    picture = window.get_by_alt_text("over_time")
    before = picture.bounding_box()["width"]
    picture.click()
    assert picture.bounding_box()["width"] >= 900 > before
    assert window.evaluate("document.scrollingElement.scrollWidth") <= viewport["width"]
    picture.click()
    assert picture.bounding_box()["width"] == before
