"""The server in a process of its own: what it answers, whom, and what no input makes it do."""

import asyncio
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import quote

import httpx
import numpy as np
import psutil
import pytest
from conftest import SMALL, picture_folder, wait_for
from PIL import Image
from test_decode import png_of_size
from test_http import Server
from test_update import make_run

import lapclip
from lapclip.cli.serve import checked_token
from lapclip.config import load_config
from lapclip.data.tokenizer import train_bpe
from lapclip.embedder import Embedder, load
from lapclip.errors import UserError
from lapclip.machine.device import processor
from lapclip.model.clip import build_model
from lapclip.search.index import find_index
from lapclip.search.update import update
from lapclip.serve.api import build_server
from lapclip.serve.http import HEADERS, hosts_of, is_local, names_of
from lapclip.serve.limits import Idle, Limits, Rates, Refused
from lapclip.serve.service import Service

pytestmark = pytest.mark.slow

NUM_IMAGES = 12
TOKEN = "a-token-of-enough-letters"
# As `lapclip serve`, but with little patience.
PROGRAM = """
import functools, sys
from lapclip.machine.hardware import limit_openmp_spinning
limit_openmp_spinning()
import lapclip
from lapclip.cli.serve import serve
from lapclip.serve import limits
limits.Limits = functools.partial(limits.Limits, header_seconds=1.0, silent_seconds=1.0)
sys.exit(serve(port=0, open=False))
"""
SCHEMA_CHECKS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 404, 413, 414, 415, 431]
[checks.negative_data_rejection]
expected-statuses = [400, 404, 405, 413, 414, 415, 431]
"""


def write_model(folder: Path, size: str | None = None) -> None:
    """A model that knows nothing: what it finds is as good as any, and always the same."""
    tokenizer = train_bpe(["red green blue old new cat dog tree"], 300)
    tokenizer.words = frozenset(["a", "red", "green", "blue", "old", "new", "cat", "dog", "tree"])
    settings = load_config(flags=SMALL if size is None else {"size": size})
    model = build_model(settings.model, vocab_size=tokenizer.vocab_size, has_bias=False)
    Embedder(model, tokenizer, processor(), name="mine", templates=["{}", "one {}"]).save(folder)


def index(model: Path, *folders: Path) -> None:
    for _ in update(load(model), name="mine", model=str(model), folders=[str(folder) for folder in folders]):
        pass


class Served(Server):
    """`lapclip serve` with little patience."""

    def __init__(self, folder: Path):
        super().__init__(folder, program=[sys.executable, "-c", PROGRAM])
        self.folder, self.photos = folder, folder / "photos"
        self.process.stderr.readline()  # the model and its images

    @property
    def memory(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    photos = picture_folder(folder / "photos", NUM_IMAGES - 2)
    picture_folder(photos / "inner", 1, first=70)
    shutil.copy(photos / "03.jpg", photos / "copy of 03.jpg")
    exif = Image.Exif()
    exif[0x010F] = "a camera with a name"
    Image.open(photos / "05.jpg").save(photos / "05.jpg", exif=exif)
    (folder / "secret.txt").write_text("secret")
    picture_folder(folder / "private", 1, first=99)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAPCLIP_CACHE", str(folder / "cache"))
        write_model(folder / "mine")
        index(folder / "mine", photos)
        server = Served(folder)
    yield server
    with ThreadPoolExecutor(8) as clients:  # who ask for more than it can do before it ends
        texts = [f"{'long ' * 50}{number}" for number in range(256)]
        asked = [clients.submit(server.ask, "/embed", {"texts": [f"{n}", *texts[1:]]}) for n in range(40)]
        wait_for(lambda: any(one.done() for one in asked))
        started = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        said = server.process.communicate(timeout=20)[1]
        elapsed_seconds = time.monotonic() - started
        answers = [one.result().status for one in asked if not one.exception()]
    assert (server.process.returncode, said.strip()) == (0, ""), "a good server says nothing more"
    assert set(answers) <= {200, 503} and elapsed_seconds < 8


@pytest.fixture
def in_the_cache(served, monkeypatch):
    monkeypatch.setenv("LAPCLIP_CACHE", str(served.folder / "cache"))


@pytest.fixture(scope="module")
def embedder(served):
    return load(served.folder / "mine")


def ids(served) -> dict[str, int]:
    found = served.told("/search?q=a+cat&top=100")["results"]
    return {one["name"]: one["id"] for one in found}


def upload(served, *headers: str) -> bytes:
    """The head of an upload."""
    lines = ("POST /embed HTTP/1.1", f"Host: localhost:{served.port}", "Content-Type: image/png", *headers)
    return "".join(f"{line}\r\n" for line in lines).encode()


def test_it_says_what_it_serves_and_words_find_images_best_first(served, embedder, in_the_cache):
    expected = {"status": "ok", "model": "mine", "width": embedder.width, "num_pictures": NUM_IMAGES}
    expected |= {"folders": [str(served.photos.resolve())], "version": lapclip.__version__}
    assert served.told("/health") == expected
    told = served.told("/search?q=a+red+cat&top=5")
    scores = [one["score"] for one in told["results"]]
    assert (told["query"], len(scores), told["num_pictures"]) == ("a red cat", 5, NUM_IMAGES)
    assert scores == sorted(scores, reverse=True) and told["milliseconds"] > 0
    assert told["unknown_words"] == [] and served.told("/search?q=Hund+-+CAT")["unknown_words"] == ["hund"]
    first = told["results"][0]
    opened = find_index(None)
    cosine = opened.vectors[opened.entry(first["id"]).row] @ embedder.texts(["a red cat"])[0]
    assert first["score"] == pytest.approx(cosine, abs=1e-4)
    assert served.photos.resolve() / first["name"] == Path(first["path"])
    lowest = scores[2]
    assert len(served.told(f"/search?q=a+red+cat&min_score={lowest - 1e-6}")["results"]) == 3
    different = served.told("/search?q=a+red+cat+-+tree&top=5")["results"]
    assert [one["score"] for one in different] != scores


def test_an_image_finds_itself_and_its_copy(served):
    data = (served.photos / "03.jpg").read_bytes()
    first = served.told("/search?top=1", data)["results"][0]
    assert first["score"] == pytest.approx(1, abs=1e-3) and "03.jpg" in first["name"]
    assert len(first["copies"]) == 1 and (first["width"], first["height"]) == (53, 40)
    assert served.told("/search?top=1", data, content_type="application/octet-stream")["results"][0] == first
    like = served.told(f"/search?like={first['id']}&top=100")["results"]
    assert first["id"] not in [one["id"] for one in like] and len(like) == NUM_IMAGES - 2
    unlike = served.told(f"/search?q=cat&unlike={first['id']}&like={like[0]['id']}")["results"]
    assert not {first["id"], like[0]["id"]} & {one["id"] for one in unlike}


def test_a_folder_a_time_or_a_size_is_searched_alone(served):
    inner = served.photos.resolve() / "inner"
    assert [one["name"] for one in served.told(f"/search?q=cat&folder={inner}")["results"]] == ["70.jpg"]
    every = served.told("/search?q=cat&top=100")["results"]
    assert (
        served.told("/search?q=cat&top=100&after=2000-01-01&before=9999-01-01&min_size=53")["results"]
        == every
    )
    for nothing in ("after=9999-01-01", "before=2000-01-01", "min_size=1000000"):
        assert served.told(f"/search?q=cat&{nothing}")["results"] == []
    for wrong in ("after=2024-13-01", "before=yesterday", "min_size=-1", "min_size=1e9"):
        served.refused(400, f"/search?q=cat&{wrong}")
    for elsewhere in (served.folder / "private", inner / ".." / ".." / "private", "/", "/etc", "inner", "\0"):
        served.refused(404, f"/search?q=cat&folder={quote(str(elsewhere))}")


def test_labels_have_the_probabilities_of_the_model(served, embedder):
    path = served.photos / "03.jpg"
    labels = ["a cat", "dog", "{}", "tree"]
    query = "&".join(f"label={quote(label)}" for label in labels)
    told = served.told(f"/classify?{query}", path.read_bytes())["results"]
    expected = dict(zip(labels, embedder.classify([path], labels)[0], strict=True))
    assert {one["label"]: one["probability"] for one in told} == pytest.approx(expected, abs=1e-4)
    assert told == sorted(told, key=lambda one: -one["probability"])
    one = ids(served)["04.jpg"]
    told = served.told(f"/classify?{query}&id={one}&template=%7B%7D")["results"]
    rows = embedder.classify([served.photos / "04.jpg"], labels, ["{}"])[0]
    expected = pytest.approx(dict(zip(labels, rows, strict=True)), abs=1e-3)
    assert {one["label"]: one["probability"] for one in told} == expected
    served.refused(400, f"/classify?{query}&id={one}&template=nothing")
    served.refused(400, f"/classify?id={one}")


def test_eight_clients_at_once_get_what_each_would_get_alone(served, embedder):
    texts = [[f"client {n} text {m} {'long ' * (n % 5)}" for m in range(1 + n % 3)] for n in range(40)]
    files = sorted(served.photos.glob("0*.jpg"))
    asked = [("/embed", {"texts": some}) for some in texts]
    asked += [("/embed", path.read_bytes()) for path in files]
    with ThreadPoolExecutor(8) as clients:
        told = list(clients.map(lambda one: served.told(*one)["embeddings"], asked))
    expected = [embedder.texts(some) for some in texts] + [embedder.images([path]) for path in files]
    for rows, own in zip(told, expected, strict=True):
        np.testing.assert_allclose(rows, own, atol=1e-5)


def test_images_are_encoded_again_and_only_small(served):
    for kind, side in (("thumbnail", 320), ("picture", 1600)):
        answer = served.ask(f"/{kind}/{ids(served)['05.jpg']}")
        assert (answer.status, answer.getheader("content-type")) == (200, "image/jpeg")
        assert max(Image.open(io.BytesIO(answer.body)).size) <= side
        assert b"a camera with a name" not in answer.body and b"Exif" not in answer.body
    assert b"a camera with a name" in (served.photos / "05.jpg").read_bytes()
    head = served.ask(f"/thumbnail/{ids(served)['05.jpg']}", method="HEAD")
    assert head.status == 200 and head.body == b"" and int(head.getheader("content-length")) > 100


NAMES = [
    "", "0", "-1", "999999", "1" * 30, "%D9%A1", "..", "../health", "%2e%2e%2fsecret.txt", "1%00",
    "%2Fetc%2Fpasswd", "/etc/passwd", "1/../2", "1%0a", "..%5c..", "%ff", "photos/03.jpg", "search.html/",
]  # fmt: skip


def test_no_name_and_no_parameter_reads_a_file(served):
    for path in ("/thumbnail/", "/picture/", "/static/"):
        for name in NAMES:
            assert served.refused(404, path + name)
    for value in ("../../etc/passwd", "%2e%2e%2f", "/etc/passwd", "%00", "a%00b", "file:///etc"):
        for name in ("like", "unlike", "top", "min_score", "id", "path", "file"):
            served.refused(400, f"/search?q=a&{name}={value}")
        served.refused(404, f"/search?q=a&folder={value}")
        for path in ("/search?q=", "/classify?id=1&label="):
            assert b"root:" not in served.ask(path + value).body


def test_a_link_that_comes_after_the_index_is_not_followed(served):
    names = ids(served)
    private = served.folder / "private" / "99.jpg"
    image, inner = served.photos / "07.jpg", served.photos / "inner"
    kept = image.read_bytes()
    try:
        assert served.ask(f"/picture/{names['07.jpg']}").status == 200
        image.unlink()
        image.symlink_to(private)
        served.refused(404, f"/picture/{names['07.jpg']}")
        served.refused(404, f"/thumbnail/{names['07.jpg']}")
        image.unlink()
        os.mkfifo(image)
        served.refused(404, f"/picture/{names['07.jpg']}")
        inner.rename(served.folder / "moved")
        (served.folder / "private" / "70.jpg").write_bytes(private.read_bytes())
        inner.symlink_to(served.folder / "private")
        served.refused(404, f"/picture/{names['70.jpg']}")
        inner.unlink()
        (served.folder / "moved").rename(inner)
        served.photos.rename(served.folder / "moved")
        served.photos.symlink_to(served.folder / "moved")
        served.refused(404, f"/picture/{names['04.jpg']}")
    finally:
        if served.photos.is_symlink():
            served.photos.unlink()
            (served.folder / "moved").rename(served.photos)
        image.unlink()
        image.write_bytes(kept)
    assert served.ask(f"/picture/{names['07.jpg']}").status == 200


def test_what_is_no_image_is_refused_in_words(served):
    whole = (served.photos / "03.jpg").read_bytes()
    bomb = png_of_size(30_000, 30_000)
    for body in (b"text", whole[:300], bytes(1000), bomb, b"GIF89a" + b"\xff" * 40, b"%!PS-Adobe"):
        served.refused(415, "/search", body)
        served.refused(415, "/embed", body)
        served.refused(415, "/classify?label=a", body)
    served.refused(400, "/search", b"")
    for kind in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", ""):
        served.refused(415, "/search", whole, content_type=kind)
    assert served.memory < 2 << 30


def test_what_is_too_large_is_refused_before_it_is_read(served):
    with served.connect(upload(served, f"Content-Length: {10**15}", "")) as early:
        assert early.recv(4096).startswith(b"HTTP/1.1 413 ")
    with served.connect(upload(served, "Transfer-Encoding: chunked", "")) as chunked:
        piece = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
        for _ in range(34):
            chunked.sendall(piece)
        assert chunked.recv(4096).startswith(b"HTTP/1.1 413 ")
    served.refused(413, "/embed", {"texts": ["x" * (1 << 20)]})
    assert served.told("/health")["status"] == "ok"


NO_TEXTS = [
    b"\xff\xfe", b'{"texts": ["\xff"]}', b'{"texts": ["\\ud800"]}', b'{"texts": [NaN]}', b'{"texts": Infinity}',
    b"[" * 500_000, b'{"texts":' * 50_000, b"", b"null", b"[]", b'"texts"', b"{}", b'{"texts": []}',
    b'{"texts": "a"}', b'{"texts": [1]}', b'{"texts": [null]}', b'{"texts": ["a"], "more": 1}',
    b'{"texts": ' + b"9" * 10_000 + b"}", json.dumps({"texts": ["a"] * 257}).encode(),
    json.dumps({"texts": ["a" * 10_001]}).encode(), b'{"texts": ["a"]} {"texts": ["b"]}',
]  # fmt: skip


NO_QUERIES = [
    "", "q=", "q=+-+", "q=cat&top=0", "q=cat&top=1001", "q=cat&top=x", "q=cat&top=1&top=2", "q=a&top=1.5",
    "q=a&min_score=nan", "q=a&min_score=inf", "q=a&min_score=1e999", "q=a&min_score=2", "q=a&min_score=",
    "q=%ff", "q=%ED%A0%80", "q=a&like=x", "q=a&like=-1", "q=a&q=b", "tpo=3", "q=a&TOP=3",
    "q=a&" + "like=1&" * 65, "q=cat+-+cat", "q=" + "x" * 10_001, "&".join(["a"] * 2000),
]  # fmt: skip


STRANGE = ["\0", "\x1b[31m", "\u202e", "\U0001f600", "+ ++", "a - - b", "\ufffe", "x" * 10_000, "' OR 1"]


def test_what_means_nothing_is_refused_in_words_and_what_is_strange_is_answered(served):
    for query in NO_QUERIES:
        assert served.refused(400, f"/search?{query}")
    said = str(served.refused(400, "/search?q=a&top=abc"))
    assert "`top` is not a whole number from 1 to 1,000" in said
    for body in NO_TEXTS:
        assert served.refused(400, "/embed", body, content_type="application/json")
    for words in STRANGE:
        assert served.told(f"/search?q={quote(words)}&top=1")["results"]
    for path in ("/search?like=424242", "/Search?q=a", "/search/?q=a"):
        served.refused(404, path)
    served.refused(414, "/search?q=" + "x" * 50_000)
    assert "too long" in served.refused(431, "/search?q=" + "x" * 500_000)
    served.refused(400, "/search?q=a", b"x", method="GET")
    assert "terms" in served.refused(400, "/search?q=" + "+-+".join(map(str, range(300))))
    labels = "&".join(f"label={number}{'y' * 30}" for number in range(800))
    one = ids(served)["04.jpg"]
    assert "too much" in served.refused(400, f"/classify?id={one}&{labels}&template={'%7B%7D' * 300}")
    assert "2,048" in served.refused(400, f"/classify?id={one}&{labels}{'&template=%7B%7D' * 3}")


def test_each_path_says_which_methods_it_has(served):
    for path, methods in (("/search", {"GET", "HEAD", "OPTIONS", "POST"}), ("/embed", {"OPTIONS", "POST"})):
        for method in ("TRACE", "PUT", "DELETE", "PATCH", "CONNECT", "NONSENSE", "OPTIONS"):
            answer = served.ask(path, method=method)
            assert answer.status == (204 if method == "OPTIONS" else 405)
            assert set(answer.getheader("allow").split(", ")) == methods
    assert served.ask("/search?q=a", method="HEAD").body == b""
    answer = served.ask("/health", Origin="http://evil.example")
    assert answer.getheader("access-control-allow-origin") is None


def test_other_names_and_other_sites_pages_are_refused(served):
    port = served.port
    for path in ("/", "/static/search.js", "/health", "/nothing", f"/thumbnail/{ids(served)['05.jpg']}"):
        headers = dict(served.ask(path).getheaders())
        policy = headers.pop("content-security-policy")
        assert HEADERS.keys() - {"content-security-policy"} <= headers.keys()
        assert "default-src 'none'" in policy and "img-src 'self' blob:" in policy and "unsafe" not in policy
    other = ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.nip.io:{port}")
    for host in (*other, "localhost:1", ""):
        served.refused(421, "/health", Host=host)
    for host in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST"):
        assert served.told("/health", Host=f"{host}:{port}")
    for site in ("cross-site", "same-site"):
        served.refused(403, "/search?q=a", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")
        for kind, path in product(("iframe", "frame", "embed", "object"), ("/", "/search?q=a")):
            framed = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": kind}
            served.refused(403, path, **framed)
        link = {"Sec_Fetch_Site": site, "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
        assert served.ask("/", **link).status == 200
        served.refused(403, "/search?q=a", **link)
    typed = {"Sec_Fetch_Site": "none", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert served.told("/search?q=a", **typed)["results"]
    served.refused(403, "/search?q=a", **typed, Sec_Purpose="prefetch")
    for origin in ("http://evil.example", "null", f"http://localhost:{port + 1}", f"https://x:{port}"):
        served.refused(403, "/embed", {"texts": ["a"]}, Origin=origin)
        served.refused(403, "/search?q=a", Origin=origin)
    for host in ("localhost", "127.0.0.1"):
        assert served.told("/embed", {"texts": ["a"]}, Origin=f"http://{host}:{port}")["width"]
        assert served.told("/search?q=a", Origin=f"http://{host}:{port}")["results"]


def test_a_slow_client_is_sent_away_and_stops_nobody(served):
    used = served.connect(f"GET /health HTTP/1.1\r\nHost: localhost:{served.port}\r\n\r\n".encode())
    used.recv(10_000)
    body = served.connect(upload(served, "Content-Length: 1000", "") + b"xyz")
    with served.connect() as silent, served.connect(upload(served)) as dripping, body, used:
        ended = set()

        def has_ended(connection) -> bool:
            try:
                connection.sendall(b"X: y\r\n")
                connection.settimeout(0.01)
                return connection.recv(4096) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        def all_ended() -> bool:
            ended.update(one for one in (dripping, used) if one in ended or has_ended(one))
            return len(ended) == 2

        wait_for(all_ended, 5)
        silent.settimeout(5)
        assert silent.recv(10) == b""
        assert body.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert served.told("/health")["status"] == "ok"


def test_nothing_is_embedded_for_clients_that_have_left(served):
    templates = "".join(f"&template={number}%7B%7D" for number in range(16))
    connections = []
    for number in range(20):
        labels = "".join(f"&label={number}-{label}" for label in range(128))
        asked = f"GET /classify?id={ids(served)['04.jpg']}{templates}{labels}"
        request = f"{asked} HTTP/1.1\r\nHost: localhost:{served.port}\r\n\r\n".encode()
        # Every second has sent its next request already.
        connections.append(served.connect(request * (1 + number % 2)))
    time.sleep(0.2)  # so that the first are being answered
    for connection in connections:
        connection.close()
    time.sleep(0.3)
    before = sum(psutil.Process(served.process.pid).cpu_times()[:2])
    time.sleep(1.5)
    assert sum(psutil.Process(served.process.pid).cpu_times()[:2]) - before < 0.5, (
        "seconds of work for nobody"
    )
    assert served.ask("/embed", {"texts": ["another text"]}).status == 200


def test_nonsense_instead_of_http_is_refused_in_words(served):
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET\r\n\r\n", b"GET /\r\n\r\n"):
        with served.connect(sent) as connection:
            assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    whole = (served.photos / "03.jpg").read_bytes()
    chunk = f"{len(whole):x}\r\n".encode() + whole + b"\r\n0\r\n\r\n"
    for headers, body in (
        (["Transfer-Encoding: chunked"], b"nonsense\r\n"),
        (["Transfer-Encoding: gzip, chunked"], chunk),
        (["Content-Length: 3", "Transfer-Encoding: chunked"], chunk),
        (["Content-Length: 3", "Content-Length: 4"], b"abcd"),
    ):
        with served.connect(upload(served, *headers, "") + body) as connection:
            told = connection.recv(4096)
            assert told.startswith(b"HTTP/1.1 400 ") and b"application/json" in told


def test_a_body_in_a_million_parts_keeps_nobody_waiting(served):
    with served.connect(upload(served, "Transfer-Encoding: chunked", "")) as connection:
        connection.sendall(b"1\r\nx\r\n" * 20_000)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    body = (bytes([number]) for number in (served.photos / "03.jpg").read_bytes())
    assert served.ask("/embed", body, content_type="image/jpeg").status == 200, "some thousand are read"


def test_an_updated_index_is_seen_without_a_restart(served, embedder, in_the_cache, monkeypatch):
    picture_folder(served.photos, 1, first=80)
    index(served.folder / "mine")
    wait_for(lambda: "80.jpg" in ids(served), 10)
    monkeypatch.setattr("lapclip.serve.service.SECONDS_BETWEEN_LOOKS", -1)

    async def main():
        service = Service(embedder, find_index(None))
        before = await service.current()
        (served.photos / "80.jpg").unlink()
        index(served.folder / "mine")
        after = await service.current()
        assert after is not before and after.index.num_images == before.index.num_images - 1 == NUM_IMAGES
        assert before.index.rows("SELECT 1"), "somebody still reads it"
        opened = weakref.ref(before.index)
        del before
        assert opened() is None, "nobody does"
        service.close(1)

    asyncio.run(main())
    wait_for(lambda: served.told("/health")["num_pictures"] == NUM_IMAGES, 10)


def check_schema(served, folder: Path, *options: str) -> None:
    """Requests by Schemathesis, of every kind it makes."""
    (folder / "checks.toml").write_text(SCHEMA_CHECKS)
    command = [Path(sys.executable).parent / "st", "--config-file", "checks.toml", "run"]
    command += [f"{served.address}openapi.json", "--checks", "all", "--warnings", "off", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, re.sub(r"(?m)^(.{300}).*$", r"\1 ...", done.stdout)


def test_the_description_is_kept(served, tmp_path):
    """`make prove` has many more examples."""
    options = "--max-examples 1 --phases fuzzing --no-shrink --generation-deterministic"
    check_schema(served, tmp_path, *options.split())


def with_client(work, embedder, *, token=None, **limits):
    """Runs `work` with a client of an application in this process."""

    async def main():
        service, hosts = Service(embedder, None), hosts_of(["photos.local"], 80, ["proxy.example"])
        address = "http://photos.local"
        app = build_server(service, address=f"{address}/", hosts=hosts, token=token, limits=Limits(**limits))
        transport = httpx.ASGITransport(app=app, client=("9.8.7.6", 1))
        await work(httpx.AsyncClient(transport=transport, base_url=address))
        service.close(1)

    asyncio.run(main())


def test_with_a_token_nothing_is_told_without_it(embedder):
    async def main(client):
        private = ("/", "/health", "/search?q=a", "/static/search.js", "/thumbnail/1")
        for path in (*private, f"/health?token={TOKEN}"):
            answer = await client.get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer", path
        for given in ("", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "\xe9", "Bearer"):
            shown = {"authorization": f"Bearer {given}".encode("latin-1")}
            assert (await client.get("/health", headers=shown)).status_code == 401
            assert (await client.get("/", params={"token": given})).status_code == 401
            cookie = {"cookie": f"lapclip-80={given}".encode("latin-1")}
            assert (await client.get("/health", headers=cookie)).status_code == 401
        shown = {"authorization": f"Bearer {TOKEN}"}
        assert (await client.get("/health", headers=shown)).status_code == 200
        described = (await client.get("/openapi.json", headers=shown)).json()
        assert "token" in described["components"]["securitySchemes"]
        opened = await client.get("/", params={"token": TOKEN})
        assert (opened.status_code, opened.headers["location"]) == (303, "/")
        cookie = opened.headers["set-cookie"].lower().split("; ")
        assert {"httponly", "samesite=strict", "path=/"} <= set(cookie) and "secure" not in cookie
        assert (await client.get("/health")).status_code == 200, "the client keeps the cookie"
        again = await client.get("https://photos.local/", params={"token": TOKEN})
        assert again.status_code == 303, "a token never stays in the address"
        assert "Secure" in again.headers["set-cookie"]

    with_client(main, embedder, token=TOKEN)


def test_a_client_that_asks_too_often_is_told_when_to_come_back(embedder):
    async def main(client):
        answers = [await client.get("/health") for _ in range(22)]
        assert [answer.status_code for answer in answers[:20]] == [200] * 20
        assert answers[-1].status_code == 429 and int(answers[-1].headers["retry-after"]) >= 1

    with_client(main, embedder, rate=2)
    rates = Rates(1)
    for _ in range(10):
        rates.count("2001:db8::1")
        rates.count("::ffff:10.0.0.2")
    with pytest.raises(Refused):
        rates.count("2001:db8::ffff")  # the same network
    for other in ("2001:db8:1::1", "10.0.0.1", "::ffff:10.0.0.3"):  # the last is IPv4 on a socket for both
        rates.count(other)


def test_more_than_can_be_worked_on_is_told_to_come_back(embedder, monkeypatch):
    async def too_many(client):
        answer = await client.get("/health")
        assert answer.status_code == 503 and answer.headers["retry-after"]

    async def too_large(client):
        kind = {"content-type": "image/png"}
        assert (await client.post("/embed", content=bytes(2000), headers=kind)).status_code == 503
        answer = await client.post("/embed", content=b"text", headers=kind)
        assert answer.status_code == 415, "what was refused is let go of"

    async def too_many_texts(client):
        for number, status in ((256, 503), (32, 200), (256, 503)):
            answer = await client.post("/embed", json={"texts": ["a"] * number})
            assert answer.status_code == status, "a small request has its turn"

    with_client(too_many, embedder, requests=0)
    monkeypatch.setattr("lapclip.serve.service.MAX_ROWS", 255)
    with_client(too_many_texts, embedder)
    with_client(too_large, embedder, held_bytes=1000)


def test_connections_that_keep_the_server_waiting_make_room(monkeypatch):
    def connection(cycle=None, is_unread=False):
        one = Mock(cycle=cycle, flow=SimpleNamespace(write_paused=is_unread))
        one.transport.abort = lambda: ended.append(one)
        one.transport.get_write_buffer_size = lambda: 60
        return one

    def sweep(at, *connections):
        ended.clear()
        monkeypatch.setattr(time, "monotonic", lambda: at)
        idle.sweep(connections)
        return list(ended)

    ended = []
    idle = Idle(Limits(connections=2, header_seconds=10, unread_seconds=30, held_bytes=100))
    asking = SimpleNamespace(response_complete=False)
    old, busy, unread, new = connection(), connection(asking), connection(asking, True), connection()
    assert sweep(0, old, busy) == [] and sweep(5, old, busy, new) == [old], "the longest idle"
    assert sweep(6, busy, unread) == [] and sweep(35, busy, unread) == []
    assert sweep(37, busy, unread) == [unread], "nobody reads its response"
    later = connection(asking, True)
    assert sweep(38, later) == [] and sweep(39, connection(asking, True), later) == [later], "too many bytes"
    assert sweep(40, new) == [] and sweep(51, new) == [new], "no request came"
    other = connection(SimpleNamespace(response_complete=False))
    assert sweep(60, busy, other) == [] and sweep(61, busy, other, last := connection(asking)) == [last]


def test_without_an_index_the_model_is_served_and_an_index_that_comes_is_seen(embedder, served, monkeypatch):
    async def main(client):
        monkeypatch.setenv("LAPCLIP_CACHE", str(served.folder / "none"))
        told = (await client.get("/search", params={"q": "cat"})).json()
        assert "nothing is indexed" in told["error"]
        assert f"lapclip index ~/Pictures --model {embedder.name}`" in told["hint"]
        assert (await client.get("/thumbnail/1")).status_code == 404
        assert (await client.get("/health")).json()["num_pictures"] == 0
        image, kind = (served.photos / "03.jpg").read_bytes(), {"content-type": "image/jpeg"}
        answer = await client.post("/classify?label=a&label=b", content=image, headers=kind)
        assert answer.status_code == 200
        assert (await client.post("/embed", json={"texts": ["a"]})).status_code == 200
        monkeypatch.setenv("LAPCLIP_CACHE", str(served.folder / "cache"))
        first = (await client.get("/search", params={"q": "cat"})).json()["results"][0]["id"]
        answered = ("/", "/static/search.js", "/openapi.json", f"/thumbnail/{first}", f"/picture/{first}")
        for path in (*answered, f"/search?like={first}&folder=", f"/classify?id={first}&label=a"):
            assert (await client.get(path)).status_code == 200, path
        refused = {f"/search?{wrong}": 400 for wrong in ("tpo=1", "q=a&q=b", "q=%ff", "q=a&top=x")}
        for path, status in (refused | {"/thumbnail/0": 404, "/static/x.js": 404, "/none": 404}).items():
            assert (await client.get(path)).status_code == status, path

    with_client(main, embedder)


def test_elsewhere_it_answers_to_its_own_names_only_and_needs_a_token():
    assert is_local("localhost") and is_local("127.8.8.8") and not is_local("0.0.0.0")
    assert not is_local("127.0.0.1", ("photos.example",)), "by that name others ask"
    hosts = hosts_of(names_of("0.0.0.0"), 8000, ["photos.example"])
    assert {"localhost:8000", "photos.example", "photos.example:8000"} <= hosts
    assert f"{socket.gethostname().lower()}:8000" in hosts and "0.0.0.0:8000" not in hosts
    with pytest.raises(UserError, match="not an address of this machine"):
        is_local("no.such.machine.invalid")
    with pytest.raises(UserError, match="not a host name"):
        hosts_of([], 8000, ["*"])
    for token in ("short", "with spaces in between them", "semicolons;and;more;of;them", "\xe9" * 20):
        with pytest.raises(UserError, match="invalid token"):
            checked_token(token)


def test_what_cannot_be_served_is_said(call):
    done = call("serve", "--no-open")
    assert done.returncode == 1 and "there is no model" in done.stderr and "lapclip train" in done.stderr
    assert "`--rate 0`" in call("serve", "--rate", "0").stderr
    assert "cannot serve on" in call("serve", "--host", "203.0.113.7", "--port", "8999").stderr


def test_without_images_the_hint_indexes_with_the_model_that_is_served(call, monkeypatch, tmp_path):
    monkeypatch.setattr("lapclip.serve.http.serve", lambda *_: None)
    monkeypatch.setattr("lapclip.machine.device.set_up_process", lambda *_, **__: None)
    make_run(tmp_path / "runs" / "mine", 1)
    for flags in ([], ["--model", "mine"]):
        said = call("serve", "--no-open", *flags).stderr
        assert "no images yet; `lapclip index ~/Pictures --model mine` adds some" in said
