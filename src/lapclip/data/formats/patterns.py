"""Shards as a person writes them: braces, globs, URLs and `::` between several; one path or URL for each comes out."""

import glob
import os
import re
from collections.abc import Iterator
from itertools import islice
from urllib.parse import unquote

from lapclip.data.formats.remote import attempt, filesystem
from lapclip.errors import UserError

MOST_SHARDS = 100_000
MOST_BRACES = 100
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# What would run a program, or open another file within one: shards are read from where they lie.
REFUSED = {
    "pipe", "simplecache", "filecache", "blockcache", "cached", "reference", "zip", "tar", "libarchive",
    "dir", "dask", "generic", "data", "git", "dvc", "jlab", "jupyter", "async_wrapper", "asyncwrapper", "asynclocal",
}  # fmt: skip
BETWEEN = re.compile(r"::(?![0-9a-fA-F:.]*\])")  # not within an IPv6 address
NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])")


def is_shards(name: str) -> bool:
    """Whether a source's name is that of tar shards; told by the name alone."""
    parts = [without_query(part).rstrip("}").lower() for part in BETWEEN.split(name)]
    return all(part.endswith((".tar", *COMPRESSED)) for part in parts) or name.lower().startswith("pipe:")


def is_url(path: str) -> bool:
    return "://" in path


def without_query(url: str) -> str:
    return re.split(r"[?#]", url, maxsplit=1)[0] if url.startswith(("http://", "https://")) else url


def expand(pattern: str) -> list[str]:
    """Every shard that a pattern means, each once; UserError when there is none, or far too many."""
    shards: dict[str, None] = {}
    for written in BETWEEN.split(pattern):
        refuse(written, pattern)
        is_file = written.lower().startswith("file://")
        part = unquote(written[len("file://") :].removeprefix("localhost")) if is_file else written
        names = [part] if os.path.exists(part) else list(islice(braces(part), MOST_SHARDS + 1))
        for name in names:
            shards.update(dict.fromkeys(matching(name)))
            if len(names) > MOST_SHARDS or len(shards) > MOST_SHARDS:
                raise UserError(
                    f"`{pattern}` means more than {MOST_SHARDS:,} shards",
                    hint="check the numbers in its braces",
                )
    if not shards:
        raise UserError(f"no shard matches `{pattern}`", hint="give shards that exist, as in `folder/*.tar`")
    return list(shards)


def refuse(part: str, pattern: str) -> None:
    if without_query(part).rstrip("}").lower().endswith(COMPRESSED):
        raise UserError(
            f"`{part}` is compressed, so that single images cannot be reached",
            hint="unpack it first, as with `gunzip`, and give the `.tar`",
        )
    protocol, colon, _ = part.lower().partition(":")
    if protocol in REFUSED and (colon or part != pattern):
        raise UserError(
            f"`{part}` is not opened: `{protocol}:` would run a program or open a file within another",
            hint="copy the shards to a folder and give `folder/*.tar`",
        )
    if part.count("{") > MOST_BRACES:
        raise UserError(f"a pattern of more than {MOST_BRACES} braces is not read", hint="use fewer braces")


def matching(name: str) -> list[str]:
    """The shards of a name without braces: those that its stars stand for, or itself."""
    if not is_url(name):
        if os.path.isdir(name):
            name = os.path.join(glob.escape(name), "*.tar")
        if os.path.exists(name) or not glob.has_magic(name):
            return [os.path.normpath(name)]
        found = sorted(islice(glob.iglob(name, recursive=True), MOST_SHARDS + 1))
        return [os.path.normpath(path) for path in found if not os.path.isdir(path)]
    if "*" not in name:
        return [name]
    if name.startswith(("http://", "https://")):
        raise UserError(
            f"`{name}` cannot be listed, as web servers do not say what files they have",
            hint="write the numbers out, as in `shard-{00000..00012}.tar`",
        )
    files, path = filesystem(name)
    try:
        return [str(files.unstrip_protocol(found)) for found in sorted(attempt(name, files.glob, path))]
    except OSError as error:
        raise UserError(str(error), hint="check the address, and that you may read it") from error


def braces(pattern: str) -> Iterator[str]:
    """What a shell makes of braces, one at a time: `{00..12}`, `{0..12..3}`, `{a..c}`, `{train,val}`, nested."""
    found = first_braces(pattern)
    if not found:
        yield pattern
        return
    head, body, tail = found
    for choice in choices(body):
        for middle in braces(choice):
            for rest in braces(tail):
                yield head + middle + rest


def first_braces(pattern: str) -> tuple[str, str, str] | None:
    """What comes before, within and after the first braces that hold a choice."""
    opened: list[int] = []
    pairs = []
    for place, character in enumerate(pattern):
        if character == "{":
            opened.append(place)
        elif character == "}" and opened:
            pairs.append((opened.pop(), place))
    for start, end in sorted(pairs):
        body = pattern[start + 1 : end]
        if len(split(body)) > 1 or NUMBERS.fullmatch(body) or LETTERS.fullmatch(body):
            return pattern[:start], body, pattern[end + 1 :]
    return None


def choices(body: str) -> Iterator[str]:
    if numbers := NUMBERS.fullmatch(body):
        first, last, step = numbers.groups()
        begin, end = int(first), int(last)
        is_padded = any(re.match(r"-?0\d", text) for text in (first, last))
        width = max(len(first), len(last)) if is_padded else 0
        stride = (abs(int(step or 1)) or 1) * (1 if end >= begin else -1)
        for value in range(begin, end + (1 if stride > 0 else -1), stride):
            yield f"{value:0{width}d}"
    elif letters := LETTERS.fullmatch(body):
        begin, end = map(ord, letters.groups())
        stride = 1 if end >= begin else -1
        yield from map(chr, range(begin, end + stride, stride))
    else:
        yield from split(body)


def split(body: str) -> list[str]:
    """Parts between commas that lie in no further braces."""
    parts, depth = [""], 0
    for character in body:
        depth += (character == "{") - (character == "}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
