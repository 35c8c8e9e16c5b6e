"""What `lapclip bench` draws: nothing measured is missing from it, and the page is safe to open and to send."""

import itertools
import os
import re
import subprocess
import sys
from html import escape
from xml.etree import ElementTree

import pytest
from PIL import Image

from lapclip.autotune.results import Candidate, Measured
from lapclip.bench.figures import draw_ops, draw_sizes, draw_steps
from lapclip.bench.lines import overtakes
from lapclip.bench.ops import OpTiming
from lapclip.bench.page import Table, check_image, write_image
from lapclip.bench.paper import duration
from lapclip.bench.sizes import SizeResult
from lapclip.errors import UserError
from lapclip.step.step import Plan

pytestmark = pytest.mark.slow

HOSTILE = "<script>alert('$x$ & \"y\"')</script>"
FASTEST = Candidate(Plan("mps", "fp16", 4, 128), 2980.0, 0.05)
CANDIDATES = (
    Candidate(Plan("cpu", "fp32", 2, 128), 812.3, 0.02),
    FASTEST,
    Candidate(Plan("mps", "bf16", 4, 128), rejected="gradients differ by 3% from the processor's"),
    Candidate(Plan("cpu", "fp32", 2, 64, compile=True), 3.2, None, rejected="takes > 4 times as long"),
    Candidate(Plan("cpu", "bf16", 1, 64, keep_memory=False)),
)
MEASURED = Measured(CANDIDATES, when=0.0, seconds=60.0, drift=0.12)


def timing(device: str, op: str, size: int, seconds: float) -> OpTiming:
    return OpTiming(device, op, size, seconds, 1e-6, 2e-3, 4e-6, seconds, 0.0, 10)


def size_result(
    size: str, num_parameters: int, device: str, pairs: float, *, is_estimate=False
) -> SizeResult:
    return SizeResult(size, num_parameters, device, 256, 64, pairs, 0.02, 10**9, 60.0, is_estimate)


TIMINGS = [
    *(timing("mps", "matmul", size, 1e-4) for size in (64, 256, 1024)),
    *(timing("cpu", "matmul", size, size * 1e-6) for size in (64, 256, 1024)),
    timing("cpu", "gelu", 256, 3e-5),
]
SIZES = [
    size_result("nano", 10**6, "cpu", 400.0),
    size_result("small", 77 * 10**6, "cpu", 5.0),
    size_result("nano", 10**6, "mps", 200.0),
    size_result("small", 77 * 10**6, "mps", 50.0),
]


def text_of(page: str) -> str:
    """What a reader of the page sees, in a row; lines that were wrapped are one again."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def written(path, *figures, tables=(), title="bench"):
    write_image(path, list(figures), title=title, tables=list(tables))
    return path.read_text()


def test_every_candidate_stands_in_the_page_with_its_speed_or_the_reason_against_it(tmp_path):
    page = text_of(written(tmp_path / "bench.html", draw_steps(MEASURED, FASTEST.plan, "tiny")))
    for candidate in CANDIDATES:
        assert candidate.plan.in_words() in page
        assert escape(candidate.rejected or "", quote=False) in page
    assert "812" in page and page.count("chosen") == 1
    assert "2,980 \N{PLUS-MINUS SIGN} 5%, chosen" in page
    assert "not timed" in page and "12% slower" in page


def test_a_page_needs_nothing_beside_itself_and_survives_hostile_names(tmp_path):
    plan = Plan(HOSTILE, "fp32", 2, 128)
    steps = draw_steps(
        Measured((Candidate(plan, 10.0), Candidate(Plan("cpu", "fp32", 1, 8), rejected=HOSTILE)), 0.0, 1.0),
        plan,
        HOSTILE,
    )
    figures = [
        steps,
        draw_ops([timing(HOSTILE, HOSTILE, 512, 1e-3)]),
        draw_sizes([size_result(HOSTILE, 10**6, HOSTILE, 4.0)]),
    ]
    table = Table(HOSTILE, (HOSTILE,), [(HOSTILE,), ("\x1b[2J\x00",)])
    page = written(tmp_path / "bench.html", *figures, tables=[table], title=HOSTILE)
    assert "http" not in page and "<script" not in page.lower() and "<!ENTITY" not in page
    assert not re.search(r"[\x00-\x08\x1b]", page)
    assert page.count(escape(HOSTILE)) >= 5  # the title twice, the table's caption, header and cell
    for reference in re.findall(r'(?:href="|url\()([^")]*)', page):
        assert reference.startswith("#")
    ids = re.findall(r'<[^>]*\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert "src=" not in page and "@import" not in page


def test_a_page_tells_the_machine_and_every_cell_of_its_tables(tmp_path):
    table = Table("speeds", ("plan", "pairs/s"), [("one & two", "12"), ("three", "<13>")])
    page = text_of(written(tmp_path / "bench.html", draw_sizes(SIZES), tables=[table]))
    for said in (
        "speeds",
        "plan",
        "pairs/s",
        "one &amp; two",
        "12",
        "three",
        "&lt;13&gt;",
        "cores",
        "memory",
        "chip",
    ):
        assert said in page


@pytest.mark.parametrize("num_candidates", [1, 12])
def test_a_png_holds_all_figures_and_is_wide_enough_to_read(tmp_path, num_candidates):
    many = tuple(
        Candidate(Plan("cpu", "fp32", number + 1, 64), 100.0 * (number + 1), 0.1)
        for number in range(num_candidates)
    )
    steps = draw_steps(Measured(many, 0.0, 1.0), many[0].plan, "many plans")
    path = tmp_path / "bench.PNG"
    write_image(path, [steps], title="bench", tables=[])
    with Image.open(path) as one:
        one.load()
    write_image(path, [steps, draw_ops(TIMINGS), draw_sizes(SIZES)], title="bench", tables=[])
    with Image.open(path) as all_three:
        all_three.load()
    assert one.width == all_three.width >= 800
    assert all_three.height > one.height
    assert [file.name for file in tmp_path.iterdir()] == ["bench.PNG"]


def test_words_stay_inside_the_image_and_off_one_another():
    long = Candidate(Plan("cpu", "fp32", 64, 1024, True, False), rejected="a long reason " * 30)
    steps = draw_steps(Measured((*CANDIDATES, long, long), 0.0, 1.0), FASTEST.plan, "a title " * 40)
    devices = [timing(device, "attention", 512, 1e-3) for device in ("cpu", "mps", HOSTILE)]
    ops = draw_ops([*TIMINGS, *devices])
    sizes = draw_sizes(SIZES)
    for figure, axes in [
        (steps, steps.axes[0]),
        (ops, ops.axes[-1]),
        (ops, ops.axes[0]),
        (sizes, sizes.axes[0]),
    ]:
        figure.draw_without_rendering()
        words = [*axes.texts, axes.title]
        if figure is steps or axes is ops.axes[-1]:  # elsewhere labels outside the axes are never drawn
            words += axes.get_yticklabels()
        boxes = [text.get_window_extent() for text in words if text.get_text()]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_an_estimate_is_marked_by_words_and_by_a_hollow_dashed_line(tmp_path):
    huge = size_result("huge", 10**9, "cpu", 0.5, is_estimate=True)
    measured, estimated = draw_sizes(SIZES), draw_sizes([*SIZES, huge])
    assert "estimated" not in text_of(written(tmp_path / "measured.html", measured))
    assert "estimated, not measured" in text_of(written(tmp_path / "estimated.html", estimated))
    dashed = [line for line in estimated.axes[0].lines if line.get_linestyle() == "--"]
    hollow = [line for line in estimated.axes[0].lines if line.get_markerfacecolor() == "#ffffff"]
    assert len(dashed) == len(hollow) == 1
    assert not [line for line in measured.axes[0].lines if line.get_linestyle() == "--"]


def test_where_an_accelerator_overtakes_the_processor_is_said(tmp_path):
    assert "mps is ahead from 256 on" in text_of(written(tmp_path / "ops.html", draw_ops(TIMINGS)))
    assert "mps is ahead from small on" in text_of(written(tmp_path / "sizes.html", draw_sizes(SIZES)))
    guessed = [*SIZES[:3], size_result("small", 77 * 10**6, "mps", 50.0, is_estimate=True)]
    assert "from small on, by estimate" in text_of(written(tmp_path / "guessed.html", draw_sizes(guessed)))
    only = [result for result in SIZES if result.device == "cpu"]
    assert "ahead" not in text_of(written(tmp_path / "only.html", draw_sizes(only)))


def test_a_device_has_overtaken_only_where_it_stays_ahead():
    processor = [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)]
    assert overtakes(processor, [(1.0, 0.5), (2.0, 9.0), (3.0, 1.0), (4.0, 1.0)]) == 3.0
    assert overtakes(processor, [(1.0, 0.5), (4.0, 9.0)]) is None
    assert overtakes(processor, [(5.0, 0.1)]) is None
    assert overtakes([], processor) is None


def test_an_svg_is_one_figure_with_its_text_as_text(tmp_path):
    svg = written(tmp_path / "steps.svg", draw_steps(MEASURED, FASTEST.plan, "tiny"))
    words = " ".join(ElementTree.fromstring(svg).itertext())
    assert FASTEST.plan.in_words() in words
    with pytest.raises(UserError, match="holds one") as error:
        written(tmp_path / "two.svg", draw_sizes(SIZES), draw_ops(TIMINGS))
    assert "two.html" in error.value.hint


@pytest.mark.parametrize("name", ["bench.jpg", "bench", ".png", "bench.html.gz"])
def test_an_unknown_ending_is_refused_with_the_ones_that_are_known(tmp_path, name):
    with pytest.raises(UserError) as error:
        check_image(tmp_path / name)
    assert all(ending in error.value.message for ending in ("`.png`", "`.svg`", "`.html`"))
    assert ".html" in error.value.hint


def test_what_could_not_be_written_is_refused_before_anything_is_measured(tmp_path):
    check_image(tmp_path / "fine.png", num_figures=3)
    with pytest.raises(UserError, match="there is no folder"):
        check_image(tmp_path / "none" / "bench.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        check_image(tmp_path / "folder.png")
    with pytest.raises(UserError, match="holds one"):
        check_image(tmp_path / "bench.svg", num_figures=2)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_said_in_words_and_leaves_the_old_image(tmp_path):
    path = tmp_path / "bench.html"
    path.write_text("old")
    (tmp_path / ".bench.html.writing").symlink_to("/dev/full")
    with pytest.raises(UserError, match="no space left"):
        written(path, draw_sizes(SIZES))
    assert path.read_text() == "old"


def test_without_matplotlib_the_way_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for attempt in (lambda: check_image(tmp_path / "bench.png"), lambda: draw_sizes(SIZES)):
        with pytest.raises(UserError, match="images need matplotlib, which is not installed") as error:
            attempt()
        assert error.value.hint == "pip install 'lapclip[plot]'"


def test_a_persons_own_settings_of_matplotlib_neither_change_the_image_nor_are_changed(tmp_path):
    import matplotlib

    usual = written(tmp_path / "usual.html", draw_sizes(SIZES))
    with matplotlib.rc_context({"font.size": 31, "axes.facecolor": "black", "svg.fonttype": "path"}):
        own = written(tmp_path / "own.html", draw_sizes(SIZES))
        assert matplotlib.rcParams["font.size"] == 31
    assert text_of(own) == text_of(usual) and len(own) == len(usual)


def test_drawing_is_quiet_where_the_home_folder_cannot_be_written_to(tmp_path):
    program = (
        "from lapclip.bench.page import check_picture; from pathlib import Path; check_picture(Path('a.png'))"
    )
    environment = {
        **os.environ,
        "HOME": "/dev/null",
        "MPLCONFIGDIR": "/dev/null/x",
        "XDG_CACHE_HOME": "/dev/null",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(2.5e-6, "2.5 us"), (3.2e-4, "320 us"), (0.08, "80 ms"), (12.0, "12 s"), (0.0, "0.0 us")],
)
def test_a_duration_is_said_in_the_unit_that_suits_it(seconds, words):
    assert duration(seconds) == words
