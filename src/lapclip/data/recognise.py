"""Which kind of source a person means: seen by looking, forced by `--format`."""

import difflib
import os
from collections.abc import Callable
from pathlib import Path

from lapclip.data.catalogue import Catalogue, Options
from lapclip.errors import UserError

FOLDER_FORMATS = ("txt", "metadata", "classes", "names")
TABLE_FORMATS = ("csv", "tsv", "jsonl", "parquet", "flickr")
ANNOTATION_FORMATS = ("coco", "karpathy")
# In the order in which they are looked for in a folder.
FIRST_TABLES = (
    "metadata.jsonl",
    "metadata.csv",
    "metadata.parquet",
    "captions.txt",
    "results.csv",
    "captions.csv",
)
EXAMPLES = "a folder, a table, `captions_*.json`, `shards/*.tar`, `hf:NAME`, `emoji` or `synthetic`"


def open_catalogue(name: str, options: Options) -> tuple[Catalogue, str]:
    """What a source holds, and what identifies it wherever lapclip is called from."""
    from lapclip.data.sources.shards import is_shards, open_shards

    if name.startswith("hf:"):
        from lapclip.data.sources.hugging_face import open_hugging_face

        local, colon, config = name.removeprefix("hf:").partition(":")
        found = os.path.abspath(local) if os.path.exists(local) else local
        return open_hugging_face(name, options), f"hf:{found}{colon}{config}"
    if name == "emoji" or name.startswith("emoji:"):
        from lapclip.data.sources.emoji import open_emoji

        kind, colon, where = name.partition(":")
        return open_emoji(name, options), f"{kind}{colon}{os.path.abspath(where)}" if colon else kind
    if options.format == "tar" and Path(name).is_dir():
        name = os.path.join(name, "*.tar")
    if is_shards(name) or options.format == "tar":
        parts = [part if "://" in part else os.path.abspath(part) for part in name.split("::")]
        return open_shards(name, name, options), "::".join(parts)
    path = Path(name)
    if not path.exists():
        raise not_there(name)
    opener = open_directory if path.is_dir() else open_file
    return opener(path, name, options), os.path.abspath(name)


def not_there(name: str) -> UserError:
    """Says what is there instead, one letter or one folder away."""
    path = Path(name)
    known = (
        ["emoji", "synthetic", *(str(p) for p in sorted(path.parent.glob("*"))[:10_000])]
        if path.parent.is_dir()
        else []
    )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return UserError(
        f"`{name}` is not there{f'; did you mean `{near[0]}`?' if near else ''}",
        hint=f"a source is {EXAMPLES}",
    )


def open_file(path: Path, name: str, options: Options) -> Catalogue:
    from lapclip.data.sources.annotations import looks_like_annotations, open_annotations
    from lapclip.data.sources.tables import is_table_name, looks_like_table, open_table

    if options.format in ANNOTATION_FORMATS or (options.format is None and looks_like_annotations(path)):
        return open_annotations([path], name, options)
    if options.format in TABLE_FORMATS or is_table_name(path.name) or looks_like_table(path):
        return open_table([path], name, options)
    if path.suffix.lower() in (".zip", ".gz", ".tgz", ".rar", ".7z"):
        raise UserError(
            f"`{name}` is an archive",
            hint="unpack it, and pass the folder; plain `.tar` shards are read as they are",
        )
    raise UserError(f"`{name}` is no kind of source that lapclip knows", hint=f"a source is {EXAMPLES}")


def open_directory(path: Path, name: str, options: Options) -> Catalogue:
    """A folder: of shards, with annotations, with a table, of a saved dataset, or of pictures."""
    from lapclip.data.sources.annotations import open_annotations
    from lapclip.data.sources.folder import open_folder
    from lapclip.data.sources.hugging_face import open_hugging_face
    from lapclip.data.sources.shards import open_shards
    from lapclip.data.sources.tables import open_table

    ways: list[tuple[tuple[str, ...], Callable[[], Catalogue | None]]] = [
        (("hf",), lambda: open_hugging_face(f"hf:{path}", options) if is_saved_dataset(path) else None),
        (
            ("tar",),
            lambda: open_shards(str(path / "*.tar"), name, options) if any(path.glob("*.tar")) else None,
        ),
        (
            ANNOTATION_FORMATS,
            lambda: open_annotations(found, name, options) if (found := annotations(path)) else None,
        ),
        (
            TABLE_FORMATS,
            lambda: open_table(found, name, options) if (found := tables(path, options.format)) else None,
        ),
    ]
    if options.format not in FOLDER_FORMATS:
        for formats, opened in ways:
            if (options.format is None or options.format in formats) and (catalogue := opened()) is not None:
                return catalogue
    if options.format is not None and options.format not in FOLDER_FORMATS:
        raise UserError(
            f"`{name}` holds nothing of format `{options.format}`",
            hint="leave `--format` away: lapclip looks",
        )
    return open_folder(path, name, options)


def is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def annotations(path: Path) -> list[Path]:
    from lapclip.data.sources.annotations import looks_like_annotations

    found = sorted(file for folder in (path, path / "annotations") for file in folder.glob("*.json"))
    return [file for file in found if looks_like_annotations(file)]


def tables(path: Path, format: str | None) -> list[Path]:
    """The table of a folder: one that is known by its name, all Parquet files, or the only one there is."""
    from lapclip.data.sources.tables import looks_like_table

    for known in FIRST_TABLES:
        if (path / known).is_file() and (known != "captions.txt" or looks_like_table(path / known)):
            return [path / known]
    for folder in (path, path / "data"):
        if parquet := sorted(folder.glob("*.parquet")):
            return parquet
    found = sorted(file for file in path.iterdir() if file.is_file() and is_table_file(file))
    if len(found) > 1:
        raise UserError(
            f"`{path}` holds {len(found)} tables: {', '.join(f'`{file.name}`' for file in found[:5])}",
            hint=f"pass the one you mean: `{found[0]}`",
        )
    return found


def is_table_file(file: Path) -> bool:
    from lapclip.data.sources.tables import is_table_name, looks_like_table

    if file.suffix.lower() == ".txt":
        # Captions beside pictures are many small files; a table is none of them.
        has_picture = any(file.with_suffix(s).exists() for s in (".jpg", ".jpeg", ".png", ".webp"))
        return not has_picture and looks_like_table(file)
    return is_table_name(file.name)
