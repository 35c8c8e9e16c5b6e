"""Pretrained models from the hub, served here by a stand-in: fetched whole, resumed, refused with a sentence."""

import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import picture_folder
from test_model_folders import save_clip

from lapclip.embedder import load
from lapclip.errors import UserError
from lapclip.units import finished
from lapclip.weights import hub

COMMIT = "0123456789abcdef" * 2 + "01234567"
REFERENCE = "hf-hub:me/tiny"


class Hub:
    """The hub's interface for one repository, `me/tiny`."""

    def __init__(self):
        self.files: dict[str, bytes] = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 20_000}
        self.listed: dict[str, bytes] | None = None  # what it says that it has, where that differs
        self.sha = COMMIT
        self.refusal: tuple[int, str] | None = None  # status and code
        self.cut_after: int | None = None  # bytes of the weights
        self.num_sent = dict.fromkeys(self.files, 0)
        self.asked: list[str] = []

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        if self.refusal or "/me/tiny" not in request.path:
            status, code = self.refusal or (404, "RepoNotFound")
            self.send(request, status, b"", {"X-Error-Code": code})
        elif request.path.startswith("/api/"):
            listed = {
                "id": "me/tiny", "sha": self.sha, "tags": ["license:bsd"],
                "siblings": [
                    {"rfilename": name, "size": len(data), "lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 9}}
                    for name, data in (self.listed or self.files).items()
                ],
            }  # fmt: skip
            self.send(request, 200, json.dumps(listed).encode())
        elif request.path == f"/me/tiny/resolve/{self.sha}/model.safetensors":  # large files are elsewhere
            self.send(request, 302, b"", {"Location": f"/elsewhere{request.path}"})
        else:
            assert f"/me/tiny/resolve/{self.sha}/" in request.path
            name = request.path.rpartition("/")[2]
            start = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
            data = self.files[name][start:]
            cut = self.cut_after if name == "model.safetensors" else None
            self.num_sent[name] = self.num_sent.get(name, 0) + len(data[:cut])
            self.send(request, 206, data, {"X-Repo-Commit": self.sha}, cut)

    def send(self, request, status, body, headers=(), cut=None):
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body[:cut])
        request.close_connection = True


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def served(monkeypatch):
    stand_in = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            stand_in.answer(self)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=partial(server.serve_forever, poll_interval=0.01), daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield stand_in
        server.shutdown()


def fetch(reference: str = REFERENCE) -> Path:
    return finished(hub.fetch(reference))


def refused(reference: str = REFERENCE) -> UserError:
    with pytest.raises(UserError) as caught:
        fetch(reference)
    assert hub.local(REFERENCE) is None
    return caught.value


def test_a_model_is_fetched_once_with_only_the_files_it_needs(served):
    for name in (
        "pytorch_model.bin",
        "open_clip_model.safetensors",
        "model.py",
        "README.md",
        "onnx/model.safetensors",
    ):
        served.files[name] = b"not needed"
    folder = fetch()
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "origin.json"}
    origin = json.loads((folder / "origin.json").read_text())
    assert (origin["repository"], origin["commit"], origin["licence"]) == ("me/tiny", COMMIT, "bsd")
    assert origin["sha256"] == {
        name: sha256(served.files[name]) for name in ("config.json", "model.safetensors")
    }
    num_asked = len(served.asked)
    assert fetch() == fetch(f"{REFERENCE}@{COMMIT}") == hub.local(REFERENCE) == folder
    assert len(served.asked) == num_asked and hub.local(f"{REFERENCE}@other") is None


def test_a_download_that_was_cut_off_goes_on_where_it_was(served):
    served.cut_after = 3_000_000
    assert "what was downloaded is kept" in refused().hint
    served.cut_after = None
    work = hub.fetch(REFERENCE)
    first = next(now for now in work if now.done)
    assert (first.done, first.total) == (3, 5)
    work.close()  # stopped before anything was fetched
    folder = fetch()
    assert (folder / "model.safetensors").read_bytes() == served.files["model.safetensors"]
    assert served.num_sent == {name: len(data) for name, data in served.files.items()}


def test_what_arrives_damaged_is_not_kept(served):
    served.listed = served.files | {"model.safetensors": served.files["model.safetensors"][::-1]}
    assert "did not arrive" in refused().message
    served.listed = None
    assert fetch()


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ((404, "RepoNotFound"), "there is no public model `me/tiny`"),
        ((404, "RevisionNotFound"), "there is no public model `me/tiny`"),
        ((401, ""), "there is no public model `me/tiny`"),
        ((403, "GatedRepo"), "`me/tiny` requires access"),
        ((401, "GatedRepo"), "`me/tiny` requires access"),
        ((403, ""), "`me/tiny` requires access"),
        ((500, ""), "answered with status 500"),
    ],
)
def test_a_hub_that_refuses_is_one_sentence(served, refusal, said):
    served.refusal = refusal
    assert said in refused().message


def test_without_a_network_or_when_offline_it_says_so(served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE" in refused().message and not served.asked
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot reach a hub at `http://127.0.0.1:9`" in refused().message


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.safetensors.index.json", "../model.safetensors", "x/model.safetensors"],
)
def test_weights_that_could_execute_code_or_lie_elsewhere_are_not_fetched(served, name):
    served.files = {"config.json": b"{}", name: b"weights"}
    assert "has no `model.safetensors`" in refused().message
    assert all(path.startswith("/api/") for path in served.asked)


@pytest.mark.parametrize("sha", ["../../../../../../tmp/elsewhere", "", None])
def test_a_commit_that_is_none_is_refused(served, sha):
    served.sha = sha
    assert "names no commit" in refused().message


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "../tiny",
        "me/../tiny",
        "me/tiny/x",
        "me/..",
        "me--x/tiny",
        "me/tiny@../x",
        "-me/tiny",
        "me/ti*y",
    ],
)
def test_a_name_that_is_none_is_refused(name):
    assert "`hf-hub:OWNER/NAME[@REVISION]`" in refused(f"hf-hub:{name}").hint


def test_photos_are_searched_with_a_model_of_the_hub(served, call, tmp_path):
    save_clip(tmp_path / "theirs")
    served.files = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    picture_folder(tmp_path / "photos", 4)
    assert call("index", "photos", "--model", REFERENCE).returncode == 0
    num_asked = len(served.asked)
    found = json.loads(call("search", "house", "--model", REFERENCE, "--json").stdout)
    assert found and call("index").returncode == 0 and len(served.asked) == num_asked
    assert load(REFERENCE).name == REFERENCE
    assert call("eval", REFERENCE, "photos").returncode == 0

    [*listed, ours] = json.loads(call("models", "--json").stdout)["models"]
    assert [model["name"] for model in listed] == list(hub.MODELS) and ours["name"] == REFERENCE
    assert call("models", "remove", REFERENCE).returncode == 0 and hub.local(REFERENCE) is None
    assert call("search", "house").returncode == 0  # the index has its own copy


def test_getting_a_model_of_the_list_names_its_licence_and_the_next_command(served, call, monkeypatch):
    monkeypatch.setitem(hub.MODELS, "tiny-1m", hub.HubModel("me/tiny", COMMIT, 5, 1, "MIT", 24, "tests"))
    said = call("models", "get", "tiny-1m")
    assert said.returncode == 0 and "licence: MIT" in said.stderr
    assert "next: `lapclip index photos/ --model tiny-1m`" in said.stderr
    assert json.loads(call("models", "--json").stdout)["models"][-1]["path"] == str(hub.local("tiny-1m"))
    assert "did you mean `tinyclip-8m`" in call("models", "get", "tinyclip-8").stderr
    assert "`hf-hub:OWNER/NAME[@REVISION]`" in call("models", "get", "me/tiny").stderr


def test_a_model_of_the_list_is_not_downloaded_without_being_asked_for(served, call, tmp_path):
    picture_folder(tmp_path / "photos", 1)
    for command in (("index", "photos", "--model"), ("serve", "--no-open", "--model"), ("eval",)):
        said = call(*command, "tinyclip-8m").stderr
        assert "`tinyclip-8m` has not been downloaded" in said and "lapclip models get tinyclip-8m" in said
        assert "did you mean `tinyclip-8m`" in call(*command, "tinyclip-8").stderr
    with pytest.raises(UserError, match="has not been downloaded"):
        load("tinyclip-8m")
    with pytest.raises(UserError, match="did you mean `tinyclip-8m`"):
        load("tinyclip8m")
    assert not served.asked


def test_the_list_fits_a_terminal(call):
    lines = call("models").stdout.splitlines()
    assert len(lines) == 1 + len(hub.MODELS) and all("no" in line for line in lines[1:])
