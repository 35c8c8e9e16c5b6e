"""Which kind of source a person means: seen by looking, forced by `--format`."""

import difflib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lapclip.data.catalogue import Catalogue, Options
from lapclip.data.files import NOT_REGULAR, Folders
from lapclip.errors import UserError

FOLDER_FORMATS = ("txt", "metadata", "classes", "names")
TABLE_FORMATS = ("csv", "tsv", "jsonl", "parquet", "flickr")
ANNOTATION_FORMATS = ("coco", "karpathy")
# In the order in which they are looked for in a folder.
FIRST_TABLES = (
    "metadata.jsonl", "metadata.csv", "metadata.parquet", "captions.txt", "results.csv", "captions.csv",
)  # fmt: skip
EXAMPLES = "a folder, a table, `captions_*.json`, `shards/*.tar`, `hf:NAME`, `emoji` or `synthetic`"


def open_catalogue(name: str, options: Options) -> tuple[Catalogue, str]:
    """What a source holds, and what identifies it wherever lapclip is called from."""
    from lapclip.data.formats.remote import is_shards
    from lapclip.data.formats.shards import open_shards

    if options.images is not None:  # the shell leaves `~` alone in `--images=~/photos` and in `a + ~/b`
        options = replace(options, images=os.path.expanduser(options.images))
    if name.startswith("hf:"):
        from lapclip.data.formats.hugging_face import open_hugging_face

        dataset = os.path.expanduser(name.removeprefix("hf:"))
        local, colon, config = dataset.partition(":")
        found = os.path.abspath(local) if os.path.exists(local) else local
        return open_hugging_face(f"hf:{dataset}", options), f"hf:{found}{colon}{config}"
    if name == "emoji" or name.startswith("emoji:"):
        from lapclip.data.formats.emoji import open_emoji

        kind, colon, where = name.partition(":")
        where = os.path.abspath(os.path.expanduser(where))
        return open_emoji(name, options), f"{kind}{colon}{where}" if colon else kind
    path = Path(os.path.expanduser(name))
    if is_shards(name) or (options.format == "tar" and not path.is_dir()):
        parts = [os.path.expanduser(part) for part in name.split("::")]
        pattern = "::".join(parts)
        identity = "::".join(part if "://" in part else os.path.abspath(part) for part in parts)
        return open_shards(pattern, name, options), identity
    if not path.exists():
        raise not_there(name)
    if not path.is_dir() and not path.is_file():
        raise UserError(f"`{name}` {NOT_REGULAR}", hint="write it to a file, and pass that")
    opener = open_directory if path.is_dir() else open_file
    return opener(path, name, options), os.path.abspath(path)


def not_there(name: str) -> UserError:
    """Says what is there instead, one letter or one folder away."""
    path = Path(name)
    known = ["emoji", "synthetic", *(str(p) for p in sorted(path.parent.glob("*"))[:10_000])]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    before, _, weight = name.rpartition("@")
    if before and os.path.exists(os.path.expanduser(before)):
        near, hint = [], f"`{weight}` is no weight; write a number: `{before}@2`"
    elif any(sign in name for sign in ("+", ", ")):
        hint = "several sources are joined by a plus between spaces, in quotes: `'photos + emoji@2'`"
    else:
        hint = f"a source is {EXAMPLES}"
    return UserError(f"`{name}` is not there{f'; did you mean `{near[0]}`?' if near else ''}", hint=hint)


def open_file(path: Path, name: str, options: Options) -> Catalogue:
    from lapclip.data.formats.annotations import looks_like_annotations, open_annotations
    from lapclip.data.formats.tables import is_table_name, looks_like_table, open_table

    if options.format in ANNOTATION_FORMATS or (options.format is None and looks_like_annotations(path)):
        return open_annotations([path], name, options)
    if options.format in TABLE_FORMATS or is_table_name(path.name) or looks_like_table(path):
        return open_table([path], name, options)
    if path.suffix.lower() in (".zip", ".gz", ".tgz", ".rar", ".7z"):
        raise UserError(
            f"`{name}` is an archive", hint="unpack it, and pass the folder; `.tar` is read as it is"
        )
    raise UserError(f"`{name}` is in no format that lapclip reads", hint=f"a source is {EXAMPLES}")


def open_directory(path: Path, name: str, options: Options) -> Catalogue:
    """A folder: a saved dataset, of shards, with annotations, with a table, or of images.

    One stray table or archive does not make a folder of captioned images anything else, unless it has a name that
    tables of captions have, or, where the captions are not in files beside the images, it names images itself.
    """
    from lapclip.data.formats.annotations import open_annotations
    from lapclip.data.formats.folder import kind_here, open_folder
    from lapclip.data.formats.hugging_face import open_hugging_face
    from lapclip.data.formats.shards import read_shards
    from lapclip.data.formats.tables import looks_like_table, open_table

    if options.format in FOLDER_FORMATS:
        return open_folder(path, name, options)

    def may_be(*formats: str) -> bool:
        return options.format is None or options.format in formats

    if may_be("hf") and is_saved_dataset(path):
        return open_hugging_face(f"hf:{path}", options)
    shards = own_files(path, path.glob("*.tar")) if may_be("tar") else []
    known = known_tables(path) if may_be(*TABLE_FORMATS) else []
    others = other_tables(path) if may_be(*TABLE_FORMATS) and not known else []
    strays = len(shards) + len(others)
    kind = kind_here(path, strays) if strays and options.format is None else None
    if kind is not None:
        shards = []
        others = [] if kind == "txt" else [file for file in others if looks_like_table(file)]
    if shards:
        return read_shards([str(shard) for shard in shards], name, options)
    if may_be(*ANNOTATION_FORMATS) and (found := annotations(path)):
        return open_annotations(found, name, options)
    if known or others:
        return open_table(known or only_one(others, path), name, options)
    if options.format is not None:
        raise UserError(
            f"`{name}` holds nothing of format `{options.format}`", hint="omit `--format`: lapclip detects it"
        )
    return open_folder(path, name, options)


def own_files(path: Path, files: Iterable[Path]) -> list[Path]:
    """The regular files among some that were found in a folder; a link out of it is nothing that a person passed."""
    from lapclip.data.formats.hugging_face import own_folders

    folders = Folders(*own_folders(os.path.abspath(path)))
    return sorted(file for file in files if file.is_file() and folders.contains(os.path.realpath(file)))


def is_saved_dataset(path: Path) -> bool:
    """Whether `save_to_disk` wrote it: a dataset, or one in each folder."""
    if own_files(path, [path / "dataset_dict.json"]):
        return bool(own_files(path, path.glob("*/state.json")))
    beside = [path / "dataset_info.json", *path.glob("*.arrow")]
    return bool(own_files(path, [path / "state.json"]) and own_files(path, beside))


def annotations(path: Path) -> list[Path]:
    from lapclip.data.formats.annotations import looks_like_annotations

    files = (file for folder in (path, path / "annotations") for file in folder.glob("*.json"))
    return [file for file in own_files(path, files) if looks_like_annotations(file)]


def known_tables(path: Path) -> list[Path]:
    """The table of a folder that is known by its name."""
    from lapclip.data.formats.tables import looks_like_table

    for name in FIRST_TABLES:
        found = own_files(path, [path / name])
        if found and (name != "captions.txt" or looks_like_table(found[0])):
            return found
    return []


def other_tables(path: Path) -> list[Path]:
    """All Parquet files, or all other tables."""
    from lapclip.data.formats.tables import looks_like_table

    for folder in (path, path / "data"):
        if parquet := own_files(path, folder.glob("*.parquet")):
            return parquet
    found = own_files(path, (file for file in path.iterdir() if may_be_table(file)))
    return [file for file in found if file.suffix.lower() != ".txt" or looks_like_table(file)]


def may_be_table(file: Path) -> bool:
    """By its name; captions beside images are many small text files, and a table is none of them."""
    from lapclip.data.formats.tables import is_table_name

    if file.suffix.lower() == ".txt":
        return not any(file.with_suffix(s).exists() for s in (".jpg", ".jpeg", ".png", ".webp"))
    return is_table_name(file.name)


def only_one(tables: list[Path], path: Path) -> list[Path]:
    """The tables of a folder, provided that they are parts of one."""
    if len(tables) > 1 and any(table.suffix.lower() != ".parquet" for table in tables):
        raise UserError(
            f"`{path}` holds {len(tables)} tables: {', '.join(f'`{file.name}`' for file in tables[:5])}",
            hint=f"pass the one you mean: `{tables[0]}`",
        )
    return tables
