"""The page in a real browser."""

import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import Locator, Page, expect
from tests.explorer.conftest import COLOURS, Watched, draw_square

from cribo.data.labelled.inputs import open_labels
from cribo.explorer.example_folder import ExampleFolder, Written
from cribo.explorer.images import PageImage

expect.set_options(timeout=60_000)  # other tests may occupy the cores

SENT = "The chosen picture"


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


def test_images_of_the_collection_show_their_features(watched: Watched) -> None:
    page = watched.page
    watched.open("Features")
    number = page.get_by_label("Image of the collection (0 to 7)")
    number.fill("2")
    number.press("Enter")
    expect(page.get_by_role("img", name="Heat map of the similarity")).to_be_visible()
    click_inside(page.get_by_role("img", name=SENT).and_(page.locator(":visible")), 0.46, 0.46)  # on the square
    expect(page.locator("#nearest-to-patch")).to_contain_text(re.compile(r"1\. 1\.00 \d-red\.png"))
    page.get_by_role("button", name="next image").click()
    expect(number).to_have_value("3")


def test_pagers_of_one_page_are_hidden(watched: Watched) -> None:
    watched.open("Objects")
    expect(watched.page.locator("#collection button").first).to_be_visible()
    expect(watched.page.get_by_role("button", name="next page")).to_have_count(0)


def test_a_box_or_a_click_proposes_a_region(watched: Watched) -> None:
    page, painter = watched.page, watched.page.locator(".painter")
    shutil.rmtree(watched.examples, ignore_errors=True)
    watched.open("Segment")
    page.get_by_label("Open a picture by its number").fill("2")
    page.keyboard.press("Enter")
    expect(page.locator(".painter-caption")).to_have_text("0-red.png")
    page.get_by_label("Name of a new class").fill("square")
    page.keyboard.press("Enter")
    expect(painter.get_by_role("button", name="square")).to_have_attribute("aria-pressed", "true")
    painter.get_by_role("button", name="Box or click").click()
    accept = painter.get_by_role("button", name="Accept the region")

    # Nothing is painted before the region is accepted; Escape drops it.
    drag(page, (0.01, 0.01), (0.7, 0.7))
    expect(accept).to_be_visible()
    expect(page.get_by_role("button", name="Confirm", exact=True)).to_be_disabled()
    page.keyboard.press("Escape")
    expect(accept).to_be_hidden()
    page.mouse.click(*position_on(page.locator(".painter-canvas"), 0.25, 0.25))
    expect(accept).to_be_visible()
    page.keyboard.press("Enter")
    expect(accept).to_be_hidden()
    confirm(page)
    labels = open_labels(watched.examples / "labels" / "0-red.png").labels
    assert labels[20, 20] == 0
    assert labels[80, 80] == 255


def test_a_chosen_image_is_scrolled_into_view_on_a_phone(watched: Watched) -> None:
    page = watched.page
    watched.resize(390, 844)
    watched.open("Objects")
    page.locator("#collection button", has_text="7: 1-yellow").click()
    expect(page.locator("#objects-text")).to_contain_text("in 1-yellow.png")
    expect(page.get_by_role("img", name="The image with the outline of the selected object")).to_be_in_viewport()


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


def position_on(picture: Locator, x: float, y: float) -> tuple[float, float]:
    """Return the position on the page of a position relative to the sides of a picture."""
    place = picture.bounding_box()
    assert place is not None
    return place["x"] + x * place["width"], place["y"] + y * place["height"]


def drag(page: Page, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Paint a line on the picture of the editor, between positions relative to its sides."""
    canvas = page.locator(".painter-canvas")
    canvas.scroll_into_view_if_needed()
    page.mouse.move(*position_on(canvas, *start))
    page.mouse.down()
    page.mouse.move(*position_on(canvas, *end), steps=4)
    page.mouse.up()


def confirm(page: Page) -> None:
    """Confirm the painting, and wait until the server has received it."""
    button = page.get_by_role("button", name="Confirm", exact=True)
    expect(button).to_be_enabled()
    button.click()
    expect(button).to_be_disabled()


def test_pictures_are_labelled_by_painting_on_a_phone(watched: Watched, red: str, squares: Path) -> None:
    page, examples = watched.page, watched.examples
    shutil.rmtree(examples, ignore_errors=True)
    watched.resize(390, 844)
    watched.open("Segment")
    advice, painter = page.locator("#advice"), page.locator(".painter")
    expect(advice).to_contain_text("Name a class")
    expect(page.get_by_role("alert")).to_have_count(0)
    upcoming = page.locator("#upcoming button")
    expect(upcoming).to_have_count(7)

    # A picture of the gallery is opened, and the editor is scrolled into view.
    tile = upcoming.filter(has_text=re.compile(r"0-(red|green)")).first
    name = re.sub(r"\s", "", tile.inner_text())
    tile.click()
    expect(page.locator(".painter-caption")).to_have_text(name)
    expect(painter).to_be_in_viewport()
    page.wait_for_function("document.querySelector('.painter').getBoundingClientRect().top >= 0")
    tools, picture = (
        painter.locator(".painter-row").nth(1).bounding_box(),
        page.locator(".painter-stage").bounding_box(),
    )
    assert tools is not None
    assert picture is not None
    assert tools["y"] + tools["height"] <= picture["y"]
    assert watched.fits

    # Two classes are named and painted.
    for label, line in (("square", ((0.1, 0.25), (0.4, 0.25))), ("ground", ((0.1, 0.8), (0.9, 0.8)))):
        page.get_by_label("Name of a new class").fill(label)
        page.keyboard.press("Enter")
        expect(painter.get_by_role("button", name=label)).to_have_attribute("aria-pressed", "true")
        drag(page, *line)
    confirm(page)
    expect(advice).to_contain_text(re.compile(r"1 example, \d+ patches: square, ground"))
    expect(page.locator("#saved")).to_contain_text("All examples are saved in “examples”")
    expect(upcoming).to_have_count(7)
    labels = open_labels(examples / "labels" / name).labels
    assert labels[24, 24] == 0
    assert labels[77, 48] == 1
    assert labels[48, 90] == 255
    assert (examples / "images" / name).read_bytes() == (squares / name).read_bytes()
    page.mouse.move(*position_on(page.locator(".painter-canvas"), 0.9, 0.5))
    expect(page.locator(".painter-under")).to_have_text("ground")  # predicted

    # The painting survives a reload, and is corrected.
    watched.reload()
    watched.open("Segment")
    expect(advice).to_contain_text("1 example")
    page.locator("#painted button").first.click()
    expect(page.locator(".painter-caption")).to_have_text(name)
    painter.get_by_role("button", name="ground").click()
    drag(page, (0.8, 0.1), (0.8, 0.6))
    page.get_by_role("button", name="Confirm, next picture").click()
    expect(page.locator(".painter-caption")).not_to_have_text(name)
    assert open_labels(examples / "labels" / name).labels[48, 77] == 1

    # An uploaded picture is labelled as well.
    page.locator("[role=tabpanel]:visible input[type=file]").first.set_input_files(red)
    expect(page.locator(".painter-caption")).to_have_text("red.png")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the examples").click()
        page.get_by_role("link", name="examples.zip").or_(page.locator("a[download]:visible")).first.click()
    with zipfile.ZipFile(download.value.path()) as archive:
        files = [each for each in archive.namelist() if not each.endswith("/")]
    assert files == ["examples/classes.txt", f"examples/images/{name}", f"examples/labels/{name}"]


def test_labels_of_another_visitor_are_replaced_on_request(watched: Watched, squares: Path) -> None:
    page, examples = watched.page, watched.examples
    shutil.rmtree(examples, ignore_errors=True)
    watched.open("Segment")
    expect(page.locator("#advice")).to_contain_text("Name a class")
    name = page.locator(".painter-caption").inner_text()
    others = torch.zeros(96, 96, dtype=torch.uint8)
    ExampleFolder(examples).save(PageImage(name, squares / name), others, ["roof"], Written())
    page.get_by_label("Name of a new class").fill("squaer")
    page.get_by_role("button", name="Add", exact=True).click()
    page.on("dialog", lambda dialog: dialog.accept("square"))
    page.get_by_role("button", name="Rename").click()
    expect(page.locator(".painter-classes")).to_have_text("square")
    drag(page, (0.1, 0.2), (0.4, 0.2))
    drag(page, (0.1, 0.5), (0.4, 0.5))
    page.get_by_role("button", name="Undo").click()
    confirm(page)
    expect(page.locator("#saved")).to_contain_text(f"Not saved in “examples”: {name} (it contains other labels)")
    assert torch.equal(open_labels(examples / "labels" / name).labels, others)
    page.get_by_role("button", name="Save and replace").click()
    expect(page.locator("#saved")).to_contain_text("All examples are saved")
    labels = open_labels(examples / "labels" / name).labels
    assert labels[19, 24] == 1
    assert labels[48, 24] == 255  # undone
    assert (examples / "classes.txt").read_text() == "roof\nsquare\n"


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
    for control in ("Image (0 to 7)", "Object (0 is the largest)", "smaller object", "2: 0-red"):
        assert control in joined, joined
    page.get_by_role("button", name="smaller object").focus()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_every_tab_fits_a_phone(watched: Watched) -> None:
    page = watched.page
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        watched.resize(360, 740)
        for tab in ("View pairs", "Objects", "Features", "Segment"):
            watched.open(tab)
            expect(page.locator("[role=tabpanel]:visible").first).to_be_visible()
            assert watched.fits, (scheme, tab)


def test_names_are_text_and_no_other_scripts_run(watched: Watched) -> None:
    page = watched.page
    shutil.rmtree(watched.examples, ignore_errors=True)
    watched.open("Segment")
    advice = page.locator("#advice")
    expect(advice).to_contain_text("Name a class")
    for name in ("<svg><a href=javascript:x>A", "[B](javascript:y) *b* www.c.d"):
        page.get_by_label("Name of a new class").fill(name)
        page.keyboard.press("Enter")
        expect(page.locator(".painter-classes")).to_contain_text(name)
        line = 0.2 if name.startswith("<") else 0.8
        drag(page, (0.1, line), (0.4, line))
    confirm(page)
    expect(advice).to_contain_text("patches: <svg><a href=javascript:x>A, [B](javascript:y) *b* www.c.d")
    expect(page.locator("#advice a")).to_have_count(0)
    assert watched.errors == []
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"window.ran = 1\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
    page.wait_for_timeout(500)
    assert page.evaluate("window.ran") is None
    assert any("Content Security Policy" in error for error in watched.errors)
    watched.errors.clear()
