"""The page in a real browser, on a real run while it trains."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import RECORD_LABELS, being_trained
from made_events import evaluated, finished, inspected, started, step
from test_http import Server, append, write_run

from lapclip.runs.events import Step, Warned
from lapclip.runs.run import Run

HOSTILE = "<img src=x onerror=\"document.title='stolen'\"><b id=hostile>bold</b>"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --no-first-run --disable-sync"
SECONDS = 30_000  # milliseconds, as playwright counts them
SHOWN = "import('/static/watch.js').then((page) => page.shownRun())"
STEPS = f"{SHOWN}.then((run) => run?.steps.step ?? [])"
LOOK = "document.dispatchEvent(new Event('visibilitychange'))"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    problem = None if program else "no chromium here to open the page in"
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        problem = "playwright is not installed"
    if problem and os.environ.get("LAPCLIP_BROWSER") == "required":
        pytest.fail(problem)
    if problem:
        pytest.skip(problem)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs to show: one that is trained meanwhile, one that is over with captions to be afraid of, one of old."""
    folder = tmp_path_factory.mktemp("watched")
    steps = [step(number, loss=3 / number, temperature=0.07 - number * 1e-6) for number in range(1, 60)]
    over = write_run(
        folder / "runs" / "over",
        started(total_steps=60),
        *steps,
        inspected(20),
        inspected(40),
        evaluated(30, "snapshots/step-000005.json"),
        evaluated(59, "snapshots/step-000059.json"),
        Warned(9, HOSTILE, HOSTILE, "slower"),
        finished(60),
    )
    for number in (5, 59):
        write_thought(over, number, HOSTILE)
    draw_image(over.path / "snapshots" / "pictures" / "000012.jpg")
    write_run(folder / "runs" / "older", started(), *steps[:40])
    return folder


def write_thought(run: Run, number: int, text: str) -> None:
    """A snapshot: one question, and a matrix of two pairs."""
    image = "pictures/000012.jpg"
    found = [{"picture": image, "score": 0.3, "is_right": place == 1} for place in range(6)]
    matrix = {"captions": [text, "two"], "pictures": [image] * 2, "cosine": [[0.5, 0.1], [0.2, 0.6]]}
    thought = {"step": number, "queries": [{"text": text, "rank": 2, "found": found}], "matrix": matrix}
    (run.path / "snapshots" / f"step-{number:06}.json").write_text(json.dumps(thought))


def draw_image(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (96, 96), "teal").save(path)


@pytest.fixture(scope="module")
def training(folder):
    """A real run in a process of its own, for the last tests only: it would take a core from the others."""
    with being_trained(folder, eval_every=20):
        yield Run(folder / "runs" / "live")


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder)
    yield server
    server.stop()


class Visit:
    """A page of its own, and everything it asked for or complained about."""

    def __init__(self, browser, address: str, **options):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(SECONDS)
        self.asked, self.problems = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda said: said.type == "error" and self.problems.append(said.text))
        self.page.goto(address)

    def wait(self, condition: str) -> None:
        """Until it holds; asked from outside, since the page's own policy forbids to evaluate a string again and again."""
        deadline = time.monotonic() + 30
        while not self.page.evaluate(condition):
            assert time.monotonic() < deadline, condition
            time.sleep(0.05)

    def steps(self) -> list[int]:
        return self.page.evaluate(STEPS)

    def wait_for_steps(self, count: int) -> list[int]:
        self.wait(f"{STEPS}.then((steps) => steps.length >= {count})")
        return self.steps()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()


@pytest.fixture
def visit(browser, server):
    visits = []

    def begin(query="", **options) -> Visit:
        visits.append(Visit(browser, server.address + query, **options))
        return visits[-1]

    yield begin
    for one in visits:
        assert one.problems == []
        own = (server.address, f"blob:{server.address}")
        assert [url for url in one.asked if not url.startswith(own)] == [], "nobody else is asked"
        one.context.close()


def pixels(page, selector: str) -> str:
    page.locator(selector).first.wait_for()
    return page.evaluate(f"document.querySelector('{selector}').toDataURL()")


def written(run: Run) -> list[int]:
    return [event.step for event in run.events() if isinstance(event, Step)]


def test_a_run_that_is_over_opens_and_hostile_words_are_only_words(visit, folder):
    seen = visit("?run=over")
    seen.page.locator("#queries img").first.wait_for()
    assert (seen.text("#state"), seen.text("#percent")) == ("finished", "100%")
    assert HOSTILE in seen.text("#queries q") and HOSTILE in seen.text("#warnings strong")
    assert seen.text("#queries .right b") == "\u2713 correct"
    assert seen.page.locator("#queries .right").count() == 1
    seen.page.locator("#matrix").hover(position={"x": 20, "y": 20})
    seen.page.locator("#matrix-details summary").click()
    assert HOSTILE in seen.text("#matrix-cell") and HOSTILE in seen.text("#matrix-table")
    seen.page.locator("#layers").hover(position={"x": 150, "y": 5})
    assert "image.0 at step" in seen.text("#layers-cell")
    assert seen.page.locator("#hostile").count() == 0 and "stolen" not in seen.page.title()
    # Earlier results can be looked at, and a missing one is said.
    assert seen.text("#snapshot-step") == "step 59, the newest"
    (folder / "runs" / "over" / "snapshots" / "step-000005.json").rename(folder / "kept")
    seen.page.locator("#earlier").click()
    seen.wait("document.getElementById('thinks-note').textContent.includes('cannot be read')")
    (folder / "kept").rename(folder / "runs" / "over" / "snapshots" / "step-000005.json")
    assert seen.text("#snapshot-step") == "step 30, 1 of 2"
    seen.problems.clear()  # the browser notes the missing file


def test_a_run_that_is_being_set_up_says_so(visit, folder):
    new = write_run(folder / "runs" / "new")
    with new.owned():
        seen = visit("?run=new")
        seen.wait("document.getElementById('state').textContent === 'being set up'")
        append(new, started(time=time.time()), step(1), step(2))
        seen.wait_for_steps(2)
        assert seen.text("#state") == "running"


def test_a_curve_can_be_read_and_looked_at_closely(visit):
    seen = visit("?run=over")
    seen.wait_for_steps(59)
    figure = seen.page.locator("figure").first
    over = figure.locator(".u-over")
    over.hover()
    assert re.search("step (29|3.)$", figure.locator("figcaption").inner_text()), "the middle"
    box = over.bounding_box()
    whole = pixels(seen.page, ".plot canvas")
    seen.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 20)
    seen.page.mouse.down()
    seen.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 20, steps=3)
    seen.page.mouse.up()
    seen.wait("document.getElementById('range').value === ''")
    seen.wait(f"document.querySelector('.plot canvas').toDataURL() !== {json.dumps(whole)}")
    seen.page.locator("#range").select_option("1")
    figure.locator("summary").click()
    figure.locator("th").first.wait_for()
    assert "validation" in figure.locator("th").all_inner_texts()
    assert figure.locator("tbody tr").count() == 12
    assert figure.locator(".plot").get_attribute("aria-label").startswith("Loss: training ")


def test_runs_are_laid_over_one_another_and_told_apart_without_colour(visit):
    seen = visit("?run=over")
    seen.wait_for_steps(59)
    loss, layers = seen.page.locator("figure").nth(0), seen.page.locator("figure").nth(8)
    seen.page.get_by_label("older", exact=True).check()
    loss.get_by_text("older").wait_for()
    assert "older" not in layers.inner_text(), "only what can be compared"
    assert "with=older" in seen.page.url
    keys = "[...document.querySelectorAll('figure .legend')[0].querySelectorAll('canvas')].map(alphas)"
    alphas = (
        "(c) => [...c.getContext('2d').getImageData(0, 6, 48, 1).data].filter((_, i) => i % 4 === 3).join()"
    )
    drawn = seen.page.evaluate(f"() => {{ const alphas = {alphas}; return {keys}; }}")
    assert len(drawn) == len(set(drawn)) == 3, "each line has dashes of its own"
    seen.page.reload()
    seen.page.locator("figure").nth(0).get_by_text("older").wait_for()
    seen.page.get_by_label("older", exact=True).uncheck()
    seen.page.locator("figure").nth(0).get_by_text("older").wait_for(state="detached")


def test_nothing_is_wider_than_a_phone(visit):
    seen = visit("?run=over&with=older", viewport={"width": 390, "height": 800})
    seen.page.locator("#queries img").first.wait_for()
    seen.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_everything_can_be_reached_with_the_keyboard(visit):
    seen = visit("?run=over")
    seen.page.locator("#queries img").first.wait_for()
    seen.page.locator("#runs input").first.wait_for()
    look = "((one) => [one.id || one.type || one.className || one.localName, getComputedStyle(one).outlineStyle])(document.activeElement)"
    found = []
    for _ in range(40):
        seen.page.keyboard.press("Tab")
        found.append(seen.page.evaluate(look))
    reached = [who for who, _ in found]
    expected = ("theme", "range", "checkbox", "summary", "earlier", "snapshot", "matrix", "layers")
    assert reached[0] == "skip" and set(expected) <= set(reached)
    assert all(outline != "none" for who, outline in found if who != "body")
    seen.page.locator("#snapshot").press("ArrowLeft")
    assert seen.text("#snapshot-step") == "step 30, 1 of 2"


def test_dark_and_light_differ_and_a_choice_is_kept(visit):
    paper = "getComputedStyle(document.body).backgroundColor"
    seen = visit("?run=over", color_scheme="light")
    seen.page.locator("#queries img").first.wait_for()  # so the curves are drawn
    seen.page.evaluate(RECORD_LABELS)
    light, curve = seen.page.evaluate(paper), pixels(seen.page, ".plot canvas")
    seen.page.emulate_media(color_scheme="dark")
    assert seen.page.evaluate(paper) != light
    seen.wait(f"document.querySelector('.plot canvas').toDataURL() !== {json.dumps(curve)}")
    for axis in seen.page.evaluate(
        "Array.from(document.querySelectorAll('.plot canvas'), (canvas) => canvas.labels)"
    ):
        assert len(set(axis)) == len(axis), f"labels are repeated: {axis}"
    seen.page.locator("#theme").click()
    seen.page.reload()
    assert seen.page.evaluate(paper) == light


def test_a_screen_reader_finds_its_way(visit):
    seen = visit("?run=over")
    seen.page.locator("#queries img").first.wait_for()
    silent = "[...document.querySelectorAll('canvas, img')].filter((one) => !one.closest('[role=img][aria-label], [aria-hidden=true]') && !one.alt)"
    assert seen.page.evaluate(f"{silent}.map((one) => one.id)") == []
    assert seen.page.locator("header, main, footer").count() == 3 and seen.page.locator("h1").count() == 1
    assert seen.page.locator("section:not([aria-labelledby])").count() == 0
    unnamed = "[...document.querySelectorAll('button, input, select')].filter((one) => !one.labels?.length && !one.ariaLabel && !one.textContent)"
    assert seen.page.evaluate(f"{unnamed}.length") == 0
    cell = seen.page.locator("#matrix-cell[role=status]")
    cell.evaluate(
        "(cell) => { window.told = 0; new MutationObserver(() => { told += 1; }).observe(cell, { childList: true }); }"
    )
    for _ in range(3):  # the second and third stay at the edge
        seen.page.locator("#matrix").press("ArrowRight")
    assert "cosine 0.100" in cell.inner_text() and seen.page.evaluate("told") == 1
    seen.page.locator("#layers").press("ArrowRight")
    assert "image.0 at step 40" in seen.text("#layers-cell[role=status]")


def test_a_page_with_too_many_points_asks_for_all_of_them_again(visit):
    """Instead of thinning what it has, again and again, until nothing is left of the beginning."""
    seen = visit("?run=over")
    seen.wait_for_steps(59)
    held = seen.page.evaluate(f"""{SHOWN}.then((run) => {{
        const more = {{ now: run.now, inspections: {{}}, evaluations: {{}} }};
        for (let from = 60; run.place && from < 9000; from += 500) {{
            const step = [...Array(500).keys()].map((i) => from + i), data = {{ ...more, steps: {{ step, loss: step }} }};
            run.take({{ data: JSON.stringify(data), lastEventId: run.place }});
        }}
        return run.steps.step;
    }})""")
    assert held == list(range(1, len(held) + 1)), "nothing is lost meanwhile"
    seen.wait(f"{STEPS}.then((steps) => steps.length === 59)")


def test_a_hidden_page_holds_no_stream_and_goes_on_without_a_gap_when_it_is_seen(visit, folder):
    run = write_run(folder / "runs" / "hidden", started(), step(1), step(2))
    seen = visit("?run=hidden&with=over")
    seen.wait_for_steps(2)
    hide = f"(is) => {{ Object.defineProperty(document, 'hidden', {{ value: is, configurable: true }}); {LOOK}; }}"
    seen.page.evaluate(hide, True)
    assert seen.page.evaluate(f"{SHOWN}.then((run) => run.source.readyState)") == 2, "closed"
    born = (
        "import('/static/follow.js').then(({ Followed }) => Boolean(new Followed('over', () => {}).source))"
    )
    assert seen.page.evaluate(born) is False, "nor one that was opened in the background"
    append(run, step(3), step(4))
    seen.page.evaluate(hide, False)
    assert seen.wait_for_steps(4) == [1, 2, 3, 4]
    append(run, step(5))
    assert seen.wait_for_steps(5) == [1, 2, 3, 4, 5]


def test_a_run_that_begins_meanwhile_is_listed_and_the_shown_one_is_not(visit, folder):
    seen = visit("?run=older")
    seen.wait("document.getElementById('name').textContent === 'older'")
    write_run(folder / "runs" / "newer", started(), step(1))
    seen.page.evaluate(LOOK)  # lists them at once
    seen.page.get_by_label("newer", exact=True).wait_for()
    listed = {name.strip() for name in seen.page.locator("#runs label").all_inner_texts()}
    assert {"over", "newer"} <= listed and "older" not in listed and seen.text("#name") == "older"


def test_what_a_resumed_run_thinks_replaces_what_it_thought_at_the_same_step(visit, folder):
    run = write_run(
        folder / "runs" / "resumed", started(), step(5), evaluated(5, "snapshots/step-000005.json")
    )
    write_thought(run, 5, "before")
    draw_image(run.path / "snapshots" / "pictures" / "000012.jpg")
    seen = visit("?run=resumed")
    seen.page.get_by_text("before").first.wait_for()
    write_thought(run, 5, "after")
    append(run, started(), step(5), evaluated(5, "snapshots/step-000005.json"))
    seen.page.locator("#queries q", has_text="after").wait_for()
    (run.path / "snapshots" / "step-000006.json").write_text('{"queries": 7}')
    append(run, step(6), evaluated(6, "snapshots/step-000006.json"))
    seen.wait("document.getElementById('thinks-note').textContent.includes('cannot be read')")
    append(run, step(7))
    seen.wait_for_steps(3)
    seen.page.evaluate("new Promise(requestAnimationFrame)")
    assert len([url for url in seen.asked if "step-000006" in url]) == 1, "asked for once, not at all news"


# While something is trained.


def test_the_curves_of_a_run_move_while_it_trains(visit, training):
    seen = visit("?run=live")
    first = seen.wait_for_steps(2)
    curve = ".plot canvas"
    before = pixels(seen.page, curve)
    seen.page.evaluate("""() => {
        window.changes = 0;
        const count = new MutationObserver((records) => { window.changes += records.length; });
        for (const region of document.querySelectorAll("[role=status]"))
            count.observe(region, { childList: true, subtree: true, characterData: true });
    }""")
    steps = seen.wait_for_steps(len(first) + 3)
    seen.wait(f"document.querySelector('{curve}').toDataURL() !== {json.dumps(before)}")
    assert steps == written(training)[: len(steps)], "every point that was written, once"
    assert seen.text("#state") == "running" and "left" in seen.text("#sentence")
    assert seen.page.evaluate("window.changes") == 0, "a screen reader is told of news, not of every step"
    seen.page.locator("#queries img").first.wait_for()
    seen.page.locator("#matrix").wait_for()


def test_a_lost_connection_is_said_and_mended_without_a_gap_or_a_double(browser, folder, training):
    server = Server(folder)
    seen = Visit(browser, f"http://127.0.0.1:{server.port}/?run=live")
    try:
        before = seen.wait_for_steps(2)
        server.stop(signal.SIGKILL)
        seen.wait("document.getElementById('connection').textContent === 'connection lost, trying again'")
        time.sleep(1)  # something happens meanwhile
        server = Server(folder, port=server.port)
        steps = seen.wait_for_steps(len(before) + 4)
        seen.wait("document.getElementById('connection').textContent === ''")
        assert steps == written(training)[: len(steps)]
        assert not [problem for problem in seen.problems if "ERR_" not in problem]
    finally:
        seen.context.close()
        server.stop()
