"""Shards, as webdataset, tarfile and GNU tar write them, and as somebody hostile would."""

import gzip
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from PIL import Image

from lapclip.data.catalogue import Catalogue, Options
from lapclip.data.files import Problem
from lapclip.data.formats import remote as byte_ranges
from lapclip.data.formats import tar
from lapclip.data.formats.remote import BLOCK_BYTES, NUM_BLOCKS, expand, is_shards
from lapclip.data.formats.shards import read_shards
from lapclip.data.source import BUFFER_BYTES, local_order
from lapclip.errors import UserError


def image(number: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (number % 256, 80, 160)).save(file, "PNG")
    return file.getvalue()


def write(path: str, members: dict[str, bytes | str] | list, format: int = tarfile.PAX_FORMAT) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def pairs(count: int, start: int = 0) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for number in range(start, start + count):
        found[f"{number:06}.png"] = image(number)
        found[f"{number:06}.txt"] = f"caption {number}"
    return found


def opened(pattern: str, **options: str) -> Catalogue:
    return read_shards(expand(pattern), pattern, Options(**options))


def problem(catalogue: Catalogue, what: str | Problem) -> list[str]:
    return catalogue.problems.names.get(what.what if isinstance(what, Problem) else what, [])


# Names


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("s-{08..11}.tar", ["s-08.tar", "s-09.tar", "s-10.tar", "s-11.tar"]),
        ("{0..6..3}.tar", ["0.tar", "3.tar", "6.tar"]),
        ("{train,val}-{0..1}.tar", ["train-0.tar", "train-1.tar", "val-0.tar", "val-1.tar"]),
        ("{x{0..1}y,z}.tar", ["x0y.tar", "x1y.tar", "z.tar"]),
        ("{a.tar,b.tar}", ["a.tar", "b.tar"]),
        ("{a}-}{.tar", ["{a}-}{.tar"]),
        ("a.tar::b{1,2}.tar", ["a.tar", "b1.tar", "b2.tar"]),
        ("a.tar::./a.tar", ["a.tar"]),
        ("http://h/{0..1}.tar?x=1", ["http://h/0.tar?x=1", "http://h/1.tar?x=1"]),
        ("http://[::1]:80/a.tar::b.tar", ["http://[::1]:80/a.tar", "b.tar"]),
        ("file:///data/{0..1}%20x.tar", ["/data/0 x.tar", "/data/1 x.tar"]),
    ],
)
def test_braces_mean_what_a_shell_makes_of_them(pattern, expected):
    assert expand(pattern) == expected


def test_globs_find_files_and_literal_names_win():
    for name in ("x/b.tar", "x/a.tar", "y/a.tar", "y/[1].tar", "y/{1,2}.tar"):
        write(name, pairs(1))
    assert expand("x/*.tar") == ["x/a.tar", "x/b.tar"]
    assert expand("{x,y}/a*.tar") == ["x/a.tar", "y/a.tar"]
    assert expand("x") == ["x/a.tar", "x/b.tar"]
    assert expand("y/[1].tar") == ["y/[1].tar"] and expand("y/{1,2}.tar") == ["y/{1,2}.tar"]
    with pytest.raises(UserError, match="no shard matches"):
        expand("z/*.tar")


@pytest.mark.parametrize(
    "pattern", ["{0..99999999999}.tar", "{0..999}{0..999}.tar", "{0..99999}.tar::x{0..9}.tar"]
)
def test_too_many_shards_are_refused_at_once(pattern):
    with pytest.raises(UserError, match="more than 100,000 shards"):
        expand(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "pipe:curl -s http://h/a.tar", "PIPE:touch owned.tar", "a.tar::pipe:touch owned.tar", "filecache::http://h/a.tar",
        "zip://a.tar::http://h/x.tar", "reference://a.tar", "{" * 2000 + "a,b" + "}" * 2000 + ".tar",
    ],
)  # fmt: skip
def test_what_would_run_a_program_or_open_one_file_within_another_is_refused(pattern):
    with pytest.raises(UserError):
        opened(pattern)
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.tar", True), ("{a.tar,b.tar}", True), ("x/*.tar", True), ("s3://bucket/x-{000..100}.tar", True),
        ("https://h/a.tar?download=true", True), ("a.tar::b.tar", True), ("pipe:cat a.tar", True), ("a.tar.gz", True),
        ("captions.csv", False), ("tar", False), ("https://h/a.parquet", False), ("hf:x/y", False),
    ],
)  # fmt: skip
def test_shards_are_told_by_their_names(name, expected):
    assert is_shards(name) is expected


# What is in them


def test_what_webdataset_writes_is_read():
    import webdataset

    Path("out").mkdir()
    with webdataset.ShardWriter("out/set-%05d.tar", maxcount=3, verbose=0) as writer:
        for number in range(7):
            writer.write({"__key__": f"a/{number:04}", "png": image(number), "txt": f"caption {number}"})
    with webdataset.TarWriter("out/set-00003.tar") as writer:
        writer.write({"__key__": "k", "jpg": image(9), "json": {"caption": "from json", "split": "val"}})
    catalogue = opened("out/*.tar")
    assert catalogue.names[0] == "set-00000.tar/a/0000.png" and len(catalogue.names) == 8
    assert catalogue.captions == [[f"caption {n}"] for n in range(7)] + [["from json"]]
    assert [catalogue.reader.read(n) for n in range(8)] == [image(n) for n in (0, 1, 2, 3, 4, 5, 6, 9)]
    assert catalogue.sides == [None] * 7 + ["validation"] and catalogue.format == "tar"
    assert not catalogue.problems.counts


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_and_foreign_names_are_read_in_each_kind_of_tar(format):
    key = "f" * 90 + "/" + "g" * 60 + ("/写真" if format != tarfile.USTAR_FORMAT else "")
    write("a.tar", {f"{key}.png": image(1), f"{key}.txt": "ein Hündchen", **pairs(2)}, format)
    catalogue = opened("a.tar")
    assert catalogue.names[0] == f"a.tar/{key}.png" and catalogue.captions[0] == ["ein Hündchen"]
    assert len(catalogue.names) == 3 and catalogue.reader.read(2) == image(1)


def test_every_kind_of_caption_is_found():
    write(
        "a.tar",
        {
            **{f"{key}.jpg": image() for key in "abcdefghijk"},
            "a.txt": "\ufeffone\r\n\n  two  \nthree\n",
            "b.caption": "b",
            "c.cap": "c",
            "d.text": "d",
            "e.json": '{"captions": ["x", "y", "x"], "caption": "x", "description": "long", "split": "testing"}',
            "f.json": '{"sentences": [{"raw": "r1", "tokens": []}, {"raw": "r2"}]}',
            "g.json": '{"title": "only a title", "width": 3}',
            "h.txt": "the same",
            "h.json": '{"caption": "the same", "label": "thing"}',
            "i.json": '["u", "v"]',
            "j.cls": "fire_truck",
            "k.cls": "7",
            "k.cls.txt": "sea lion",
        },
    )
    catalogue = opened("a.tar")
    assert catalogue.captions == [
        ["one", "two", "three"], ["b"], ["c"], ["d"], ["x", "y"], ["r1", "r2"], ["only a title"], ["the same"],
        ["u", "v"], ["fire truck"], ["sea lion"],
    ]  # fmt: skip
    assert catalogue.sides[4] == "test"
    assert catalogue.labels[7:] == ["thing", None, "fire_truck", "sea lion"]


def test_members_of_a_pair_may_lie_apart_and_what_is_missing_is_named():
    members = {f"{key}.png": image(number) for number, key in enumerate(["a", "b", "lone", "number"], 1)}
    members |= {"b.txt": "b", "a.txt": "a", "words.txt": "no image", "number.cls": "7"}
    write("a.tar", members | {"README": "x", "._a.png": b"apple", "__meta__/x.txt": "x"})
    catalogue = opened("a.tar")
    assert catalogue.captions == [["a"], ["b"]] and catalogue.reader.read(1) == image(2)
    assert catalogue.problems.names == {
        "has no caption": ["a.tar/lone.png"],
        "has a class number, but nothing names the class": ["a.tar/number.png"],
        "has no image": ["a.tar/words"],
    }


def test_of_several_images_the_likeliest_is_taken_unless_one_is_asked_for():
    images = {"a.mask.png": image(1), "a.image.png": image(2), "a.png": image(3)}
    write("a.tar", images | {"a.txt": "short", "a.long.txt": "long"})
    catalogue = opened("a.tar")
    assert catalogue.names == ["a.tar/a.png"] and catalogue.reader.read(0) == image(3)
    assert problem(catalogue, "is a further image of its pair") == ["a.tar/a.image.png", "a.tar/a.mask.png"]
    chosen = opened("a.tar", image_column="mask.png", caption_column="long.txt")
    assert chosen.names == ["a.tar/a.mask.png"] and chosen.captions == [["long"]]


def test_sides_come_from_the_names_of_shards_when_they_differ():
    for name in ("test/train-0.tar", "test/train-1.tar", "test/val/0.tar", "test/more.tar"):
        write(name, pairs(1))
    assert opened("test/train-{0,1}.tar").sides == [None, None], "one side for all says nothing"
    both = opened("test/train-{0,1}.tar::test/val/0.tar::test/more.tar")
    assert both.sides == ["train", "train", "validation", None]
    assert both.names[0] == "train-0.tar/000000.png" and both.names[2] == "val/0.tar/000000.png"


# Hostile archives


def test_links_devices_and_names_that_lead_out_are_never_followed():
    Path("secret.txt").write_text("secret")
    with tarfile.open("a.tar", "w") as archive:
        links = {"sym.txt": tarfile.SYMTYPE, "hard.txt": tarfile.LNKTYPE}
        for name, kind in (links | {"dev.png": tarfile.CHRTYPE, "fifo.png": tarfile.FIFOTYPE}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "../secret.txt"
            archive.addfile(member)
        for name in ("../up.png", "/abs.png", "a/../../b.png", "fine..png.png", "fine..png.txt"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, io.BytesIO(b"abc"))
    catalogue = opened("a.tar")
    assert catalogue.names == ["a.tar/fine..png.png"] and catalogue.captions == [["abc"]]
    no_files = ("sym.txt", "hard.txt", "dev.png", "fifo.png")
    assert problem(catalogue, tar.NO_FILE) == [f"a.tar/{name}" for name in no_files]
    leading_out = ("../up.png", "/abs.png", "a/../../b.png")
    assert problem(catalogue, tar.LEADS_OUT) == [f"a.tar/{name}" for name in leading_out]


def test_a_tar_that_is_cut_off_gives_what_came_before_and_is_named():
    write("a.tar", pairs(10))
    whole = Path("a.tar").read_bytes()
    with tarfile.open("a.tar") as archive:
        place = archive.getmember("000004.png").offset_data
    for cut in (place + 10, place, place - 100):
        Path("a.tar").write_bytes(whole[:cut])
        catalogue = opened("a.tar")
        assert [captions[0] for captions in catalogue.captions] == [f"caption {n}" for n in range(4)]
        assert problem(catalogue, tar.CUT_OFF) == ["a.tar/000003.txt"]
    Path("a.tar").write_bytes(whole[: place - 512] + b"rubbish!" * 64 + whole[place:])
    assert problem(opened("a.tar"), tar.DAMAGED) == ["a.tar/000003.txt"]


def test_files_that_are_no_tars_are_counted_and_stop_nothing():
    write("d/good.tar", pairs(2))
    write("d/none.tar", {})
    Path("d/empty.tar").write_bytes(b"")
    Path("d/text.tar").write_text("hello " * 1000)
    Path("d/zip.tar").write_bytes(gzip.compress(b"x" * 2000))
    os.mkfifo("d/pipe.tar")
    catalogue = opened("d/{good,none,empty,text,zip,pipe,absent}.tar")
    assert len(catalogue.names) == 2
    assert catalogue.problems.names == {
        "is an archive without members": ["none.tar"],
        "is empty": ["empty.tar"],
        "is not a tar archive": ["text.tar"],
        "is compressed; its images can be reached only once it is unpacked, as with `gunzip`": ["zip.tar"],
        "cannot be opened: is not a regular file": ["pipe.tar"],
        "is missing": ["absent.tar"],
    }
    with pytest.raises(UserError, match="holds no images"):
        opened("d/{none,empty,text,zip,pipe,absent}.tar")


@pytest.mark.parametrize("name", ["a.tgz", "{a,b}.tar.gz", "http://h/a.tar.gz"])
def test_compressed_shards_are_refused_with_what_to_do(name):
    with pytest.raises(UserError, match="compressed") as caught:
        opened(name)
    assert "gunzip" in caught.value.hint


def header_with(size: bytes, name: bytes = b"big.png") -> bytes:
    member = bytearray(tarfile.TarInfo(name.decode()).tobuf(tarfile.USTAR_FORMAT))
    member[124:136] = size.ljust(12, b"\0")
    member[148:156] = b" " * 8
    member[148:156] = b"%06o\0 " % sum(member)
    return bytes(member)


def test_impossible_sizes_end_the_shard():
    write("a.tar", pairs(1))
    with tarfile.open("a.tar") as archive:
        start = Path("a.tar").read_bytes()[: max(m.offset_data for m in archive) + 512]
    sizes = {b"77777777777": tar.CUT_OFF, b"\x80" + b"\xff" * 11: tar.CUT_OFF}
    for size, expected in (
        sizes | dict.fromkeys((b"\xff" * 12, b"-0000000777", b"zzz"), tar.DAMAGED)
    ).items():
        Path("a.tar").write_bytes(start + header_with(size) + bytes(2048))
        catalogue = opened("a.tar")
        assert len(catalogue.names) == 1 and problem(catalogue, expected) == ["a.tar/000000.txt"]


def test_extended_headers_are_not_believed():
    def pax(fields: bytes) -> bytes:
        head = bytearray(header_with(b"%o" % len(fields), b"x"))
        head[156:157], head[148:156] = b"x", b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
        return bytes(head) + fields.ljust(-len(fields) % 512 + len(fields), b"\0")

    no_lengths = (b"99999999 path=x\n", b"0 a=b\n", b"x", b"\xff" * 700, b"9 " * 9000)
    for fields in (b"20 size=-5555555555\n", *no_lengths):
        Path("a.tar").write_bytes(pax(fields) + header_with(b"0") + bytes(1024))
        with pytest.raises(UserError, match="holds no images"):
            opened("a.tar")


def test_texts_that_are_too_large_or_broken_cost_only_themselves():
    bad: dict[str, bytes | str] = {
        "a.txt": "x" * (2**20 + 1),
        "b.txt": b"\xff\xfe\x00",
        "c.json": "{",
        "d.json": "[" * 200_000,
        "e.json": '{"caption": ' + "9" * 10_000 + "}",
        "f.json": '{"caption": {"deep": 1}, "label": null, "split": ["x"]}',
    }
    write("a.tar", {**{f"{key}.png": image() for key in "abcdef"}, **bad, **pairs(1)})
    catalogue = opened("a.tar")
    assert len(catalogue.names) == 1
    assert problem(catalogue, "has more than 1 MB") == ["a.tar/a.txt"]
    assert problem(catalogue, "is not UTF-8 text") == ["a.tar/b.txt"]
    assert problem(catalogue, "is not JSON") == ["a.tar/c.json", "a.tar/d.json", "a.tar/e.json"]
    assert catalogue.problems.counts["has no caption"] == 6


def test_an_endless_archive_ends(monkeypatch):
    monkeypatch.setattr(tar, "MAX_MEMBERS", 10)
    write("a.tar", pairs(20))
    catalogue = opened("a.tar")
    assert len(catalogue.names) == 5 and problem(catalogue, "has more than 10 members; the rest was omitted")


# Reading


def read_all(reader) -> list[bytes]:
    return [reader.read(number) for number in range(len(reader.offsets))]


def read_in_another_process(reader, queue) -> None:
    queue.put((read_all(reader), reader.stamp(0)))


def test_many_shards_are_read_by_threads_and_by_another_process():
    for number in range(32):
        write(f"s-{number:02}.tar", pairs(3, 3 * number))
    reader = opened("s-*.tar").reader
    expected = [image(number) for number in range(96)]
    order = [(number * 37) % len(expected) for number in range(len(expected))]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert list(pool.map(reader.read, order)) == [expected[number] for number in order]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=read_in_another_process, args=(reader, queue))
    process.start()
    assert queue.get(timeout=60) == (expected, reader.stamp(0))
    process.join()


def test_a_stamp_changes_with_its_shard_and_is_empty_when_it_is_gone():
    write("a.tar", pairs(2))
    reader = opened("a.tar").reader
    before = reader.stamp(0)
    assert before != reader.stamp(1) and before == opened("a.tar").reader.stamp(0)
    os.utime("a.tar", (1, 1))
    assert reader.stamp(0) != before
    os.truncate("a.tar", 700)
    with pytest.raises(OSError, match="is truncated"):
        reader.read(1)
    os.remove("a.tar")
    assert reader.stamp(0) == ""


class Server(BaseHTTPRequestHandler):
    """Files of the present folder; parts of them where asked for, unless it is told not to."""

    with_ranges = True
    requests: list[str]

    def do_GET(self) -> None:
        path = Path(self.path.lstrip("/").partition("?")[0])
        if not path.exists():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted and self.with_ranges:
            start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            data = data[start:end]
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.end_headers()
        if self.command == "GET":
            self.requests.append(self.path)
            try:
                self.wfile.write(data)
            except OSError:  # the other side has seen enough
                self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, *arguments) -> None:
        pass


@contextmanager
def serving(with_ranges: bool):
    handler = type("Handler", (Server,), {"with_ranges": with_ranges, "requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def large_pairs(count: int) -> dict[str, bytes | str]:
    """Pairs of 3 MB each, so that images lie across the borders of blocks."""
    return {
        f"{number:06}.{kind}": content
        for number in range(count)
        for kind, content in (("png", os.urandom(3 * 2**20)), ("txt", f"caption {number}"))
    }


def test_shards_are_read_over_http_in_few_requests():
    write("b-0.tar", pairs(200))
    members = large_pairs(8)
    write("b-1.tar", members)
    local = read_all(opened("b-{0,1}.tar").reader)
    with serving(with_ranges=True) as (address, requests):
        catalogue = opened(f"{address}/b-{{0..2}}.tar?key=1")
        assert problem(catalogue, "is missing") == ["b-2.tar"]
        assert catalogue.names[0] == "b-0.tar/000000.png" and catalogue.names[-1] == "b-1.tar/000007.png"
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(catalogue.reader.read, range(208))) == local
        assert len(requests) < 20, "blocks, not images, are asked for"
        assert len(catalogue.reader.remote.blocks) * BLOCK_BYTES <= NUM_BLOCKS * BLOCK_BYTES <= 192 * 2**20
        assert catalogue.reader.stamp(0) and catalogue.reader.stamp(0) != catalogue.reader.stamp(1)
        os.utime("b-0.tar", (1, 1))
        again = opened(f"{address}/b-0.tar?key=1").reader
        assert again.stamp(0) != catalogue.reader.stamp(0)
    again.remote.blocks.clear()
    with pytest.raises(OSError, match="cannot be read"):
        again.read(0)


def test_an_epoch_of_streaming_fetches_each_block_about_twice(monkeypatch):
    """At a thousandth of the real size: what counts is how blocks, runs and the window compare."""
    monkeypatch.setattr(byte_ranges, "BLOCK_BYTES", BLOCK_BYTES // 1024)
    size, num_images = 100, 20_000
    Path("far.tar").write_bytes(os.urandom(size * num_images))
    url, fetched = f"local://{Path('far.tar').absolute()}", Counter()
    fetch = byte_ranges.fetch

    def counted(url: str, start: int, end: int, length: int) -> bytes:
        fetched[start] += 1
        return fetch(url, start, end, length)

    monkeypatch.setattr(byte_ranges, "fetch", counted)
    files = byte_ranges.RemoteFiles()
    for number in local_order(num_images, BUFFER_BYTES // 1024 // size, epoch=0, seed=0).tolist():
        files.read(url, number * size, size)
    num_blocks = -(-size * num_images * 1024 // BLOCK_BYTES)
    # A block is longer than a run of neighbours, so that two or three runs lie in it, at different times.
    assert len(fetched) == num_blocks and max(fetched.values()) <= 4
    assert fetched.total() < 2.5 * num_blocks


def test_a_server_without_ranges_is_refused_in_words():
    write("a.tar", large_pairs(6))
    with (
        serving(with_ranges=False) as (address, _),
        pytest.raises(UserError, match="range requests") as caught,
    ):
        opened(f"{address}/a.tar")
    assert "copy the shards" in caught.value.hint


def test_what_cannot_be_reached_is_said_in_words():
    far = "http://127.0.0.1:9"
    for name, what in {
        f"{far}/a.tar": "be read",
        f"{far}/*.tar": "be listed",
        "nonsense://x/a.tar": "be opened",
    }.items():
        with pytest.raises(UserError, match=f"cannot {what}"):
            opened(name)


def test_a_missing_package_is_named():
    code = (
        "import sys; sys.modules['s3fs'] = None\nfrom test_shards import opened; opened('s3://bucket/a.tar')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserError" in done.stderr and "s3fs" in done.stderr.partition("hint: ")[2]


def test_any_file_system_that_fsspec_knows_will_do():
    import fsspec

    write("a.tar", pairs(5))
    files = fsspec.filesystem("memory")
    try:
        for name in ("train-0.tar", "val-0.tar"):
            files.pipe_file(f"/set/{name}", Path("a.tar").read_bytes())
        catalogue = opened("memory://set/*.tar")
        assert catalogue.sides == ["train"] * 5 + ["validation"] * 5
        assert read_all(catalogue.reader) == [image(number) for number in range(5)] * 2
        assert catalogue.reader.stamp(0)
        with pytest.raises(UserError, match="no shard matches"):
            opened("memory://other/*.tar")
    finally:
        files.store.clear()
