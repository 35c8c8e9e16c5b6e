"""The search page in a real browser, on a real index and a real server."""

import base64
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import test_live_page
from conftest import picture_folder
from PIL import Image
from test_http import Server
from test_live_page import Visit
from test_serve import write_model

from lapclip.cli import run_command
from lapclip.search.searcher import parse_query

HOSTILE = "<img src=x onerror=\"document.title='stolen'\"><b id=hostile>.jpg"
SHOWN = "[...document.querySelectorAll('.tile')].map((tile) => Number(tile.dataset.id))"
FOCUSED = "Number(document.activeElement.closest('.tile')?.dataset.id ?? 0)"
NUM_FILES = 31  # two of them with equal bytes

pytestmark = pytest.mark.slow
browser, visit = test_live_page.browser, test_live_page.visit  # fixtures


def run_here(folder: Path, *lines: list[str]) -> None:
    """Commands in this process and that folder, with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LAPCLIP_CACHE", str(folder / "cache"))
        for line in lines:
            assert run_command(line) == 0, line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two folders of images, among them one with a name to be afraid of, a copy and a tall one; and a small model."""
    folder = tmp_path_factory.mktemp("searched")
    photos = picture_folder(folder / "photos", NUM_FILES - 7)
    picture_folder(folder / "holiday", 4, first=50)
    shutil.copy(photos / "03.jpg", photos / "copy.jpg")
    (photos / "04.jpg").rename(photos / HOSTILE)
    Image.radial_gradient("L").resize((30, 90)).save(photos / "tall.jpg")
    Image.linear_gradient("L").resize((90, 30)).save(photos / "wide.jpg")
    write_model(folder / "mine")
    run_here(folder, ["index", "photos", "holiday", "--model", "./mine"])
    return folder


class SearchServer(Server):
    command = ("serve",)


@pytest.fixture(scope="module")
def server(folder):
    server = SearchServer(folder)
    yield server
    server.stop()


def wait_for_results(seen: Visit, at_least: int = 1) -> list[int]:
    seen.wait(f"{SHOWN}.length >= {at_least} && !document.querySelector('#grid[aria-busy]')")
    return seen.page.evaluate(SHOWN)


def wait_for_others(seen: Visit, before: list[int]) -> list[int]:
    seen.wait(f"{SHOWN}.join() !== '{','.join(map(str, before))}'")
    return wait_for_results(seen)


def searches(seen: Visit) -> list[str]:
    """What was asked for as a person would; the examples of an empty page ask for 4 each."""
    return [url for url in seen.asked if "/search?" in url and not url.endswith("top=4")]


def hand_over(seen: Visit, file: Path, how: str) -> None:
    """A file dropped on the page, or pasted into it, as the browser would say it."""
    seen.page.evaluate(
        """([data, name, how]) => {
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0)), given = new DataTransfer();
            given.items.add(new File([bytes], name, { type: "image/jpeg" }));
            const options = { bubbles: true, cancelable: true };
            if (how === "paste") document.body.dispatchEvent(new ClipboardEvent("paste", { ...options, clipboardData: given }));
            else for (const kind of ["dragover", "drop"])
                document.body.dispatchEvent(new DragEvent(kind, { ...options, dataTransfer: given }));
        }""",
        [base64.b64encode(file.read_bytes()).decode(), file.name, how],
    )


def texts(seen: Visit, selector: str) -> list[str]:
    """Of all such parts at one moment: a locator would read them one after the other."""
    script = "(which) => [...document.querySelectorAll(which)].map((one) => one.textContent)"
    return seen.page.evaluate(script, selector)


def names(seen: Visit) -> list[str]:
    return texts(seen, ".tile .name")


def test_results_come_while_typing_and_hostile_names_are_only_text(visit):
    seen = visit()
    seen.page.get_by_text(f"Search {NUM_FILES} images").wait_for()
    seen.wait("document.querySelectorAll('#examples img').length >= 4")
    seen.page.keyboard.press("/")
    seen.page.keyboard.type("red cat", delay=10)
    shown = wait_for_results(seen)
    assert len(shown) == NUM_FILES - 1 and len(searches(seen)) <= 2, "asked when the keys rest"
    assert f"{NUM_FILES - 1} images" in seen.text("#count") and "q=red+cat" in seen.page.url
    assert seen.page.title() == "red cat - lapclip" and not seen.page.locator("#welcome").is_visible()
    scores = [float(text.replace("\u2212", "-")) for text in texts(seen, ".score")]
    assert scores == sorted(scores, reverse=True)
    seen.wait("[...document.querySelectorAll('.tile img')].some((image) => image.naturalWidth > 0)")
    assert HOSTILE in names(seen)
    seen.page.locator(".tile", has_text=HOSTILE).locator(".open").click()
    seen.page.locator("#closer-name", has_text=HOSTILE).wait_for()
    assert seen.text("#closer-path").endswith("photos/" + HOSTILE)
    assert seen.page.locator("#hostile").count() == 0 and "stolen" not in seen.page.title()


def test_an_answer_that_comes_too_late_is_dropped(visit):
    seen = visit("?q=first")
    before = wait_for_results(seen)
    seen.page.evaluate("""() => {
        const real = window.fetch;
        window.returned = [];
        window.fetch = async (address, options) => { // a net that is slow and never stops what was sent
            const answer = await real(address, { ...options, signal: undefined });
            while (address.includes("q=slow") && !window.returned.length) await new Promise((resolve) => setTimeout(resolve, 50));
            window.returned.push(address);
            return answer;
        };
    }""")
    seen.page.locator("#words").fill("slow")
    seen.wait("document.querySelector('#grid[aria-busy]')")
    seen.page.locator("#words").fill("first - second")
    seen.wait("window.returned.length === 2")
    seen.page.wait_for_timeout(50)
    assert "slow" in seen.page.evaluate("window.returned[1]"), "it did come last"
    assert seen.page.evaluate(SHOWN) != before and seen.page.title() == "first - second - lapclip"
    expected = seen.page.evaluate(
        "fetch('/search?q=first+-+second&top=48').then((answer) => answer.json()).then(({results}) => results.map(({id}) => id))"
    )
    assert seen.page.evaluate(SHOWN) == expected


def test_an_image_from_outside_finds_itself_and_what_is_none_is_refused_in_words(visit, folder):
    seen = visit()
    seen.page.locator("#about:not(:empty)").wait_for()
    for file, how in (("07.jpg", "drop"), ("08.jpg", "paste"), ("09.jpg", "choose")):
        if how == "choose":
            seen.page.locator("#file").set_input_files(folder / "photos" / file)
        else:
            hand_over(seen, folder / "photos" / file, how)
        seen.wait(f"document.querySelector('.tile .name')?.textContent === '{file}'")
        seen.wait("document.querySelector('.term img').naturalWidth > 0")
        assert seen.page.locator(".score").first.text_content().startswith(("1.0", "0.99"))
        assert seen.page.locator(".term").count() == 1 and not seen.page.locator("#drop").is_visible()
    seen.page.get_by_label("remove 09.jpg").click()
    seen.wait(f"{SHOWN}.length === 0")
    seen.page.go_back()
    seen.wait("document.querySelector('.tile .name')?.textContent === '09.jpg'")
    seen.page.go_back()
    seen.wait("document.querySelector('.tile .name')?.textContent === '08.jpg'")
    (folder / "words.jpg").write_text("no image")
    hand_over(seen, folder / "words.jpg", "drop")
    seen.page.locator("#problem strong").wait_for()
    assert seen.page.evaluate(SHOWN) == []
    seen.problems.clear()  # the browser notes the refusal
    seen.page.get_by_label("remove words.jpg").click()
    seen.page.locator("#problem").wait_for(state="hidden")


def test_everything_goes_by_keys(visit):
    seen = visit("?q=red")
    shown, keys = wait_for_results(seen), seen.page.keyboard
    keys.press("/")
    keys.press("ArrowDown")
    assert seen.page.evaluate(FOCUSED) == shown[0]
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        keys.press(key)
    assert seen.page.evaluate(FOCUSED) == shown[1]
    keys.press("ArrowDown")
    below = seen.page.evaluate(FOCUSED)
    assert shown.index(below) > 2, "in another row"
    keys.press("ArrowUp")
    keys.press("ArrowUp")
    assert seen.page.evaluate("document.activeElement.id") == "words"
    keys.press("ArrowDown")
    keys.press("Enter")
    seen.page.locator("#closer[open]").wait_for()
    keys.press("ArrowLeft")  # there is none
    seen.page.locator("#closer-place", has_text=f"1 of {len(shown)}").wait_for()
    seen.page.locator("#next").click()
    seen.page.locator("#previous").click()  # is gone from there on
    seen.page.evaluate("""() => {
        for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"])
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    }""")  # faster than anything is drawn
    seen.page.locator("#closer-place", has_text=f"2 of {len(shown)}").wait_for()
    seen.wait("document.getElementById('closer-image').naturalWidth > 0")
    assert f"open={shown[1]}" in seen.page.url
    seen.page.evaluate("document.getElementById('close').click()")  # twice at once is still one step back
    keys.press("Escape")
    seen.page.locator("#closer").wait_for(state="hidden")
    seen.wait(f"{FOCUSED} === {shown[1]}")
    assert seen.page.url.endswith("?q=red")
    keys.press("-")
    seen.page.locator(".term[data-sign='-']").wait_for()
    assert f"unlike={shown[1]}" in seen.page.url
    others = wait_for_others(seen, shown)
    assert shown[1] not in others and seen.page.evaluate(FOCUSED) == others[0]
    keys.press("s")
    seen.wait(f"location.search === '?like={others[0]}'")
    assert others[0] not in wait_for_others(seen, others), "it is what was asked for"
    seen.page.go_back()
    seen.page.go_back()
    seen.wait("location.search === '?q=red' && document.getElementById('words').value === 'red'")
    seen.wait(f"{SHOWN}.join() === '{','.join(map(str, shown))}'")


def test_terms_are_added_subtracted_turned_and_removed(visit):
    seen = visit()
    words = seen.page.locator("#words")
    words.press_sequentially("red-haired dog - cat + tree")
    seen.wait("location.search === '?q=red-haired+dog+%2B+tree+-+cat'")
    terms = seen.page.locator(".term").all_inner_texts()
    assert terms == ["+\nred-haired dog\n\u00d7", "\u2212\ncat\n\u00d7"]
    before = wait_for_results(seen)
    seen.page.get_by_label("without cat").click()
    seen.wait("location.search === '?q=red-haired+dog+%2B+cat+%2B+tree'")
    wait_for_others(seen, before)
    seen.page.get_by_label("remove red-haired dog").click()
    seen.wait("location.search === '?q=cat+%2B+tree'")
    seen.page.locator("#sign").click()
    seen.wait("location.search === '?q=cat+-+tree'")
    seen.page.reload()
    wait_for_results(seen)
    assert words.input_value() == "tree" and seen.page.locator(".term").count() == 1
    words.fill("")
    words.press("Backspace")  # the sign
    words.press("Backspace")  # the term, back into the field
    seen.wait("location.search === '?q=cat' && !document.querySelector('.term')")
    assert words.input_value() == "cat"
    seen.page.locator(".tile .open").first.click()
    seen.page.locator("#closer[open]").wait_for()
    seen.page.locator("#add").click()
    seen.page.locator("#closer").wait_for(state="hidden")
    seen.page.locator(".term[data-sign='+'] img").wait_for()
    assert re.search(r"q=cat&like=\d+$", seen.page.url)


def test_the_page_reads_words_as_the_server_does(visit):
    seen = visit("?q=x")
    draw = random.Random(5)
    texts = ["".join(draw.choices(["a", "b-c", " ", "+", "-", " - ", " + ", "C++"], k=8)) for _ in range(300)]
    read = "([texts, name]) => import('/static/search-query.js').then((query) => texts.map((text) => query[name](text)))"
    split = seen.page.evaluate(read, [texts, "splitWords"])
    mine = [[(term["sign"], " ".join(term["words"].split())) for term in terms] for terms in split]
    assert mine == [[(term.sign, term.words) for term in parse_query(text)] for text in texts]
    joined = seen.page.evaluate(read, [split, "joinWords"])
    again = [sorted((term.sign, term.words) for term in parse_query(text)) for text in joined]
    assert again == [sorted(terms) for terms in mine]


def test_an_image_is_looked_at_closely_and_told_apart_by_labels(visit):
    seen = visit("?q=red")
    wait_for_results(seen)
    tile = seen.page.locator(".tile", has=seen.page.locator(".copies:visible"))
    assert tile.count() == 1 and tile.locator(".copies").inner_text() == "+1 copy"
    tile.locator(".open").click()
    seen.page.locator("#closer[open]").wait_for()
    assert re.search(r"/photos/(03|copy)\.jpg$", seen.text("#closer-path"))
    assert "53 \u00d7 40" in seen.text("#closer-facts") and "1 copy" in seen.text("#closer-copies summary")
    seen.page.locator("#labels").fill("dog, <b id=hostile>, , dog ,tree")
    seen.wait("document.querySelectorAll('#shares li').length === 3")
    shares = [float(text[:-1]) for text in texts(seen, "#shares .number")]
    assert abs(sum(shares) - 100) < 0.3 and shares == sorted(shares, reverse=True)
    assert "<b id=hostile>" in seen.text("#shares") and seen.page.locator("#hostile").count() == 0
    seen.page.locator("#labels").press("ArrowLeft")
    assert seen.page.locator("#closer[open]").count() == 1, "arrows in a field move in the field"
    seen.context.grant_permissions(["clipboard-read", "clipboard-write"])
    seen.page.locator("#copy").click()
    seen.page.get_by_text("Copied").wait_for()
    assert seen.page.evaluate("navigator.clipboard.readText()") == seen.text("#closer-path")
    seen.page.go_back()
    seen.page.locator("#closer").wait_for(state="hidden")


def test_results_are_narrowed_by_score_and_folder_and_widened_by_more(visit, folder):
    seen = visit("?q=red&top=5")
    first = wait_for_results(seen)
    assert len(first) == 5
    seen.page.locator("#more").click()
    assert wait_for_results(seen, 10)[:5] == first
    seen.page.locator("#folder").select_option(str(folder / "holiday"))
    seen.wait(f"{SHOWN}.length === 4")
    assert {f"{number}.jpg" for number in range(50, 54)} == set(names(seen))
    seen.page.locator("#score").fill("1")
    seen.page.get_by_text("no image has this score").wait_for()
    seen.page.reload()
    seen.page.get_by_text("no image has this score").wait_for()
    seen.page.locator("#score").fill("0")
    seen.wait(f"{SHOWN}.length === 4")


def test_results_are_narrowed_by_date_and_size_with_the_keyboard_alone(visit):
    seen = visit("?q=red+asdkjhasd")
    every = wait_for_results(seen)
    assert "no training caption contains \u201casdkjhasd\u201d" in seen.text("#count")
    seen.page.locator("#more-filters summary").focus()
    seen.page.keyboard.press("Enter")
    while seen.page.evaluate("document.activeElement.id") != "size":
        seen.page.keyboard.press("Tab")
    seen.page.keyboard.type("54")
    seen.page.keyboard.press("Enter")
    assert len(wait_for_others(seen, every)) == 2 and {"tall.jpg", "wide.jpg"} == set(names(seen))
    assert "min_size=54" in seen.page.url
    seen.page.locator("#before").fill("2000-01-01")
    seen.page.get_by_text("no images found").wait_for()
    seen.page.reload()
    seen.page.get_by_text("no images found").wait_for()
    assert (
        seen.page.locator("#before").input_value() == "2000-01-01" and seen.page.locator("#size").is_visible()
    )
    assert seen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_fits_a_phone_and_images_keep_their_shape(visit):
    seen = visit("?q=a long line of words - others&like=1", viewport={"width": 390, "height": 800})
    wait_for_results(seen)
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
    shapes = seen.page.evaluate("""Object.fromEntries([...document.querySelectorAll('.tile')].map((tile) => {
        const { width, height } = tile.getBoundingClientRect();
        return [tile.querySelector('.name').textContent, width / height];
    }))""")
    assert abs(shapes["00.jpg"] - 53 / 40) < 0.03 and shapes["tall.jpg"] < 0.6 and shapes["wide.jpg"] > 2
    seen.page.locator(".tile .open").first.click()
    box = seen.page.locator("#closer").bounding_box()
    assert (box["x"], box["width"]) == (0, 390)
    assert seen.page.evaluate("document.querySelector('.side').scrollWidth") <= 390


def test_dark_and_light_differ_and_both_can_be_read(visit):
    contrast = """(selectors) => selectors.map((selector) => {
        const element = document.querySelector(selector), canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
        const light = (colour) => {
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
        };
        let under = element;
        while (getComputedStyle(under).backgroundColor === "rgba(0, 0, 0, 0)") under = under.parentElement;
        const [a, b] = [light(getComputedStyle(element).color), light(getComputedStyle(under).backgroundColor)];
        return Math.max(a, b) / Math.min(a, b);
    })"""
    seen = visit("?q=red - cat&like=1", color_scheme="light")
    wait_for_results(seen)
    papers = set()
    for scheme in ("light", "dark"):
        seen.page.emulate_media(color_scheme=scheme)
        papers.add(seen.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        parts = ["#count", "#words", ".term b", ".term .remove", "#sign", "#more", "#similar", "#labels-note"]
        read = seen.page.evaluate(contrast, parts)
        assert min(read) >= 4.5, (scheme, read)
    assert len(papers) == 2


def test_a_screen_reader_finds_its_way(visit):
    seen = visit("?q=red&like=1&unlike=2")
    wait_for_results(seen)
    unnamed = "[...document.querySelectorAll('button, input, select')].filter((one) => !one.labels?.length && !one.ariaLabel && !one.textContent && !one.hasAttribute('aria-labelledby'))"
    assert seen.page.evaluate(f"{unnamed}.map((one) => one.outerHTML)") == []
    assert seen.page.locator("h1").count() == 1 and seen.page.locator("#count[aria-live=polite]").count() == 1
    assert seen.page.locator(".tile .open[tabindex='0']").count() == 1, "one stop for Tab, arrows from there"
    reached = set()
    for _ in range(20):
        seen.page.keyboard.press("Tab")
        reached.add(seen.page.evaluate("document.activeElement.id || document.activeElement.className"))
        outlined = "[document.activeElement, document.activeElement.closest('.tile, .field, .choose')].some((one) => one && getComputedStyle(one).outlineStyle !== 'none')"
        assert seen.page.evaluate(f"document.activeElement === document.body || {outlined}"), reached
    assert {"skip", "theme", "words", "sign", "remove", "file", "score", "folder", "open"} <= reached


def test_a_server_that_cannot_be_reached_is_said_and_asked_again(visit):
    seen = visit("?q=red")
    before = wait_for_results(seen)
    seen.context.set_offline(True)
    seen.page.locator("#words").fill("old - red")
    seen.wait("document.getElementById('connection').textContent.includes('does not respond')")
    assert seen.page.evaluate(SHOWN) == before
    seen.context.set_offline(False)
    wait_for_others(seen, before)
    seen.wait("document.getElementById('connection').textContent === ''")
    assert seen.problems and all("ERR_" in problem for problem in seen.problems)
    seen.problems.clear()


@pytest.mark.prove
def test_a_server_that_goes_is_said_and_what_it_has_afterwards_is_shown(browser, folder, tmp_path):
    """Begun without an index, killed, and started again after something was indexed: the page follows by itself."""
    shutil.copytree(folder / "mine", tmp_path / "mine")
    server = SearchServer(tmp_path, "--model", "./mine")
    seen = Visit(browser, server.address)
    try:
        seen.page.get_by_text("No image is indexed yet").wait_for()
        assert "lapclip index" in seen.text("#welcome-words")
        server.stop(signal.SIGKILL)
        seen.page.locator("#words").fill("red")
        seen.wait("document.getElementById('connection').textContent.includes('does not respond')")
        picture_folder(tmp_path / "few", 3)
        run_here(tmp_path, ["index", "few", "--model", "./mine"])
        server = SearchServer(tmp_path, port=server.port)
        assert len(wait_for_results(seen)) == 3
        seen.wait("document.getElementById('connection').textContent === ''")
        seen.wait("[...document.querySelectorAll('.tile img')].every((image) => image.naturalWidth > 0)")
        assert not [problem for problem in seen.problems if "ERR_" not in problem]
    finally:
        seen.context.close()
        server.stop()
