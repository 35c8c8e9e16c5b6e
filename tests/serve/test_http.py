"""The page's server in a process of its own: whom it answers, which files it gives, what a stream tells."""

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import begin, command, lapclip, wait_for
from made_events import evaluated, finished, inspected, started, step

from lapclip.errors import UserError
from lapclip.runs.events import Evaluated, Warned, to_line
from lapclip.runs.history import Summary
from lapclip.runs.run import Run
from lapclip.serve.http import FIRST_PORT, HEADERS, address_of, listen
from lapclip.serve.watch import MAX_STREAMS
from lapclip.view.live import columns_of, now_of

pytestmark = pytest.mark.slow


def write_run(path: Path, *events) -> Run:
    (path / "snapshots" / "pictures").mkdir(parents=True)
    (path / "config.toml").write_text("")
    (path / "snapshots" / "step-000005.json").write_text('{"step": 5}')
    (path / "snapshots" / "pictures" / "000012.jpg").write_bytes(b"\xff\xd8 a picture")
    append(Run(path), *events)
    return Run(path)


def append(run: Run, *events) -> None:
    with (run.path / "events.jsonl").open("a") as file:
        file.writelines(to_line(event) for event in events)


class Server:
    """A server in a process, and its answers."""

    command = ("watch", "--web")

    def __init__(self, folder: Path, *arguments: str, port: int = 0, program: list[str] | None = None):
        program = program or command(*self.command, "--no-open", "--port", str(port), *arguments)
        self.process = begin(folder, *program, stderr=subprocess.PIPE)
        said = self.process.stderr.readline()
        if "http://127.0.0.1:" not in said:
            pytest.fail(said + self.stop(signal.SIGKILL))
        self.port = int(re.search(r"127\.0\.0\.1:(\d+)/", said)[1])
        self.address = f"http://127.0.0.1:{self.port}/"

    def ask(self, path: str, body: object = None, method: str | None = None, **headers: str):
        method = method or ("GET" if body is None else "POST")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            if body is not None and "content-type" not in named:
                named["content-type"] = "image/jpeg" if isinstance(body, bytes) else "application/json"
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, named)
            answer = connection.getresponse()
            answer.body = answer.read()
            return answer

    def told(self, path: str, body: object = None, **headers: str) -> dict:
        answer = self.ask(path, body, **headers)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    def refused(self, status: int, path: str, body: object = None, **more: str) -> str:
        answer = self.ask(path, body, **more)
        told = json.loads(answer.body)
        assert answer.status == status and set(told) == {"error", "hint"}, (answer.status, told, path)
        return told["error"]

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.sendall(sent)
        return connection

    def stop(self, number: int = signal.SIGTERM) -> str:
        self.process.send_signal(number)
        try:
            return self.process.communicate(timeout=20)[1]
        finally:
            self.process.kill()


class Stream(contextlib.closing):
    """A stream as a browser reads it."""

    def __init__(self, server: Server, run: str, last: str | None = None):
        super().__init__(self)
        again = f"Last-Event-ID: {last}\r\n" if last else ""
        request = f"GET /stream?run={run} HTTP/1.1\r\nHost: localhost:{server.port}\r\n{again}\r\n"
        self.socket = server.connect(request.encode())
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        while self.file.readline().strip():
            pass

    def next(self) -> tuple[str, dict]:
        """The next message; chunk sizes, empty lines and heartbeats are passed over."""
        fields = {}
        while "data" not in fields:
            line = self.file.readline()
            assert line, "the stream has ended"
            name, _, value = line.decode().rstrip("\r\n").partition(": ")
            fields[name] = value
        self.last, self.retry = fields["id"], fields.get("retry")
        return fields["event"], json.loads(fields["data"], parse_constant=refuse_constant)

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    events = [started(), *map(step, range(1, 6)), evaluated(5, "snapshots/step-000005.json")]
    write_run(folder / "runs" / "first", *events)
    (folder / "secret.txt").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    server = Server(folder)
    yield server
    assert server.stop() == "", "a good server says nothing more"


@pytest.fixture
def live(folder, request):
    """A run of the test's own."""
    name = re.sub(r"\W", "-", request.node.name)[-60:]
    return write_run(folder / "runs" / name, started(), *map(step, range(1, 4)))


def test_the_page_refers_only_to_files_that_are_served_and_every_answer_keeps_other_sites_out(server):
    page = server.ask("/").body.decode()
    names = re.findall(r'(?:src|href)="(/[^"]*)"', page)
    assert len(names) >= 6 and not re.search("http:|https:|<script>| style=", page)
    assert all(server.ask(name).status == 200 for name in names)
    assert "javascript" in server.ask("/static/watch.js").getheader("content-type")
    for path in ("/", "/static/watch.css", "/runs", "/nothing", "/snapshots/first/step-000005.json"):
        assert HEADERS.items() <= dict(server.ask(path).getheaders()).items(), path
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    for path in ("/", "/runs", "/static/watch.css", "/stream?run=first"):
        answer = server.ask(path, method="HEAD")
        assert answer.status == 200 and answer.getheader("content-type")


def test_other_names_and_other_sites_reach_nothing_but_a_person_may_follow_their_link(server):
    """The search page's tests have all cases."""
    answer = server.ask("/runs", Host=f"evil.example:{server.port}")
    assert answer.status == 421 and b"first" not in answer.body
    assert f"http://127.0.0.1:{server.port}/" in json.loads(answer.body)["hint"]
    for path in ("/stream?run=first", "/snapshots/first/pictures/000012.jpg"):
        assert server.ask(path, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403
    followed = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert server.ask("/?run=first", **followed).status == 200
    server.refused(403, "/runs", **followed)
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        answer = server.ask("/runs", method=method)
        assert (answer.status, answer.getheader("allow")) == (405, "GET, HEAD")


NOT_SERVED = [
    "/static/", "/static/../web.py", "/static/%2e%2e%2fweb.py", "/static/uPlot.LICENSE", "/runs/first/events.jsonl",
    "/snapshots/first/", "/snapshots/first/config.toml", "/snapshots/first/../config.toml",
    "/snapshots/first/%2e%2e/config.toml", "/snapshots/first/..%2f..%2f..%2fsecret.txt",
    "/snapshots/first/pictures/../../config.toml", "/snapshots/first/pictures/000012.jpg%00",
    "/snapshots/first/step-%0a000005.json", "/snapshots/first//etc/passwd", "/snapshots/../step-000005.json",
    "/snapshots/%2e%2e/step-000005.json", "/snapshots/none/step-000005.json", "/snapshots/first/step-000006.json",
    "/snapshots/first/step-%D9%A5.json", "/stream?run=../first", "/stream?run=", "/stream", "//evil.example/",
]  # fmt: skip


def test_a_snapshot_and_its_images_can_be_read_and_nothing_else(server):
    assert server.told("/snapshots/first/step-000005.json") == {"step": 5}
    image = server.ask("/snapshots/first/pictures/000012.jpg")
    assert image.getheader("content-type") == "image/jpeg" and image.body.startswith(b"\xff\xd8")
    for path in NOT_SERVED:
        server.refused(404, path)


def test_a_link_out_of_the_run_is_refused_and_one_inside_is_not(server, folder):
    snapshots = folder / "runs" / "first" / "snapshots"
    (snapshots / "pictures" / "000077.jpg").symlink_to(folder / "secret.txt")
    (snapshots / "pictures" / "000078.jpg").symlink_to("000012.jpg")
    (snapshots / "pictures" / "000079.jpg").symlink_to("000079.jpg")
    os.mkfifo(snapshots / "pictures" / "000080.jpg")
    for number, status in ((77, 404), (78, 200), (79, 404), (80, 404)):
        assert server.ask(f"/snapshots/first/pictures/{number:06}.jpg").status == status, number


def test_a_linked_folder_of_snapshots_is_refused_but_a_linked_run_is_not(server, folder, live):
    (folder / "album" / "pictures").mkdir(parents=True)
    (folder / "album" / "pictures" / "000012.jpg").write_bytes(b"\xff\xd8 private")
    (folder / "runs" / "linked").symlink_to(live.path)
    image = "pictures/000012.jpg"
    assert server.ask(f"/snapshots/linked/{image}").status == 200
    (live.path / "snapshots").rename(live.path / "own")
    (live.path / "snapshots").symlink_to(folder / "album")
    assert server.ask(f"/snapshots/{live.name}/{image}").status == 404
    (live.path / "snapshots").unlink()
    (live.path / "snapshots").mkdir()
    (live.path / "snapshots" / "pictures").symlink_to(folder / "album" / "pictures")
    assert server.ask(f"/snapshots/{live.name}/{image}").status == 404


def test_a_stream_begins_with_everything_and_goes_on_with_what_is_new(server, live):
    with Stream(server, live.name) as stream:
        kind, told = stream.next()
        assert (kind, told["steps"]["step"], stream.retry) == ("history", [1, 2, 3], "1500")
        append(live, step(4), step(5), inspected(5), evaluated(5, "snapshots/step-000005.json"))
        kind, told = stream.next()
        assert (kind, told["steps"]["step"]) == ("more", [4, 5])
        assert told["inspections"]["norms"] == [{"image.0": 1.0, "text.0": 2.0}]
        assert told["evaluations"]["snapshot"] == ["snapshots/step-000005.json"]
        assert told["now"]["figures"][0] == {"name": "loss", "value": "2.000", "note": "validation 2.100"}
        with Stream(server, live.name) as late:
            assert late.next()[1]["steps"]["step"] == [1, 2, 3, 4, 5]
            append(live, step(6))
            assert [one.next()[1]["steps"]["step"][-1] for one in (stream, late)] == [6, 6]


def test_a_stream_that_comes_back_gets_everything_unless_nothing_is_new(server, live):
    with Stream(server, live.name) as stream:
        stream.next()
    with Stream(server, live.name, stream.last) as again:
        kind, told = again.next()
        assert (kind, told["steps"]) == ("more", {})
        append(live, step(4))
        assert again.next()[1]["steps"]["step"] == [4]
    for last in (stream.last, "nonsense", "1-2", "9" * 5000 + "-1", "-", "0-0"):
        with Stream(server, live.name, last) as stream:
            kind, told = stream.next()
            assert (kind, told["steps"]["step"]) == ("history", [1, 2, 3, 4])


def test_a_file_that_was_replaced_is_told_again(server, live):
    with Stream(server, live.name) as stream:
        stream.next()
        events = live.path / "events.jsonl"
        beside = events.with_suffix(".new")
        beside.write_text(to_line(started()) + to_line(step(1)))
        beside.replace(events)
        kind, told = stream.next()
        assert (kind, told["steps"]["step"]) == ("history", [1])
        events.write_text("")  # cut short, the same file
        kind, told = stream.next()
        assert (kind, told["steps"]) == ("history", {})


def test_what_a_killed_process_lost_is_taken_back_and_no_number_is_sent_that_json_lacks(server, live):
    with Stream(server, live.name) as stream:
        stream.next()
        append(live, started(step=2), step(3, loss=1.0))
        kind, told = stream.next()
        assert kind == "history"
        assert (told["steps"]["step"], told["steps"]["loss"]) == ([1, 2, 3], [2.0, 2.0, 1.0])
        norms = {"a": float("nan"), "b": 1.0}
        append(live, step(4, loss=float("inf")), inspected(4, grad_norms=norms), step(5))
        told = stream.next()[1]
        assert (told["steps"]["step"], told["inspections"]["norms"]) == ([5], [{"b": 1.0}])


def test_a_process_that_dies_without_a_word_is_noticed(server, live):
    program = (
        "import sys, time; from pathlib import Path; from lapclip.runs.run import Run; from test_http import *\n"
        "run = Run(Path(sys.argv[1]))\n"
        "with run.owned(): append(run, started(time=time.time())); print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(live.path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent)
    try:
        assert holder.stdout.readline() == b"ready\n"
        with Stream(server, live.name) as stream:
            assert stream.next()[1]["now"]["state_words"] == "running"
            holder.kill()
            kind, told = stream.next()
            assert (kind, told["now"]["state"], told["steps"]) == ("more", "crashed", {})
            assert f"--resume {live.name}" in told["now"]["sentence"]
    finally:
        holder.kill()
        holder.communicate()


def test_streams_are_bounded_and_a_closed_one_makes_room(server):
    with contextlib.ExitStack() as streams:
        for _ in range(MAX_STREAMS):
            assert streams.enter_context(Stream(server, "first")).next()[0] == "history"
        assert server.ask("/stream?run=first").status == 503
    wait_for(lambda: has_room(server), 5)


def test_idle_connections_make_room_and_end_no_stream(folder, live):
    """Also where few files may be open, of which a connection is one."""
    serve = shlex.join(map(str, command("watch", "--web", "--no-open", "--port", "0")))
    server = Server(folder, program=["sh", "-c", f"ulimit -n 256 && exec {serve}"])
    with contextlib.ExitStack() as opened:
        opened.callback(server.process.kill)
        stream = opened.enter_context(Stream(server, live.name))
        stream.next()
        for sent in (b"", b"nonsense\r\n\r\n"):
            idle = [opened.enter_context(server.connect(sent)) for _ in range(600)]
            wait_for(lambda idle=idle: sum(map(is_open, idle)) < 64, 5)
            assert server.told("/runs")["runs"]
        append(live, step(4))
        assert stream.next()[1]["steps"]["step"] == [4]
        assert server.stop() == "", "no failure is printed"


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(4096) != b""
    except OSError as problem:
        return isinstance(problem, BlockingIOError)


def has_room(server) -> bool:
    with Stream(server, "first") as stream:
        return stream.status == 200 and stream.next()[0] == "history"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_at_once_also_with_open_streams(folder, number):
    server = Server(folder, "first")
    with Stream(server, "first") as stream:
        stream.next()
        began = time.monotonic()
        said = server.stop(number)
        assert time.monotonic() - began < 10
        assert "Traceback" not in said and "ERROR" not in said
    assert server.process.returncode == (0 if number == signal.SIGINT else -signal.SIGTERM)


def test_the_run_that_was_asked_for_is_shown_also_by_its_path(folder, tmp_path):
    elsewhere = write_run(tmp_path / "elsewhere", started(), step(1))
    server = Server(folder, str(elsewhere.path))
    try:
        told = server.told("/runs")
        words = {run["name"]: run["words"] for run in told["runs"]}
        assert told["shown"] == "elsewhere" and {"elsewhere", "first"} <= words.keys()
        assert words["first"] == "crashed, step 5, recall@1 20.0%"
        with Stream(server, "elsewhere") as stream:
            assert f"--resume {elsewhere.path}" in stream.next()[1]["now"]["sentence"]
    finally:
        server.stop()


def test_a_run_that_is_not_there_is_said_before_anything_is_served():
    done = lapclip("watch", "--web", "--no-open", "none")
    assert done.returncode == 1 and "there is no run `none`" in done.stderr


def test_the_next_free_port_is_taken_but_one_that_was_asked_for_is_not_changed():
    with listen(None) as one, listen(None) as two:
        assert FIRST_PORT <= one.getsockname()[1] < two.getsockname()[1]
        assert one.getsockname()[0] == "127.0.0.1" and address_of(one).startswith("http://127.0.0.1:")
        with pytest.raises(UserError, match=f"port {one.getsockname()[1]}: address already in use"):
            listen(one.getsockname()[1])
    with pytest.raises(UserError, match="there is no port 70000"):
        listen(70000)


def test_the_page_is_told_what_was_measured_and_what_was_not():
    def now(*events, state="running", **machine):
        summary = Summary(Run(Path("runs/a")))
        summary.history.extend([started(), *events])
        summary.state, summary.is_preparing, summary.machine = state, False, machine
        return now_of(summary)

    warnings = [Warned(1, "slow", "", "slower"), Warned(9, "slower yet", "", "slower"), Warned(3, "x", "y")]
    told = now(step(1), inspected(1), evaluated(1), *warnings, bench={"pairs_per_second": 455.0})
    assert dict(told["readings"])["temperature"] == dict(told["readings"])["battery"] == "not measured"
    assert {"name": "activations", "share": None, "words": "not measured"} in told["memory"]
    shown = [(warning["message"], warning["when"]) for warning in told["warnings"]]
    assert shown == [("x", "step 3"), ("slower yet", "step 9")], "each kind once"
    references = {"accuracy": 0.125, "recall_1": 0.01, "recall_10": 0.1, "negatives": 0.1}
    assert told["lines"] == references | {"pairs_per_second": 455.0}
    read = {"temperature": 71.4, "power_watts": 14.24, "power_of": "package"}
    read |= {"battery": 80, "is_plugged": False}
    readings = dict(now(step(1), inspected(1, readings=read))["readings"])
    shown = [readings[name] for name in ("temperature", "power", "battery")]
    assert shown == ["71 °C", "14.2 W (package)", "80%, not plugged in"]
    told = now(step(999), finished(1000, epochs=2.0, seconds=90.0), state="finished")
    assert told["progress_words"] == "100%" and "1,000 steps, 2.00 epochs in 1m30s" in told["sentence"]
    old = Evaluated(5, {"text_to_image": {}, "image_to_text": {}}, True, 0.1)
    assert columns_of([old])["evaluations"]["easy"] == [None] and not now(step(5), old)["is_over"]
