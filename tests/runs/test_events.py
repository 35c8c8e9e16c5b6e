"""Reading events: whatever happens to the file, a reader goes on, loses nothing, doubles nothing and stays small."""

import dataclasses
import json
import math
import os
import random
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from made_events import ONE_OF_EACH, step

from lapclip.runs.events import (
    KINDS,
    KINDS_OF_MEMORY,
    MAX_LINE,
    PARTS,
    Evaluated,
    Failed,
    Finished,
    Follower,
    Inspected,
    Interpolated,
    Started,
    Step,
    Warned,
    from_line,
    read_events,
    to_line,
)


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "events.jsonl"


def steps(events) -> list[int]:
    return [event.step for event in events]


def lines(numbers) -> bytes:
    return b"".join(to_line(step(number)).encode() for number in numbers)


def append(file: Path, content: bytes) -> None:
    with file.open("ab") as out:
        out.write(content)


def test_every_kind_of_event_reads_back_as_it_was():
    assert {type(event) for event in ONE_OF_EACH} == set(KINDS.values())
    for event in ONE_OF_EACH:
        assert from_line(to_line(event)) == event


def test_a_step_is_written_with_seven_digits():
    exact = step(1, loss=1 / 3, seconds=12345.678912, lr=1e-7 / 3)
    read = from_line(to_line(exact))
    assert (read.loss, read.lr) == pytest.approx((exact.loss, exact.lr), rel=1e-7)
    assert read.seconds == 12345.679
    assert len(to_line(exact)) < len(json.dumps(dataclasses.asdict(exact))) + 60


def test_what_came_later_may_be_missing():
    """A run of an earlier version is read with the defaults of today; the time of an event is never now."""
    old = json.loads(to_line(ONE_OF_EACH[3]))
    for name in ("loss", "snapshot"):
        del old[name]
    del old["recall"]["negatives"]
    event = from_line(json.dumps(old))
    assert event.loss is None and event.snapshot is None and "negatives" not in event.recall
    del old["time"]
    assert from_line(json.dumps(old)) is None


# the file


def test_a_torn_last_line_counts_once_it_is_whole(file):
    follower, whole = Follower(file), lines([1, 2])
    assert steps(follower.new()) == [], "it is not there yet"
    file.write_bytes(whole[:-20])
    assert steps(follower.new()) == [1]
    assert steps(follower.new()) == []
    append(file, whole[-20:])
    assert steps(follower.new()) == [2]


def overwrite(file: Path) -> None:
    """The same inode, and longer than what had been read: only its content tells."""
    with file.open("r+b") as out:
        out.truncate()
        out.write(lines(range(100, 110)))


def cut_and_grow(file: Path) -> None:
    with file.open("r+b") as out:
        out.truncate(len(lines([1])))
        out.seek(0, os.SEEK_END)
        out.write(to_line(Warned(2, "x" * 2000, "y")).encode())


def replace_file(file: Path) -> None:
    file.unlink()
    file.write_bytes(lines([5, 6, 7, 8]))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda file: file.write_bytes(lines([1])), [1]),
        (overwrite, list(range(100, 110))),
        (cut_and_grow, [1, 2]),
        (replace_file, [5, 6, 7, 8]),
    ],
    ids=["cut short", "overwritten", "cut in the middle", "replaced"],
)
def test_a_file_that_is_no_longer_the_same_is_read_from_its_start(file, change, found):
    file.write_bytes(lines([1, 2, 3]))
    follower = Follower(file)
    assert steps(follower.new()) == [1, 2, 3]
    change(file)
    assert steps(follower.new()) == found and follower.num_restarts == 1
    file.rename(file.with_suffix(".old"))
    assert steps(follower.new()) == []


def test_leaving_off_in_the_middle_loses_and_doubles_nothing(file):
    file.write_bytes(lines(range(5)))
    follower = Follower(file)
    assert next(follower.new()).step == 0
    assert steps(follower.new()) == [1, 2, 3, 4]
    assert list(read_events(file.parent)) == [], "a folder is no file"


@pytest.mark.parametrize("seed", range(3))
def test_random_portions_and_random_garbage_lose_and_double_no_event(file, seed):
    rng = random.Random(seed)
    numbers, content = list(range(60)), b""
    for number in numbers:
        content += lines([number])
        if rng.random() < 0.3:
            content += rng.randbytes(rng.randrange(2000)).replace(b"\n", b"") + b"\n"
    file.write_bytes(b"")
    follower, found, at = Follower(file), [], 0
    while at < len(content):
        size = rng.choice([1, 7, 100, 3000])
        append(file, content[at : at + size])
        at += size
        found += steps(follower.new())
    assert found == numbers and follower.num_restarts == 0


# its size


def measured(read) -> tuple[int, float]:
    """Most bytes held at once, and seconds without the bookkeeping of that."""
    tracemalloc.start()
    read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    started = time.process_time()
    read()
    return peak, time.process_time() - started


def test_a_huge_file_without_a_line_is_passed_over_in_little_memory(file):
    """What a full disk or a lost power line leaves: 300 MB of nothing, then events again."""
    with file.open("wb") as out:
        out.write(lines([1]))
        out.truncate(300 << 20)
    append(file, b"x" * (3 << 20))
    follower = Follower(file)
    peak, seconds = measured(lambda: steps(Follower(file).new()))
    assert peak < 16 << 20 and seconds < 5
    assert steps(follower.new()) == [1]
    started = time.process_time()
    assert steps(follower.new()) == [] and time.process_time() - started < 0.1, "it is not read again"
    append(file, b" the end of it" + lines([2])[:-1] + b"\n" + lines([3]))
    assert steps(follower.new()) == [3] and follower.num_restarts == 0


def test_five_megabytes_of_events_are_read_in_little_memory_and_time(file):
    num_lines = 15_000
    file.write_bytes(lines([1]) * num_lines)
    assert file.stat().st_size > 4e6
    peak, seconds = measured(lambda: steps(read_events(file)))
    assert steps(read_events(file)) == [1] * num_lines and peak < 16 << 20
    assert num_lines / seconds > 20_000, "300,000 lines a second on a processor that nobody else uses"


def test_a_line_too_long_for_an_event_is_passed_over_and_the_next_one_is_not(file):
    long = to_line(Warned(1, "x" * (MAX_LINE * 3), "y")).encode()
    file.write_bytes(lines([1]) + long + lines([2]) + b"\n" * 1000 + lines([3]))
    assert steps(read_events(file)) == [1, 2, 3]


# its lines


@pytest.mark.parametrize(
    "line",
    [
        b"", b"null", b"[]", b'"Step"', b"{}", b"\x00" * 100, b"\xff\xfe{\x00}\x00", b"\xed\xa0\x80", random.Random(1).randbytes(1000),
        b"[" * 100_000, b'{"a":' * 100_000, b'{"version":1,"event":' + b"[" * 50_000, b"9" * 10_000,
        b'{"version":1,"event":"Step"}', b'{"version":1,"event":["Step"]}', b'{"version":1,"event":{}}',
        b'{"version":2,"event":"Failed","time":1.0,"message":"a","hint":"b"}',
        b'{"event":"Failed","time":1.0,"message":"a","hint":"b"}',
    ],
    ids=lambda line: repr(line[:20]),
)  # fmt: skip
def test_a_line_that_is_no_event_is_passed_over(file, line):
    file.write_bytes(lines([1]) + line + b"\n" + lines([2]))
    assert steps(read_events(file)) == [1, 2]


MAD = ["x", [], {}, None, True, "nan", float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)]


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=lambda event: type(event).__name__)
def test_no_value_of_a_wrong_kind_gets_through(event):
    """Either the line is passed over, or what comes out can be shown like any other."""
    good = json.loads(to_line(event))
    for name in set(good) - {"version", "event"}:
        for value in MAD:
            found = from_line(json.dumps(good | {name: value}))
            assert found is None or is_sound(found), (name, value)


def test_no_broken_part_of_a_nested_value_gets_through():
    for event in (ONE_OF_EACH[2], ONE_OF_EACH[3], ONE_OF_EACH[8]):
        for path in paths(json.loads(to_line(event))):
            for value in [*MAD, ...]:
                record = json.loads(to_line(event))
                change(record, path, value)
                found = from_line(json.dumps(record))
                assert found is None or is_sound(found), (path, value)


def paths(value, before=()):
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*before, name)
            yield from paths(inner, (*before, name))


def change(record: dict, path: tuple, value) -> None:
    for name in path[:-1]:
        record = record[name]
    if value is ...:
        del record[path[-1]]
    else:
        record[path[-1]] = value


def is_sound(event) -> bool:
    """Whether a view that trusts the classes and the contract gets what it expects."""
    assert "NaN" not in to_line(event) and "Infinity" not in to_line(event)
    time.gmtime(event.time + getattr(event, "seconds_left", 0))
    for name in ("step", "num_pairs_seen", "bytes", "pid"):
        assert type(getattr(event, name, 0)) is int and 0 <= getattr(event, name, 0) < 2**63
    match event:
        case Step():
            assert math.isfinite(event.loss + event.grad_norm + 1 / event.temperature)
            assert 0 <= event.progress <= 1
        case Started():
            assert 1 / event.batch_size and 1 / event.num_train and event.device.upper()
        case Inspected():
            assert tuple(event.parts) == PARTS and sum(event.parts.values()) >= 0
            assert tuple(event.memory) == KINDS_OF_MEMORY
            assert all(norm >= 0 for norm in event.grad_norms.values())
            assert all(0 <= share <= 1 for share in event.readings.get("cores", []))
            assert all(math.isfinite(event.readings.get(name, 0)) for name in ("power_watts", "temperature"))
            assert type(event.readings.get("power_of", "")) is str
        case Evaluated():
            assert check_recall(event.recall)
            assert event.snapshot is None or event.snapshot.startswith("snapshots/")
            assert event.general is None or check_recall(event.general)
        case Interpolated():
            general = event.recall if event.general is None else event.general
            assert event.place < len(event.alphas) == len(event.recall) == len(general)
            assert all(map(check_recall, [*event.recall, *general]))
        case Finished():
            assert event.recall is None or check_recall(event.recall)
        case Warned() | Failed():
            assert event.message.upper() and event.hint.upper()
    return True


def check_recall(recall: dict) -> bool:
    for way in ("text_to_image", "image_to_text"):
        low, high = recall[way]["interval@10"]
        assert 0 <= low <= 1 and 0 <= high <= 1 and math.isfinite(recall[way]["median_rank"])
        assert all(0 <= recall[way][f"{what}@{k}"] <= 1 for what in ("recall", "chance") for k in (1, 5, 10))
    assert len(f"{recall['num_images']:,} {recall['num_captions']:,} {recall['in_batch']['accuracy']:.1%}")
    negatives = recall.get("negatives")
    return not negatives or all(0 <= negatives[n] <= 1 for n in ("easy", "medium", "hard", "chance"))


def test_a_finished_run_is_finished_even_with_a_broken_recall():
    record = json.loads(to_line(ONE_OF_EACH[8])) | {"recall": {"num_images": 3}}
    event = from_line(json.dumps(record))
    assert isinstance(event, Finished) and event.recall is None


def test_words_cannot_steer_a_terminal_or_break_a_page():
    event = from_line(to_line(Failed("\x1b[2J\x07 gone\x00\x9b \ud800", "two\nlines\tstay")))
    assert event.message == "\ufffd[2J\ufffd gone\ufffd\ufffd \ufffd" and event.hint == "two\nlines\tstay"
    event.message.encode()


@pytest.mark.parametrize(
    "name", ["../../secret.json", "/etc/passwd", "snapshots/../../x.json", "snapshots/a/b.json"]
)
def test_a_snapshot_is_a_file_of_the_run(name):
    assert from_line(to_line(replace(ONE_OF_EACH[3], snapshot=name))).snapshot is None
