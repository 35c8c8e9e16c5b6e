"""What is published with the code agrees with it: version, licences of other people's files, the container."""

import re
import tomllib

from conftest import ROOT

from lapclip import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_changelog_and_citation_name_this_version():
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert newest and cited and newest[1] == cited[1] == __version__


def test_the_licence_of_every_file_of_others_is_published_with_it():
    pages = ROOT / "src" / "lapclip" / "page"
    projects = {path.name.partition(".")[0] for path in pages.glob("*.min.*")}  # no page of ours is minified
    licences = {path.name.partition(".")[0]: path for path in pages.glob("*.LICENSE")}
    assert projects and projects == licences.keys()
    published = {"LICENSE", *(str(path.relative_to(ROOT)) for path in licences.values())}
    assert set(PROJECT["license-files"]) == published
    assert all("Permission is hereby granted" in path.read_text() for path in licences.values())


def test_the_container_has_what_it_copies_and_runs_as_a_user_without_rights():
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    copied = [word for line in lines if re.match(r"COPY (?!--from)", line) for word in line.split()[1:-1]]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied and set(copied) == let_in and all((ROOT / name).exists() for name in copied)
    last = lines[max(number for number, line in enumerate(lines) if line.startswith("FROM")) :]
    assert "USER 1000" in last and 'ENTRYPOINT ["lapclip"]' in last
    needed = [PROJECT["readme"], *PROJECT["license-files"]]
    assert all(name in copied or name.startswith("src/") for name in needed), "else it cannot be built there"
