"""The documentation: every console block runs, messages and reference pages equal the code, the site has no dead link."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import ROOT, SMALL, as_flags, environment, picture_folder

DOCS = ROOT / "docs"
GUIDES = {*DOCS.glob("guide-*.md"), DOCS / "index.md", DOCS / "troubleshooting.md"}
OTHERS = {page for page in DOCS.glob("*.md") if "```console" in page.read_text()}  # whatever shows a command
PAGES = [ROOT / "README.md", *sorted(GUIDES | OTHERS)]
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)

# Commands that would take minutes run with a small training instead; the words that people type stay the same.
SMALLER = " ".join(as_flags(SMALL | {"steps": 4, "eval_every": "4"}))


ELSEWHERE = ("git clone", "cd ", "make test", "make check", "make prove", "pip install", "source ")


def commands(page) -> list[str]:
    blocks = BLOCK.findall(page.read_text())
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def runnable(line: str) -> str | None:
    """The command as it is run here, or None for what a test cannot do (clone, or run itself)."""
    line = line.partition("  #")[0].strip()
    if line.startswith(ELSEWHERE):
        return None
    if line.startswith("make train"):
        return f"make --no-print-directory -C {shlex.quote(str(ROOT))} -n train >/dev/null && lapclip train {SMALLER}"
    if line.startswith("lapclip bench"):
        return f"{line} --size nano --image-size 16 --batch-size 8 --threads 1 --chunk 8"
    if line.startswith("lapclip train") and "--resume" not in line:
        small = (
            re.sub(r"--(minutes|epochs|steps|size|batch-size|chunk|threads|workers) \S+", "", f"{line} ")
            + SMALLER
        )
        if "--from" in line and "--size" not in line:  # whose model determines the size
            small = re.sub(r" --(image-)?size \S+", "", small)
        return small.replace(f"--source {SMALL['source']}", "") if "photos" in line else small
    if line.startswith("lapclip train --resume"):
        return re.sub(r"--minutes \S+", "--steps 6", line)
    return line


def what_people_have(path) -> None:
    """A folder with captions and a table, as the pages call them."""
    folder = picture_folder(path / "photos", 40)
    rows = [f"photos/{file.name},words about {file.stem}" for file in sorted(folder.glob("*.jpg"))]
    (path / "pairs.csv").write_text("\n".join(["image,caption", *rows]))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_a_page_shows_runs(page, tmp_path, call, quick):
    found = commands(page)
    assert found, "a page without a command teaches nothing"
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    what_people_have(tmp_path)
    for line in filter(None, map(runnable, found)):
        if line.startswith("lapclip ") and not set(line) & set("|>&"):
            here = call(*shlex.split(line)[1:])  # without another process, which would import torch again
            assert here.returncode == 0, f"{line}\n{here.stderr}"
            continue
        options = {"shell": True, "cwd": tmp_path, "capture_output": True, "text": True}
        done = subprocess.run(line, env=environment(PATH=path), **options)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


def test_the_first_screen_of_the_readme_is_the_two_commands():
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "$ make train" in screen and "$ make test" in screen


def test_no_page_replaces_the_editable_install():
    for page in PAGES:
        assert not re.search(r"pip install ['\"]?\.", page.read_text()), page.name


def test_the_set_up_says_what_pip_is_doing_and_why_it_failed(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import bootstrap

    lines = [
        "Collecting torch==2\n",
        "  Downloading torch-2.1+cpu-cp311-x.whl (532.1 MB)\n",
        "     0.1/532.1 MB\n",
    ]
    assert bootstrap.doing(lines) == ("downloading", "download torch-2.1+cpu (532.1 MB)")
    lines += ["Processing /wheels/numpy-2.4.6-cp311-x.whl (from lapclip)\n"]
    assert bootstrap.doing(lines) == ("downloading", "download numpy-2.4.6")
    lines += ["Installing collected packages: a, b, c\n"]
    assert bootstrap.doing(lines) == ("installing", "install 3 packages")
    with pytest.raises(SystemExit, match="no space left\nerror: could not install lapclip"):
        bootstrap.run([sys.executable, "-c", "raise SystemExit('no space left')"], "install lapclip")
    assert capsys.readouterr().err == "  install lapclip\n"


@pytest.mark.slow
def test_results_are_read_from_run_folders(call, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import results

    flags = as_flags(SMALL | {"steps": 2, "eval_every": "2"})
    assert call("train", "--run", "mine", *flags).returncode == 0
    header, _, row = results.table_of([results.summarize(results.open_run("mine"))]).splitlines()
    assert header.count("|") == row.count("|")
    command = shlex.split(row.split("`")[1])
    assert command[:3] == ["lapclip", "train", SMALL["source"]]
    assert set(command[3:]) == set(flags) - {"--source", SMALL["source"]}


@pytest.mark.parametrize("name", ["cli", "config"])
def test_reference_pages_equal_what_the_code_says(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import reference

    made = getattr(reference, f"{name}_page")()
    assert (ROOT / "docs" / f"{name}.md").read_text("utf-8") == made, "run `make docs`"


def test_troubleshooting_quotes_messages_as_the_code_has_them():
    trees = [ast.parse(file.read_text("utf-8")) for file in (ROOT / "src").rglob("*.py")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    code = "\n".join(str(node.value) for node in nodes)
    quoted = re.findall(
        r"^(?:error|warning|hint): (.*)", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(quoted) > 20
    for message in quoted:
        ours = re.sub(r"InvalidCxxCompiler.*", "", message)  # the rest is torch's
        # Names and numbers vary; the words between them are the code's.
        for words in re.split(r"`[^`]*`|[\d.%]*\d[\d.%]*|[;:,()]", ours):
            some = words.split()
            ways = [" ".join(part) for part in (some, some[1:], some[:-1])]  # a word at an end may vary too
            assert len(some) < 3 or any(way in code for way in ways), f"{words!r} of: {message}"


class Links(HTMLParser):
    """What a page loads, and where it leads to."""

    def __init__(self, page: Path):
        super().__init__()
        self.loaded, self.linked = [], []
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "srcset", "href", "data", "poster") and value:
                (self.linked if tag == "a" else self.loaded).append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation as `make docs` builds it, in a folder of its own."""
    folder = tmp_path_factory.mktemp("documentation")
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "No issues found" in built.stdout + built.stderr
    return folder / "site"


def test_the_site_has_a_page_for_each_document(site):
    pages = {page.stem for page in site.glob("*.html")} - {"404"}
    assert pages == {page.stem for page in DOCS.glob("*.md")}


def test_the_site_loads_nothing_from_other_hosts(site):
    for page in site.glob("*.html"):
        elsewhere = [url for url in Links(page).loaded if urlsplit(url).netloc]
        assert not elsewhere, f"{page.name} loads {elsewhere}"
        # The theme's script would fetch a library for these from another host.
        assert not re.search(r'class="[^"]*\b(mermaid|glightbox|arithmatex)\b', page.read_text("utf-8"))
    for file in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", file.read_text("utf-8")), file.name


def test_every_link_of_the_site_leads_somewhere(site):
    # The builder checks pages and anchors only, not images and other files.
    for page in site.glob("*.html"):
        found = Links(page)
        for url in [*found.loaded, *found.linked]:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc or not parts.path:
                continue
            target = (site / unquote(parts.path).lstrip("/")).resolve()
            assert target.is_relative_to(site) and target.exists(), f"{page.name} links to {url}"


def test_links_between_pages_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_no_page_knows_the_machine_it_was_written_on():
    for page in [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "benchmarks").glob("*.py")]:
        assert not re.search(r"/(root|home|work)/", page.read_text()), page.name
