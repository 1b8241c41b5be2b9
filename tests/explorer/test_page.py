"""The page in a real browser."""

import re
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Locator, expect
from tests.explorer.conftest import COLOURS, Watched, draw_square

expect.set_options(timeout=60_000)  # other tests may occupy the cores

SENT = "The uploaded picture"


@pytest.fixture
def red(tmp_path: Path) -> str:
    """Write a picture similar to the collection's, with 24 x 24 patches."""
    draw_square(COLOURS["red"], (16, 16)).resize((384, 384)).save(tmp_path / "red.png")
    return str(tmp_path / "red.png")


def click_inside(picture: Locator, x: float, y: float) -> None:
    """Click on a square picture, centred in its field, at a position relative to its sides."""
    place = picture.bounding_box()
    assert place is not None
    side = min(place["width"], place["height"])
    left, top = (place["width"] - side) / 2, (place["height"] - side) / 2
    picture.click(position={"x": left + x * side, "y": top + y * side})


def test_view_pairs_are_shown(watched: Watched) -> None:
    page = watched.page
    watched.open("View pairs")
    expect(page.get_by_text("Pair 0 of")).to_be_visible()
    expect(page.get_by_role("img", name="Clusters of view 2")).to_be_visible()
    page.get_by_role("button", name="next pair").click()
    expect(page.get_by_text("Pair 1 of")).to_be_visible()


def test_a_patch_is_selected_by_click_and_moved_by_keys(watched: Watched, red: str) -> None:
    page = watched.page
    watched.open("Features")
    page.locator("[role=tabpanel]:visible input[type=file]").first.set_input_files(red)
    expect(page.get_by_role("img", name="Principal components as colours")).to_be_visible()
    expect(page.get_by_role("img", name="Heat map of the similarity")).to_be_visible()
    picture = page.get_by_role("img", name=SENT).and_(page.locator(":visible"))
    click_inside(picture, 0.9, 0.1)
    expect(page.get_by_text("Patch in row 2 of 24, column 21 of 24")).to_be_visible()
    page.get_by_role("button", name="down").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("Patch in row 3 of 24, column 21 of 24")).to_be_visible()
    click_inside(picture, 0.42, 0.42)  # on the square
    expect(page.locator("#nearest-to-patch")).to_contain_text(re.compile(r"1\. 1\.00 \d-red\.png"))


def test_an_object_finds_similar_objects(watched: Watched, red: str) -> None:
    page = watched.page
    watched.open("Objects")
    expect(page.locator("#objects-text")).to_contain_text("0-blue.png")
    page.locator("#collection button", has_text="2: 0-red").click()
    expect(page.locator("#objects-text")).to_contain_text("Object 0 of 2 in 0-red.png")
    picture = page.get_by_role("img", name="The image with the outline of the selected object")
    click_inside(picture, 0.2, 0.2)
    expect(page.locator("#objects-text")).to_contain_text("Object 1 of 2 in 0-red.png")
    expect(page.locator("#objects-text")).to_contain_text("nearest object is in 1-red.png, cosine similarity 1.00")
    expect(page.locator("#nearest")).to_contain_text("1. 1.00 1-red.png")
    page.get_by_text("Search with your own picture").click()
    page.locator("[role=tabpanel]:visible input[type=file]").first.set_input_files(red)
    expect(page.locator("#objects-text")).to_contain_text("in your picture")
    click_inside(picture, 0.42, 0.42)
    expect(page.locator("#objects-text")).to_contain_text("-red.png, cosine similarity 1.00")


def test_painted_classes_segment_another_picture(watched: Watched, red: str, tmp_path: Path) -> None:
    page = watched.page
    watched.open("Segment")
    expect(page.locator("#examples-text")).to_contain_text("No examples yet")  # from here on, the visitor is known
    page.locator("[role=tabpanel]:visible input[type=file]").last.set_input_files(red)
    expect(page.get_by_text("There are no examples yet")).to_be_visible()
    page.locator("[role=tabpanel]:visible input[type=file]").first.set_input_files(red)
    canvas = page.locator("canvas:visible").first
    expect(page.get_by_label("Brush").or_(page.locator("[title*=rush]")).first).to_be_visible()
    page.wait_for_timeout(1000)  # the canvas is resized to the picture without an event
    place = canvas.bounding_box()
    assert place is not None
    middle = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    page.mouse.move(middle[0] - 10, middle[1] - 10)
    page.mouse.down()
    page.mouse.move(middle[0] + 5, middle[1] + 5, steps=4)
    page.mouse.up()
    page.get_by_role("button", name="Add as an example").click()
    expect(page.locator("#examples-text")).to_contain_text("1 example")
    expect(page.locator("#examples-text")).to_contain_text("red")
    expect(page.locator("#segmented-text")).to_contain_text("red 100%")
    expect(page.get_by_role("img", name="The picture, tinted by class")).to_be_visible()
    watched.reload()
    watched.open("Segment")
    expect(page.locator("#examples-text")).to_contain_text("1 example")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the examples").click()
        page.get_by_role("link", name="examples.zip").or_(page.locator("a[download]:visible")).first.click()
    with zipfile.ZipFile(download.value.path()) as archive:
        assert sorted(archive.namelist())[1:] == ["examples/images/01.png", "examples/labels/01.png"]
    page.get_by_role("button", name="Start over").click()
    expect(page.locator("#examples-text")).to_contain_text("No examples yet")


def test_large_and_invalid_pictures_are_refused_with_a_message(watched: Watched, tmp_path: Path) -> None:
    page = watched.page
    watched.open("Features")
    field = page.locator("[role=tabpanel]:visible input[type=file]").first
    draw_square(COLOURS["red"], (0, 0)).resize((1200, 1000)).save(tmp_path / "wide.png")
    field.set_input_files(tmp_path / "wide.png")
    expect(page.get_by_text("1200 x 1000 pixels, but at most 1 megapixels are allowed")).to_be_visible()
    (tmp_path / "heavy.png").write_bytes(b"0" * 1_500_000)
    page.get_by_role("button", name="Remove Image").or_(page.get_by_label("Clear")).first.click()
    page.locator("[role=tabpanel]:visible input[type=file]").first.set_input_files(tmp_path / "heavy.png")
    expect(page.get_by_text("exceed the maximum allowed size").first).to_be_visible()
    watched.errors.clear()  # the browser logs the refused request


def test_every_control_is_reached_with_tab_and_shows_focus(watched: Watched) -> None:
    page = watched.page
    watched.open("Objects")
    expect(page.locator("#nearest img").first).to_be_visible()
    page.locator("body").click(position={"x": 2, "y": 2})
    names: list[str] = []
    for _ in range(60):
        page.keyboard.press("Tab")
        names.append(
            page.evaluate(
                "(e => e.getAttribute('aria-label') || e.labels?.[0]?.innerText || e.innerText || '')"
                "(document.activeElement)"
            )
        )
    joined = " | ".join(names)
    for control in ("Image (0 to 7)", "Object (0 is the largest)", "smaller object", "next page", "2: 0-red"):
        assert control in joined, joined
    page.get_by_role("button", name="smaller object").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_tab_fits_a_phone(watched: Watched, scheme: str) -> None:
    page = watched.page
    page.emulate_media(color_scheme=scheme)  # pyright: ignore[reportArgumentType]
    page.set_viewport_size({"width": 360, "height": 740})
    watched.reload()
    page.get_by_role("tab", name="View pairs").first.wait_for()
    for tab in ("View pairs", "Objects", "Features", "Segment"):
        button = page.get_by_role("tab", name=tab, exact=True).and_(page.locator(":visible"))
        if not button.count():
            page.locator(".overflow-menu > button").click()
            button = page.locator(".overflow-dropdown button", has_text=tab)
        button.first.click()
        expect(page.locator("[role=tabpanel]:visible").first).to_be_visible()
        assert watched.fits, tab
