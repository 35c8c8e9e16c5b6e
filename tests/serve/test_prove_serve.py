"""The long proofs of the server, for `make prove`: every input there is, many slow clients, much load."""

import contextlib
import http.client
import io
import json
import random
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT, picture_folder
from PIL import Image
from test_serve import Served, check_schema, index, upload, write_model

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]
BENCHMARK = ROOT / "benchmarks" / "serving.py"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The default size of model, and some images."""
    folder = tmp_path_factory.mktemp("proved")
    picture_folder(folder / "photos", 40, side=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LAPCLIP_CACHE", str(folder / "cache"))
        write_model(folder / "mine", size="tiny")
        index(folder / "mine", folder / "photos")
        server = Served(folder)
    yield server
    server.process.terminate()
    said = server.process.communicate(timeout=20)[1]  # libtiff complains of broken files by itself
    assert "Traceback" not in said and "Exception" not in said, said


def test_schemathesis_finds_nothing(served, tmp_path):
    check_schema(served, tmp_path, "--max-examples", "100", "--continue-on-failure")


def test_an_upload_of_a_gigabyte_is_refused_in_steady_memory(served):
    before = served.memory
    with served.connect(upload(served, "Transfer-Encoding: chunked", "")) as connection:
        piece = f"{MEGABYTE:x}\r\n".encode() + bytes(MEGABYTE) + b"\r\n"
        most = before
        with contextlib.suppress(OSError):  # it is ended when the patience ends
            for number in range(1024):
                connection.sendall(piece)
                if number % 16 == 0:
                    most = max(most, served.memory)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    assert most - before < 150 * MEGABYTE
    assert served.told("/health")["status"] == "ok"


def test_two_hundred_slow_clients_keep_nobody_waiting(served):
    begun = [b"", b"G", upload(served), upload(served, "Content-Length: 1000", "") + b"xyz"]
    slow = [served.connect(begun[number % 4]) for number in range(200)]
    is_over = threading.Event()

    def drip() -> None:
        while not is_over.wait(0.3):
            for number, connection in enumerate(slow):
                with contextlib.suppress(OSError):
                    connection.sendall(b"X: y\r\n" if number % 4 == 2 else b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    try:
        waits = []
        for number in range(50):
            started = time.perf_counter()
            assert served.told("/embed", {"texts": [f"text {number}"]})["width"]
            waits.append(time.perf_counter() - started)
            time.sleep(0.05)
        assert sorted(waits)[45] < 0.5
    finally:
        is_over.set()
        dripping.join()
        for connection in slow:
            connection.close()


def encoded_images() -> list[bytes]:
    image = Image.radial_gradient("L").resize((120, 90)).convert("RGB")
    kinds = [(kind, {}) for kind in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP")]
    kinds += [("JPEG", {"progressive": True}), ("TIFF", {"compression": "tiff_lzw"})]
    found = [io.BytesIO() for _ in kinds]
    for out, (kind, options) in zip(found, kinds, strict=True):
        image.save(out, kind, **options)
    return [out.getvalue() for out in found]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, some left out, some repeated, or cut short; its beginning more often than the rest."""
    new = bytearray(data)
    for _ in range(chance.choice([1, 2, 5, 30])):
        place = int(len(new) * chance.random() ** chance.choice([1, 4]))
        match chance.randrange(4):
            case 0:
                new[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                new[place : place + 4] = chance.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"])
            case 2:
                del new[place : place + chance.randrange(50)]
            case 3:
                new[place:place] = new[place : place + chance.randrange(200)]
    return bytes(new[: chance.randrange(1, len(new) + 1)] if chance.random() < 0.1 else new)


def test_broken_images_break_nothing(served):
    chance = random.Random(7)
    images = encoded_images()
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    counts: dict[int, int] = {}
    for number in range(600):
        body = mutated(images[number % len(images)], chance)
        connection.request("POST", "/embed", body, {"content-type": "image/png"})
        answer = connection.getresponse()
        answer.read()
        counts[answer.status] = counts.get(answer.status, 0) + 1
    connection.close()
    assert set(counts) == {200, 415} and min(counts.values()) > 20, counts
    assert served.memory < 2 << 30


def test_under_load_for_a_minute_nothing_fails_and_memory_stays(served, capsys):
    command = [sys.executable, BENCHMARK, "--model", "-", "--port", str(served.port), "--clients", "64"]
    subprocess.run([*command, "--seconds", "8"], check=True, capture_output=True)  # until all is warm
    before = served.memory
    load = subprocess.Popen([*command, "--seconds", "60"], stdout=subprocess.PIPE, text=True)
    most = before
    while load.poll() is None:
        most = max(most, served.memory)
        time.sleep(0.5)
    told = json.loads(load.communicate()[0])
    megabytes = f"{before / MEGABYTE:.0f} MB, then up to {most / MEGABYTE:.0f}"
    with capsys.disabled():
        print(f"\n64 clients for 60 s: {told}, memory {megabytes}")
    assert told["num_errors"] == 0
    assert most - before < 64 * MEGABYTE
