"""The report: says what the run's own events say, needs nothing beside itself, and trusts no text."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import RECORD_LABELS, SMALL
from made_events import memorised
from PIL import Image

from lapclip.config import load_config, to_toml
from lapclip.runs.events import (
    KINDS_OF_MEMORY,
    PARTS,
    Continued,
    Evaluated,
    Failed,
    Finished,
    Inspected,
    Paused,
    Started,
    Step,
    Warned,
    to_line,
)
from lapclip.runs.history import summarize
from lapclip.runs.run import Run
from lapclip.units import percent
from lapclip.view.html import write_html
from lapclip.view.learning import phases_of, read_queries, stretches_of
from lapclip.view.markdown import as_markdown
from lapclip.view.report import document_of, write_report

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> | `a` \"'&\u202e\x07"
FLAGS = "--no-sandbox --disable-gpu --disable-background-networking --disable-component-update --no-first-run"
MEGABYTE = 1 << 20
BATCH, PAIRS = 10, 200


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A run that was really trained, to copy from."""
    from lapclip.train.loop import train
    from lapclip.train.prepare import prepare

    before, cache = Path.cwd(), os.environ.get("LAPCLIP_CACHE")
    os.chdir(tmp_path_factory.mktemp("real"))
    os.environ["LAPCLIP_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    try:
        run = prepare(load_config(flags={**SMALL, "num_validation": 40, "eval_every": "2"}), "real")
        for _ in train(run.load_config(), run):
            pass
        return run.path.resolve()
    finally:
        os.chdir(before)
        os.environ.pop("LAPCLIP_CACHE") if cache is None else os.environ.update(LAPCLIP_CACHE=cache)


@pytest.fixture
def run(real):
    shutil.copytree(real, "runs/real")
    return Run(Path("runs/real"))


def started(step=0, **more) -> Started:
    plain = Started(step, 0.0, 1, 5, PAIRS, BATCH, BATCH, "cpu", 1, None, None, time=0.0)
    return replace(plain, **more)


def step(number, loss=1.0, total=100, *, seconds_each=1.0, **more) -> Step:
    seconds, pairs = number * seconds_each, number * BATCH
    plain = Step(
        step=number, epoch=pairs / PAIRS, num_pairs_seen=pairs, loss=loss, accuracy=0.5, lr=1e-3, temperature=0.07,
        grad_norm=1.0, pairs_per_second=BATCH / seconds_each, data_seconds=0.0, seconds=seconds,
        progress=number / total, seconds_left=0.0, time=seconds,
    )  # fmt: skip
    return replace(plain, **more)


def recall(at_1, num=500) -> dict:
    shares = {"recall@1": at_1, "recall@5": 0.9, "recall@10": 0.9}
    chances = {f"chance@{k}": k / num for k in (1, 5, 10)}
    both = {**shares, **chances, "median_rank": 2.0, "interval@10": [0.8, 1.0]}
    in_batch = {"accuracy": 0.5, "chance": 1 / BATCH, "batch_size": BATCH}
    whole = {"num_images": num, "num_captions": num, "in_batch": in_batch}
    return {**whole, "text_to_image": both, "image_to_text": both}


def evaluated(number, at_1, loss=None) -> Evaluated:
    return Evaluated(number, recall(at_1), is_best=True, elapsed_seconds=0.1, loss=loss)


def inspected(number, **readings) -> Inspected:
    return Inspected(
        step=number,
        time=float(number),
        parts={**dict.fromkeys(PARTS, 0.0), "data": 0.1, "forward": 0.4, "backward": 0.5},
        memory={**dict.fromkeys(KINDS_OF_MEMORY, 100), "activations": None},
        memory_used=10**8,
        memory_peak=10**8,
        memory_limit=10**9,
        grad_norms={"image.0": 1.0, "image.1": 2.0, "text.0": 1.0, "scale": 0.1},
        readings=readings,
    )


def told(events, name="told", **settings) -> Run:
    """A run folder in which exactly this happened."""
    path = Path("runs") / name
    path.mkdir(parents=True)
    (path / "config.toml").write_text(to_toml(load_config(flags=settings)))
    (path / "events.jsonl").write_text("".join(map(to_line, events)))
    return Run(path)


def finished(number, reason="budget", at_1=0.5) -> Finished:
    pairs = number * BATCH
    return Finished(
        reason, number, pairs / PAIRS, float(number), pairs, 10.0, 10**8, 5, recall(at_1), number, None
    )


def as_markdown_of(summaries) -> str:
    return as_markdown(document_of(summaries))


def summary(run) -> str:
    return " ".join(document_of([summarize(run)]).sections[0].words)


def embedded(html) -> list[dict]:
    """The charts as the page's script gets them."""
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)[1])


class Looked(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, html):
        super().__init__()
        self.text, self.tags, self.loads, self.handlers, self.open = "", [], [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        for name, value in attributes:
            is_address = name in ("src", "href", "srcset", "data", "action")
            if is_address and not (value or "").startswith(("#", "data:")):
                self.loads.append(value)
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check_in_browser(path, check) -> None:
    """Opens a page in two widths and colour schemes: it loads nothing, complains of nothing and is not too wide."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if not program:
        assert os.environ.get("LAPCLIP_BROWSER") != "required", "chromium is not installed"
        pytest.skip("no chromium here to open the page in")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=FLAGS.split())
        for width, scheme in ((1200, "light"), (390, "dark")):
            page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            said = []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("request", lambda request, said=said: said.append(request.url))
            page.add_init_script(RECORD_LABELS)
            page.goto(path.resolve().as_uri())
            check(page)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            cut = "all => all.filter(t => t.scrollWidth > t.clientWidth).map(t => t.innerText)"
            cut_off = page.locator(".wide").evaluate_all(cut)
            assert width < 1200 or cut_off == [], "there is room for the whole tables"
            assert [one for one in said if not one.startswith(("file:", "data:"))] == []
        browser.close()


def test_the_page_of_a_real_run_needs_nothing_beside_itself(run, call):
    html = write_report(run).read_text()
    page = Looked(html)
    assert page.loads == [] and page.handlers == [] and page.open == []
    assert "default-src 'none'" in html and "@import" not in html and "url(" not in html
    in_comments = {"https://github.com/leeoniya/uPlot"}
    assert set(re.findall(r"https?://[^\s\"'<)]+", html)) <= in_comments and len(html) < MEGABYTE
    assert "img" in page.tags, "the images it finds are in it"
    plots = re.findall(r'<div class="plot" role="img" aria-label="(.+?)">', html)
    assert len(plots) == 7 and re.match(r"Loss: training [\d.]+ to [\d.]+, validation ", plots[0])
    end = next(e for e in run.events() if isinstance(e, Finished))
    found = end.recall["text_to_image"]
    said = f"first in {percent(found['recall@1'])} of cases (chance {percent(found['chance@1'])})"
    assert said in page.text and said in as_markdown_of([summarize(run)])
    (run.path / "report.html").unlink()
    (numbers,) = json.loads(call("report", "real", "--json").stdout)["runs"]
    assert numbers["recall"] == end.recall and numbers["steps"] == end.step == 6
    assert numbers["state"] == "finished" and numbers["stretch"] == "tenth"
    assert not (run.path / "report.html").exists(), "it only prints"


def test_the_command_prints_the_path_and_costs_no_torch(run):
    program = (
        "import sys, lapclip.cli as c; c.run_command(['report', 'real']); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "runs/real/report.html\n"
    assert "Text → image: the correct one of 40 images" in done.stderr


def test_only_reports_are_overwritten_and_only_runs_reported(run, call):
    Path("mine.html").write_text("<html>my own page</html>")
    for place, said in (
        ("mine.html", "is not known to be written by lapclip"),
        ("none/x.html", "cannot write"),
        ("/dev/null", "cannot"),
    ):
        done = call("report", "real", "--output", place)
        assert done.returncode == 1 and said in done.stderr
    assert Path("mine.html").read_text() == "<html>my own page</html>"
    for _ in range(2):  # its own file it may replace
        assert call("report", "real", "--output", "new.html").returncode == 0
    done = call("report", "nothing")
    assert done.returncode == 1 and "there is no run `nothing`" in done.stderr
    assert call("report").returncode == 1


def test_several_runs_stand_side_by_side(call):
    for name, loss, found, lr in (("slow", 3, 0.2, 1e-4), ("fast", 2, 0.6, 1e-3), ("third", 2, 0.1, 1e-3)):
        steps = [step(n, loss - n / 100) for n in range(1, 101)]
        told([started(), *steps, evaluated(100, found), finished(100, at_1=found)], name, lr=lr, steps=100)
    done = call("report", "slow", "fast", "third")
    assert done.returncode == 0 and done.stdout == "report.html\n"
    assert "`fast` has the best recall@1, 60.0%; `slow` has 20.0% and `third` has 10.0%" in done.stderr
    html = Path("report.html").read_text()
    assert [line["label"] for line in embedded(html)[0]["lines"]] == ["slow", "fast", "third"]
    differing = re.search(r'id="differences".*?</section>', html, re.DOTALL)[0]
    assert "0.0001" in differing and "weight_decay" not in differing, "what is the same is not listed"
    told([started(), step(10), replace(finished(10), recall=recall(0.5, num=50))], "few")
    words = call("report", "fast", "few", "--markdown").stdout
    assert "cannot be compared" in words and "the best recall" not in words


def test_the_training_loss_is_the_mean_of_the_last_ten_steps_everywhere():
    steps = [step(n, 4.0 - n / 50 + n % 2, total=50) for n in range(1, 51)]
    one = summarize(told([started(), *steps, finished(50)], "my été"))
    other = summarize(told([started(), *steps, finished(50)], "other"))
    mean, single, both = one.results()["training loss"], document_of([one]), document_of([one, other])
    assert mean != steps[-1].loss
    assert ("training loss", f"{mean:.3f}", "last 10 steps") in single.tiles
    lines = {
        line.label: line.points[-1][1] for s in single.sections for c in s.charts[:1] for line in c.lines
    }
    assert lines == {"each step": steps[-1].loss, "training": mean}
    (table,) = both.sections[0].tables
    assert dict(zip(table.columns, table.rows[0], strict=True))["training loss"] == mean
    assert [line.points[-1][1] for line in both.sections[2].charts[0].lines] == [mean, mean]
    assert both.title == "my été | other", "it is read, not typed"


def test_examples_of_class_data_ask_each_caption_once():
    run = told([started(), step(1), replace(evaluated(1, 0.5), snapshot="snapshots/step-000001.json")])
    queries = [{"text": text, "rank": 1, "found": []} for text in ("red", "blue", "red")]
    (run.path / "snapshots").mkdir()
    (run.path / "snapshots/step-000001.json").write_text(json.dumps({"queries": queries}))
    text = as_markdown_of([summarize(run)])
    assert "For 2 of these 2, a correct image is first" in text
    assert text.count("red: a correct image comes first") == 1


def test_what_follows_from_the_size_is_not_said_to_be_set():
    run = told([started(), step(1)], image_size=64, crop=1.0, seed=3)
    tables = [table for s in document_of([summarize(run)]).sections for table in s.tables]
    rows = {row[0]: row[2] for table in tables if table.caption == "Settings" for row in table.rows}
    assert (rows["image_size"], rows["crop"], rows["seed"]) == ("default", "default", "set")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"size": "tiny"}, "tiny"),
        ({"size": "tiny", "base": "tinyclip-8m", "tune": "heads"}, "tinyclip-8m"),
        ({"size": "tiny", "base": "tinyclip-8m"}, "tiny from tinyclip-8m"),
        ({"image_tower": "efficientnet-lite0", "text_tower": "minilm"}, "efficientnet-lite0 and minilm"),
    ],
)
def test_a_pretrained_model_is_called_by_its_name_or_its_towers(settings, name):
    document = document_of([summarize(told([started(), step(1)], **settings))])
    assert document.sections[0].words[0].startswith(f"A `{name}` model") and name in document.about


@pytest.mark.parametrize(
    "end, said, next_step",
    [
        ([finished(60, "stopped")], "It was stopped at 60% of its budget", "--resume told"),
        (
            [Failed("the loss is not finite", "lower the learning rate")],
            "failed at 60% of its budget: the loss is",
            "Lower",
        ),
        ([], "ended unexpectedly at 60%", "--resume told"),
        ([Warned(60, "nothing is learned", "use a lower one")], "ended unexpectedly", "Use a lower one."),
        ([finished(60)], "It used up its budget", "eval told"),
    ],
)
def test_the_end_is_said_as_it_was(end, said, next_step):
    run = told([started(), *(step(n) for n in range(1, 61)), *end], source="synthetic")
    text = summary(run)
    assert said in text and (end or ("never evaluated" in text and "Text → image" not in text))
    assert next_step in " ".join(document_of([summarize(run)]).sections[1].points)


@pytest.mark.parametrize(
    "recalls, said",
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5], "still improving at the end: recall@1 rose from 30.0%"),
        ([0.1, 0.4, 0.5, 0.5, 0.5], "Recall@1 stayed at 50.0% from step 60 on"),
        ([0.1, 0.4, 0.5, 0.4, 0.5], "Recall@1 was 50.0% at step 60 and at the end, and varied between."),
        ([0.1, 0.4, 0.5, 0.5, 0.51], "changed from 50.0% at step 60 to 51.0%, by less than the noise"),
        ([0.1, 0.5, 0.6, 0.4, 0.3], "became worse: recall@1 fell from 60.0% at step 60 to 30.0%"),
        ([0.7, 0.2, 0.2, 0.2, 0.2], "became worse: recall@1 fell from 70.0% at step 20 to 20.0%"),
        (
            [0.1, 0.2, 0.3, 0.52, 0.5],
            "rose from 30.0% at step 60 to 50.0%; it was highest with 52.0% at step 80",
        ),
        ([0.1, 0.2], ""),
    ],
)
def test_whether_it_was_improving_is_told_from_the_last_quarter(recalls, said):
    events = [started(), *(step(n) for n in range(1, 101))]
    events += [evaluated(20 * (n + 1), value) for n, value in enumerate(recalls)]
    text = summary(told([*events, finished(100)]))
    assert said in text if said else "improving" not in text


def test_the_noise_of_nine_classes_is_that_of_nine_captions():
    found = [evaluated(20 * n, share) for n, share in enumerate((0.1, 0.4, 0.7, 0.84, 0.84), 1)]
    for event in found:
        event.recall["text_to_image"]["num_units"] = 9
    text = summary(told([started(), *(step(n) for n in range(1, 101)), *found, finished(100)]))
    assert "improving" not in text and "to 84.0%, by less than the noise of 28." in text


def test_noise_is_that_of_images_and_advice_to_resume_is_not_given_to_a_finished_run():
    again = Warned(60, "training ends at 60% of its budget", "resume it", "lr-still-high")
    shares = enumerate((0.1, 0.4, 0.45, 0.46, 0.5), 1)
    few = [replace(evaluated(20 * n, 0), recall=recall(s, 100) | {"num_captions": 5000}) for n, s in shares]
    run = told([started(), step(60), again, started(60), step(100), *few, finished(100)])
    document = document_of([summarize(run)])
    assert "less than the noise of 10.0 points" in " ".join(document.sections[0].words)
    assert document.sections[1].points == ["Run the full evaluation: `lapclip eval told`."]
    assert "1 warning" not in " ".join(document.sections[0].words), "it was resumed since"


def test_the_lowest_validation_loss_is_told():
    for losses, said in (((2.0, 1.5, 1.8), "lowest at step 50 (1.500) and ended at 1.800"),
                         ((2.0, 1.5, 1.2), "lowest at the end (1.200)")):  # fmt: skip
        evaluations = [evaluated(25 * n, 0.3, loss) for n, loss in enumerate(losses, 1)]
        assert said in summary(
            told([started(), step(1), step(100), *evaluations, finished(100)], str(losses[2]))
        )


def test_a_clearly_risen_validation_loss_is_told_unless_recall_rose_too_or_little_was_learned():
    harmless = Warned(100, "loss and recall rise", "nothing to do", "loss-rises-recall-too")
    for number, (highest, accuracy, told_so, warned) in enumerate(
        [(5.7, 0.9, True, []), (5.7, 0.9, False, [harmless]), (4.7, 0.9, False, []), (5.7, 0.3, False, [])]
    ):
        steps = [step(n, accuracy=accuracy) for n in range(1, 101)]
        losses = [evaluated(25 * n, 0.3, loss) for n, loss in enumerate((4.6, 5.0, 5.6, highest), 1)]
        run = told([started(), *steps, *losses, *warned, finished(100)], f"run-{number}")
        points = " ".join(document_of([summarize(run)]).sections[1].points)
        assert ("Mean recall has not risen since step 25, while validation loss rises" in points) == told_so
        assert "twice as long" not in points and "nothing to do" not in points.lower()


def test_a_rise_of_recall_beside_a_risen_validation_loss_is_no_improvement():
    for losses, improves in (((2.0, 1.5, 1.6, 1.7), False), ((2.0, 1.8, 1.6, 1.5), True)):
        found = [evaluated(25 * n, 0.2 * n, loss) for n, loss in enumerate(losses, 1)]
        run = told([started(), *(step(n) for n in range(1, 101)), *found, finished(100)], f"run-{improves}")
        text = as_markdown_of([summarize(run)])
        assert ("still improving" in text) == ("twice as long" in text) == improves
        assert (
            "rose from 60.0%" in text and "but the validation loss ended above its lowest" in text
        ) != improves


def test_a_run_that_memorised_its_pairs_is_nowhere_advised_to_train_longer(capfd):
    from lapclip.cli.evaluate import next_step
    from lapclip.cli.train import show_result

    run = told(memorised(), crop=1.0, epochs=10.0)
    history, advice = summarize(run).history, "more pairs would help most, then random crops: `--crop 0.6`"
    text = as_markdown_of([summarize(run)])
    assert "not significantly above chance" in text and "over-fits" in text and advice in text
    show_result(run, history.finished, None, stopped=False)
    printed = " ".join(capfd.readouterr().err.split())
    assert "training accuracy of 100%" in printed and advice in printed and "--resume" not in printed
    said = next_step(history.recall | {"share_unknown_words": 0.0}, ["told"], run.path, has_page=False)
    assert "in training, recall is not significantly above chance" in said and advice in said
    show_result(told(memorised(interval=(0.5, 1.0)), "known"), history.finished, None, stopped=False)
    assert "--resume" not in capfd.readouterr().err, "all pairs are known, and recall does not rise"


def test_a_run_that_found_no_more_than_chance_says_so_and_one_that_cannot_be_measured_does_not(capfd):
    from lapclip.cli.train import show_result

    for is_said in (True, False):
        events = memorised(accuracy=0.5, losses=(0.0, 0.0, 0.0, 0.0))
        recalls = [] if is_said else [event.recall for event in events if getattr(event, "recall", None)]
        for recall in recalls:  # all images have the same caption
            for way in ("text_to_image", "image_to_text"):
                recall[way] |= {f"chance@{k}": 1.0 for k in (1, 5, 10)}
        run = told(events, f"chance-{is_said}")
        show_result(run, summarize(run).history.finished, None, stopped=False)
        printed = capfd.readouterr().err
        assert ("not significantly above chance" in printed) == is_said and "over-fits" not in printed


@pytest.mark.parametrize(
    "recalls, is_advised",
    [([0.1, 0.2, 0.3, 0.4, 0.5], True), ([0.5, 0.2, 0.2, 0.2, 0.2], False), ([0.2], True)],
)
def test_terminal_and_report_advise_longer_training_only_while_it_may_help(recalls, is_advised, capfd):
    from lapclip.cli.train import show_result

    events = [started(), *(step(n) for n in range(1, 101))]
    events += [evaluated(20 * (n + 1), value) for n, value in enumerate(recalls)]
    run = told([*events, finished(100)], epochs=10.0)
    show_result(run, summarize(run).history.finished, None, stopped=False)
    assert ("--resume told --epochs 20" in capfd.readouterr().err) == is_advised
    if len(recalls) > 1:
        assert ("--resume told --epochs 20" in as_markdown_of([summarize(run)])) == is_advised


def test_a_report_finds_no_problems_of_its_own():
    """What `diagnose` did not warn of while it trained is no problem afterwards; numbers are only shown."""
    norms = {"image.0": 1e-9, "image.1": 1.0, "image.2": 1.0, "text.0": 1.0}
    events = [
        started(),
        *(step(n, data_seconds=0.4, grad_norm=1.0 if n != 40 else 99.0) for n in range(1, 51)),
    ]
    run = told([*events, replace(inspected(50), grad_norms=norms, memory_peak=10**9)])
    text = as_markdown_of([summarize(run)])
    assert "It waited for data 40.0% of the time." in text and "1e-09" in text
    assert "## Warnings\n\nNone." in text and "vanish" not in text and "limited" not in text


def test_an_epoch_is_the_mean_of_its_steps_and_ends_with_its_last():
    events = [step(n, loss=float(n)) for n in range(1, 51)]
    run = told([started(), *events[:40], evaluated(40, 0.3), *events[40:]])
    _, rows = stretches_of(summarize(run).history)
    assert [row.label for row in rows] == ["1", "2", "3, 50% of it"]
    assert [(row.step, row.loss, row.seconds) for row in rows] == [
        (20, 10.5, 20),
        (40, 30.5, 20),
        (50, 45.5, 10),
    ]
    assert [row.recall for row in rows] == [None, 0.3, None]


def test_energy_is_power_times_time_in_its_epoch():
    """10 W over the 20 s of each epoch, which has 20 steps of a second; the reading begins with the first step."""
    events = [started()]
    for n in range(1, 61):
        events += [step(n, total=60), inspected(n, power_watts=10.0, power_of="processor package")]
    record = summarize(told([*events, finished(60)]))
    assert [row.joules for row in stretches_of(record.history)[1]] == [190.0, 200.0, 200.0]
    text = as_markdown_of([record])
    assert "590 J" in text and "processor package" in text and "per watt-hour" in text


def test_fewer_than_two_epochs_are_shown_in_tenths_and_said_so():
    events = [e for n in range(1, 31) for e in (step(n, total=30), inspected(n, power_watts=10.0))]
    record = summarize(told([started(), *events], "short"))
    assert sum(row.joules for row in stretches_of(record.history)[1]) == pytest.approx(290.0)
    short = as_markdown_of([record])
    assert "fewer than two epochs" in short and "| 10/10 |" in short
    long = as_markdown_of([summarize(told([started(), *(step(n) for n in range(1, 101))], "long"))])
    assert "fewer than two epochs" not in long and re.search(r"^\| 5 \|", long, re.MULTILINE)


def test_many_epochs_are_shown_in_few_rows_that_cover_all_of_them():
    """Each of 2,200 epochs took 20 s for its 200 pairs; not every step is kept."""
    record = summarize(told([started(), *(step(n, total=44_000) for n in range(10, 44_001, 10))]))
    rows = stretches_of(record.history)[1]
    assert len(rows) == 40 and (rows[0].label, rows[-1].label) == ("1 to 55", "2,146 to 2,200")
    assert {row.pairs_per_second for row in rows} == {10.0} and sum(row.seconds for row in rows) == 44_000


def test_a_run_of_one_step_shows_its_points():
    html = write_report(told([started(), step(1), evaluated(1, 0.3), finished(1)])).read_text()
    for chart in embedded(html):
        assert chart["span"] == [0.0, 1.0], "an axis of no length cannot be drawn"
        for line in chart["lines"]:
            assert line["has_dots"] is (line["look"] != "level") and line["x"], line["label"]
    assert "1 step<" in html and "1 steps" not in html


def test_lines_are_told_apart_without_colour():
    runs = [told([started(), step(1), step(2), evaluated(2, 0.3, 1.0)], f"run-{n}") for n in range(12)]
    records = [summarize(run) for run in runs]
    for chart in embedded(write_html(document_of(records), Path("all.html")).read_text()):
        dashes = [tuple(line["dash"]) for line in chart["lines"]]
        colours = [line["colour"] for line in chart["lines"]]
        assert len(set(dashes[:6])) == 6 and len(set(zip(dashes, colours, strict=True))) == 12
    html = write_report(runs[0]).read_text()
    for chart in embedded(html):
        seen = [tuple(line["dash"]) for line in chart["lines"] if line["look"] != "faint"]
        assert len(set(seen)) == len(seen), [line["label"] for line in chart["lines"]]
    assert re.search(r'stroke-dasharray="10 4".{,40}</svg>recall@10</li>', html), (
        "the key shows the dashes too"
    )


def test_cores_are_counted_from_one_and_what_was_not_read_is_not_guessed():
    text = as_markdown_of([summarize(told([started(), step(1), inspected(1, cores=[0.5, 0.25])]))])
    assert "| core 1 | 50.0% |" in text and "| core 2 | 25.0% |" in text and "core 0" not in text
    assert "| peak of the process | 100 MB |" in text, "known before the end"
    assert "Energy: not measured" in text and " J" not in text


def test_the_phases_of_the_loss_are_where_it_bends():
    def phases(name, loss_at, kind="epoch"):
        run = told([started(), *(step(n, loss_at(n)) for n in range(1, 101))], name)
        return phases_of(summarize(run).history, kind)

    steep, flat = phases("bent", lambda n: 4 - 3 * min(1.0, n / 40))  # two epochs, then three
    assert (steep.name, flat.name) == ("steep", "plateau")
    assert steep.end == pytest.approx(2.0, abs=0.25) and steep.slope == pytest.approx(-1.5, rel=0.1)
    assert [phase.name for phase in phases("straight", lambda n: 4 - n / 50)] == ["gradual"]
    ended = phases("ended", lambda n: 2.4 * 0.93**n)
    assert min(phase.loss_after for phase in ended) > 0, "a line may go on below zero, a loss does not"
    halved = phases("halved", lambda n: 8.0 - 0.3 * n if n < 20 else 2.0 - 0.0125 * (n - 20), "tenth")
    assert halved[0].name == "steep" and "plateau" not in [phase.name for phase in halved]


def test_resumes_and_pauses_are_marked():
    events = [started(), *(step(n) for n in range(1, 41)), Paused(40, "on battery"), Continued(40, 90.0)]
    events += [step(41), started(step=30), *(step(n) for n in range(31, 101)), finished(100)]
    run = told(events)
    assert "resumed once and it paused once, 1m30s in total" in summary(run)
    charts = next(s.charts for s in document_of([summarize(run)]).sections if s.charts)
    assert charts[0].marks == [(30, "resumed"), (40, "paused 1m30s"), (100, "end")]


def hostile_run() -> Run:
    bad = recall(0.5)
    events = [
        started(device=HOSTILE),
        *(step(n) for n in range(1, 31)),
        inspected(30, power_watts=5.0, power_of=HOSTILE),
        Warned(30, HOSTILE, HOSTILE, HOSTILE),
        Paused(30, HOSTILE),
        Evaluated(30, bad, True, 0.1, 1.0, "snapshots/step-000030.json"),
        Failed(HOSTILE, HOSTILE),
    ]
    run = told(events, "a<b>&'\"x", source=HOSTILE.replace("\x07", ""), steps=30)
    reasons = {"source": HOSTILE, "lr": HOSTILE}
    facts = {
        **dict.fromkeys(("chip", "system", "data"), HOSTILE),
        "reasons": reasons,
        "versions": {HOSTILE: HOSTILE},
    }
    (run.path / "machine.json").write_text(json.dumps(facts | {"commit": "half \ud800 a character"}))
    pictures = run.path / "snapshots" / "pictures"
    pictures.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(pictures / "1.jpg")
    Path("secret.jpg").write_bytes(b"\xff\xd8\xffsecret of another folder")
    outside = ["../../../secret.jpg", str(Path("secret.jpg").resolve()), "../config.toml", "none.jpg"]
    found = [{"picture": name, "score": 0.5, "is_right": True} for name in ("pictures/1.jpg", *outside)]
    snapshot = {"step": 30, "queries": [{"text": HOSTILE, "rank": 2, "found": found}]}
    (run.path / "snapshots" / "step-000030.json").write_text(json.dumps(snapshot))
    return run


def test_no_text_of_a_run_becomes_part_of_the_page():
    run = hostile_run()
    html = write_report(run).read_text()
    page = Looked(html)
    assert page.tags.count("script") == 3, "the charts' data, uPlot, and ours"
    assert page.handlers == [] and page.loads == []
    assert page.tags.count("img") == 1, "only the image that lies in the run"
    assert "<script>alert" not in html and "\u202e" not in html and "alert(1)" in page.text
    assert "secret of another" not in html and "c2VjcmV0" not in html
    both = [summarize(run), summarize(told([started(), step(1)], "plain"))]
    page = Looked(write_html(document_of(both), Path("both.html")).read_text())
    assert page.tags.count("script") <= 3 and page.handlers == [] and page.loads == []


def test_settings_that_are_unknown_damaged_or_elsewhere_break_no_report(call):
    run = told([started(), step(1)])
    config = run.path / "config.toml"
    config.write_text('[train]\nwarp = 9\n[data]\nsource = "synthetic"\n')
    done = call("report", "told", "--markdown")
    assert done.returncode == 0 and "| warp | 9 | a setting of another version |" in done.stdout
    config.write_text("not = = toml")
    assert "could not be read" in write_report(run).read_text()
    Path("private.toml").write_text('[data]\nsource = "a secret of another folder"\n')
    config.unlink()
    config.symlink_to(Path("private.toml").resolve())
    html = write_report(run).read_text()
    assert "secret" not in html and "could not be read" in html


@pytest.mark.parametrize("made", ["too large", "a pipe", "a linked folder", "a circle"])
def test_a_snapshot_that_is_no_small_file_of_the_run_is_left_out(made):
    run = hostile_run()
    snapshots, path = run.path / "snapshots", run.path / "snapshots" / "step-000030.json"
    snapshot = f"snapshots/{path.name}"
    assert read_queries(run.path, snapshot)
    match made:
        case "too large":
            path.write_text(path.read_text() + " " * (9 * MEGABYTE))
        case "a pipe":
            path.unlink()
            os.mkfifo(path)
        case "a linked folder":
            snapshots.rename("elsewhere")
            snapshots.symlink_to(Path("elsewhere").resolve())
        case "a circle":
            path.unlink()
            path.symlink_to(path.name)
    read: list = []
    reading = threading.Thread(target=lambda: read.append(read_queries(run.path, snapshot)), daemon=True)
    reading.start()
    reading.join(timeout=30)
    assert read == [[]]


def test_markdown_tables_have_as_many_cells_in_every_row():
    for make in (hostile_run, lambda: told([started(), *(step(n) for n in range(1, 101)), finished(100)])):
        text = as_markdown_of([summarize(make())])
        lines = text[: text.index("```toml")].splitlines()
        tables = [
            list(rows)
            for is_row, rows in itertools.groupby(lines, lambda line: line.startswith("|"))
            if is_row
        ]
        assert len(tables) >= 4
        assert all(len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1 for rows in tables)
        assert not [line for line in lines if "<script>" in re.sub(r"\\<|`[^`]*`", "", line)]


def broken_pieces() -> dict:
    whole = [started(), *(step(n) for n in range(1, 31)), evaluated(30, 0.3), inspected(30), finished(30)]
    norms = dict.fromkeys(("image.0", "image.1", "text.0"), 1.7e308)
    mad = replace(inspected(30), grad_norms=norms, memory_peak=2**63 - 1, memory_limit=0)
    text = "".join(map(to_line, whole))
    found = {
        "no events": "",
        "only started": to_line(started()),
        "garbage, torn": "\x00\xff not json\n[1,2]\n" + text[:-200],
        "wrong kinds": text.replace('"loss":1.0', '"loss":"x"').replace('"recall@1":0.3', '"recall@1":null'),
        "empty recall": text.replace('"text_to_image"', '"other"'),
        "not finite": text.replace('"grad_norm":1.0', '"grad_norm":NaN').replace('"loss":null', '"loss":Infinity'),
        "odd inspection": text.replace('"readings":{}', '"readings":{"cores":"x","power_watts":"y"}'),
        "bare inspection": re.sub(r'"(parts|grad_norms)":{.*?}', r'"\1":{}', text),
        "steps that stand still": to_line(started()) + 30 * to_line(step(7)) + to_line(finished(7)),
        "steps of number 0": to_line(started()) + 30 * to_line(step(0)),
        "steps backwards": "".join(map(to_line, [started(), *whole[30:0:-1]])),
        "mad numbers": [started(), *(step(n * 2**57, (-1) ** n * 1e30) for n in range(1, 31)), mad],
        "no steps": [started(), *whole[31:]],
    }  # fmt: skip
    return {name: one if isinstance(one, str) else "".join(map(to_line, one)) for name, one in found.items()}


MACHINES = (
    "", "[1]", '{"reasons": 3, "versions": [], "caches": 1, "bench": 2}', '{"bench": {"pairs_per_second": -5}}',
)  # fmt: skip


@pytest.mark.parametrize(
    ("what", "machine"), list(zip(broken_pieces(), itertools.cycle(MACHINES), strict=False))
)
def test_a_broken_run_gives_a_shorter_report_and_no_traceback(what, machine, call):
    run = told([])
    (run.path / "events.jsonl").write_text(broken_pieces()[what], encoding="utf-8")
    (run.path / "machine.json").write_text(machine)
    for flags in ((), ("--markdown",), ("--json",)):
        done = call("report", "told", *flags)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr and "NaN" not in done.stdout


def test_the_page_of_many_hours_is_hardly_larger_than_that_of_one():
    """Time is not measured, machines are busy; what is kept of the events, and shown of that, is."""
    first = json.loads(to_line(step(1)))
    sizes = []
    for num_steps in (5000, 20_000):
        run = told([], f"long-{num_steps}")
        with (run.path / "events.jsonl").open("w") as file:
            file.write(to_line(started(num_train=10**6)))
            for n in range(1, num_steps + 1):
                now = {
                    "step": n,
                    "loss": 1 + 100 / n,
                    "epoch": n / 100,
                    "seconds": n / 2,
                    "progress": n / num_steps,
                }
                file.write(json.dumps(first | now) + "\n")
                if n % 100 == 0:
                    file.write(to_line(inspected(n, cores=[0.5] * 8)) + to_line(evaluated(n, 0.3, 1.0)))
        record = summarize(run)
        assert max(len(record.history.steps), len(record.history.energy)) <= 2001
        charts = embedded(write_html(document_of([record]), Path("long.html")).read_text())
        assert all(len(line["x"]) <= 601 for chart in charts for line in chart["lines"])
        sizes.append(Path("long.html").stat().st_size)
    assert max(sizes) < MEGABYTE and sizes[1] < 1.25 * sizes[0]


@pytest.mark.slow
def test_a_browser_draws_every_chart_at_any_width_without_complaint(run):
    def check(page):
        values = page.locator(".u-legend .u-value").all_inner_texts()
        assert values and all(map(str.strip, values)) and "--" not in values, (
            "the last ones, before anything is pointed at"
        )
        axes = page.evaluate("Array.from(document.querySelectorAll('canvas'), (canvas) => canvas.labels)")
        assert all(len(set(axis)) == len(axis) > 0 for axis in axes), f"labels are repeated: {axes}"
        ends = [section.bounding_box() for section in page.locator("section").all()]
        assert max(box["x"] + box["width"] for box in ends) > 0.9 * page.viewport_size["width"]
        num_charts = page.locator("figure.chart").count()
        assert num_charts == page.locator("figure.live canvas").count() > 0
        assert page.locator(".u-legend svg.key").count() >= num_charts, "lines are keyed by their dashes too"

    check_in_browser(write_report(run), check)
    steps = [step(n, temperature=0.07 - n * 1e-7, lr=0.1 + n * 1e-4) for n in range(1, 30)]
    close = told([started(), *steps], "close")
    check_in_browser(write_report(close), check)
    both = [summarize(run), summarize(close)]
    check_in_browser(write_html(document_of(both), Path("both.html")), check)
