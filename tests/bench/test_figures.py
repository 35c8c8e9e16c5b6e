"""What `lapclip bench` draws: nothing measured is missing from it, and the page is safe to open and to send."""

import itertools
import re
import sys

import pytest
from markupsafe import escape
from PIL import Image

from lapclip.autotune.plans import Candidate, Measured
from lapclip.bench.figures import draw_ops, draw_sizes, draw_steps
from lapclip.bench.ops import OpTiming
from lapclip.bench.show import Result, log_charts, steps_ranges, write_out
from lapclip.bench.sizes import SizeResult
from lapclip.cli.bench import bench
from lapclip.config import Plan
from lapclip.errors import UserError, install_command
from lapclip.view.document import Section, Table

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


def texts(figure) -> str:
    """Everything a chart says; lines that were wrapped are one again."""
    from matplotlib.text import Text

    return " ".join(" ".join(text.get_text() for text in figure.findobj(Text)).split())


def written(path, *figures) -> bytes:
    write_out(path, [Result({}, Section("part"), lambda drawn=drawn: drawn) for drawn in figures], [])
    return path.read_bytes()


def test_every_candidate_is_drawn_with_its_speed_or_the_reason_against_it():
    said = texts(draw_steps(MEASURED, FASTEST.plan, "tiny"))
    for candidate in CANDIDATES:
        assert candidate.plan.in_words() in said
        assert (candidate.rejected or "") in said
    assert "812" in said and said.count("chosen") == 1
    assert "2,980 \N{PLUS-MINUS SIGN} 5%, chosen" in said
    assert "not timed" in said and "12% slower" in said


def test_a_page_needs_nothing_beside_itself_and_survives_hostile_names(tmp_path, monkeypatch):
    plan = Plan(HOSTILE, "fp32", 2, 128)
    other = Candidate(Plan("cpu", "fp32", 1, 8), rejected=HOSTILE)
    charts = log_charts(HOSTILE, 2, [(HOSTILE, HOSTILE, 512.0, 1e-3)])
    table = Table(HOSTILE, {HOSTILE: "text"}, [(HOSTILE,), ("\x1b[2J\x00",)])
    ranges = steps_ranges(Measured((Candidate(plan, 10.0), other), 0.0, 1.0), plan)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # which only images need
    section = Section("part", tables=[table], charts=charts, ranges=[ranges])
    write_out(tmp_path / "bench.html", [Result({}, section, pytest.fail)], [HOSTILE])
    page = (tmp_path / "bench.html").read_text()
    own, data = (
        re.findall(r"<script>.*?</script>", page, re.DOTALL),
        r'<script type="application/json">.*?</script>',
    )
    text = re.sub(data, "", page.replace(own[0], "").replace(own[1], ""), flags=re.DOTALL)
    assert len(own) == 2 and not re.search(r"https?:|<script|@import|src=|url\(", text, re.IGNORECASE)
    assert not re.search(r"[\x00-\x08\x1b]", page)
    assert (
        page.count(escape(HOSTILE)) >= 8
    )  # of the machine, the table's caption, header and cell, plan and charts


def test_a_png_holds_all_figures_and_is_wide_enough_to_read(tmp_path):
    path = tmp_path / "bench.PNG"
    steps = draw_steps(MEASURED, FASTEST.plan, "tiny")
    sizes = []
    for figures in ([steps], [steps, draw_ops(TIMINGS), draw_sizes(SIZES)]):
        written(path, *figures)
        with Image.open(path) as image:
            image.load()
            sizes.append(image.size)
    assert sizes[0][0] == sizes[1][0] >= 800 and sizes[1][1] > sizes[0][1]
    assert [file.name for file in tmp_path.iterdir()] == ["bench.PNG"]


def test_words_stay_inside_the_image_and_off_one_another():
    long = Candidate(Plan("cpu", "fp32", 64, 1024, True, False), rejected="a long reason " * 30)
    steps = draw_steps(Measured((*CANDIDATES, long, long), 0.0, 1.0), FASTEST.plan, "a title " * 40)
    devices = [timing(device, "attention", 512, 1e-3) for device in ("cpu", "mps", HOSTILE)]
    ops = draw_ops([*TIMINGS, *devices])
    sizes = draw_sizes(SIZES)
    for figure, place in [(steps, 0), (ops, -1), (ops, 0), (sizes, 0)]:
        axes = figure.axes[place]
        figure.draw_without_rendering()
        words = [*axes.texts, axes.title]
        if figure is steps or axes is ops.axes[-1]:  # elsewhere labels outside the axes are never drawn
            words += axes.get_yticklabels()
        boxes = [text.get_window_extent() for text in words if text.get_text()]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_an_estimate_is_marked_by_words_and_by_a_hollow_dashed_line():
    huge = size_result("huge", 10**9, "cpu", 0.5, is_estimate=True)
    measured, estimated = draw_sizes(SIZES), draw_sizes([*SIZES, huge])
    assert "estimated" not in texts(measured) and "estimated, not measured" in texts(estimated)
    dashed = [line for line in estimated.axes[0].lines if line.get_linestyle() == "--"]
    assert [line.get_markerfacecolor() for line in dashed] == ["#ffffff"]
    assert not [line for line in measured.axes[0].lines if line.get_linestyle() == "--"]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for attempt in (
        lambda: written(tmp_path / "b.png", draw_sizes(SIZES)),
        lambda: bench(out=tmp_path / "b.png"),
    ):
        with pytest.raises(UserError, match="charts need matplotlib, which is not installed") as error:
            attempt()
        assert error.value.hint == install_command("plot")


def test_a_persons_own_settings_of_matplotlib_neither_change_the_image_nor_are_changed(tmp_path):
    import matplotlib

    usual = written(tmp_path / "usual.png", draw_sizes(SIZES))
    with matplotlib.rc_context({"font.size": 31, "axes.facecolor": "black"}):
        assert written(tmp_path / "own.png", draw_sizes(SIZES)) == usual
        assert matplotlib.rcParams["font.size"] == 31
