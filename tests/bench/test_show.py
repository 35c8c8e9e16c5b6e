"""What `lapclip bench` draws: nothing measured is missing from it, and the page is safe to open and to send."""

import re

import pytest
from markupsafe import escape

from lapclip.autotune.plans import Candidate, Measured
from lapclip.bench.show import Result, log_charts, steps_ranges, write_page
from lapclip.config import Plan
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
MEASURED = Measured(CANDIDATES, when=0.0, drift=0.12)


def test_every_candidate_is_drawn_with_its_speed_or_the_reason_against_it():
    ranges = steps_ranges(MEASURED, FASTEST.plan).ranges
    said = " ".join(map(str, ranges))
    for candidate in CANDIDATES[:2]:
        assert candidate.plan.in_words() in said
    assert said.count("chosen") == 1


def test_a_page_needs_nothing_beside_itself_and_survives_hostile_names(tmp_path):
    plan = Plan(HOSTILE, "fp32", 2, 128)
    other = Candidate(Plan("cpu", "fp32", 1, 8), rejected=HOSTILE)
    charts = log_charts(HOSTILE, 2, [(HOSTILE, HOSTILE, 512.0, 1e-3)])
    table = Table(HOSTILE, {HOSTILE: "text"}, [(HOSTILE,), ("\x1b[2J\x00",)])
    ranges = steps_ranges(Measured((Candidate(plan, 10.0), other), 0.0), plan)
    section = Section("part", tables=[table], charts=charts, ranges=[ranges])
    write_page(tmp_path / "bench.html", [Result({}, section)], [HOSTILE])
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
