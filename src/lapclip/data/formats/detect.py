"""Which kind of source a person means: seen by looking, forced by `--format`."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from lapclip.data.catalogue import Catalogue, Options
from lapclip.data.files import Folders, is_image_name
from lapclip.data.formats.remote import expand, is_shards
from lapclip.errors import UserError, suggest_path, typed
from lapclip.files import NOT_REGULAR

FOLDER_FORMATS = ("txt", "metadata", "classes", "names", "images")
TABLE_FORMATS = ("csv", "tsv", "jsonl", "parquet", "flickr")
ANNOTATION_FORMATS = ("coco", "karpathy")
# In the order in which they are looked for in a folder.
FIRST_TABLES = (
    "metadata.jsonl", "metadata.csv", "metadata.parquet", "captions.txt", "results.csv", "captions.csv",
)  # fmt: skip
MAX_WEIGHT = 1000
WEIGHT = re.compile(r"(\d+(\.\d*)?|\.\d+)(e-?\d+)?")
EXAMPLES = "a folder, a table, `captions_*.json`, `shards/*.tar`, `hf:NAME`, `emoji` or `synthetic`"


def open_catalogue(name: str, options: Options) -> tuple[Catalogue, str]:
    """What a source holds, and what identifies it wherever lapclip is called from."""
    from lapclip.data.formats.shards import read_shards

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
        return open_emoji(name), f"{kind}{colon}{where}" if colon else kind
    path = Path(os.path.expanduser(name))
    if is_shards(name) or (options.format == "tar" and not path.is_dir()):
        parts = [os.path.expanduser(part) for part in name.split("::")]
        identity = "::".join(part if "://" in part else os.path.abspath(part) for part in parts)
        return read_shards(expand("::".join(parts)), name, options), identity
    if not path.exists():
        raise not_there(name)
    if not path.is_dir() and not path.is_file():
        raise UserError(f"`{name}` {NOT_REGULAR}", hint="write it to a file, and pass that")
    opener = open_directory if path.is_dir() else open_file
    return opener(path, name, options), os.path.abspath(path)


def parse_source(text: str) -> list[tuple[str, float]]:
    """Names and weights: `flickr8k + emoji@2` is two sources, the second one twice as often."""
    parts = []
    for part in [text] if os.path.exists(text) else text.split(" + "):
        name, at, weight = part.strip().rpartition("@")
        if not at or os.path.exists(part.strip()) or not WEIGHT.fullmatch(weight):
            name, weight = part.strip(), "1"
        if not name or not 0 < float(weight) <= MAX_WEIGHT:
            hint = f"write `photos + captions.csv@2`; use a weight above 0 and at most {MAX_WEIGHT}"
            raise UserError(f"`{part}` in `{text}` is not a source with an optional weight", hint=hint)
        parts.append((name, float(weight)))
    return parts


def refuse_missing(source: str, format: str | None = None) -> None:
    """Refuses a source that is not there; opening it comes later, when torch has been imported."""
    for name, _ in parse_source(source):
        is_known = name.partition(":")[0] in ("synthetic", "emoji", "hf") or is_shards(name) or "*" in name
        if format != "tar" and not is_known and not os.path.exists(os.path.expanduser(name)):
            raise not_there(name)


def not_there(name: str) -> UserError:
    """Says what is there instead, one letter or one folder away."""
    near = suggest_path(name, *(() if os.sep in name else ("emoji", "synthetic")))
    before, _, weight = name.rpartition("@")
    if before and os.path.exists(os.path.expanduser(before)):
        near, hint = "", f"`{weight}` is not a weight; write a number: `{before}@2`"
    elif any(sign in name for sign in ("+", ", ")):
        hint = "join several sources with a plus between spaces, in quotes: `'photos + emoji@2'`"
    else:
        hint = f"a source is {EXAMPLES}"
    return UserError(f"`{name}` does not exist{near}", hint=hint)


def open_file(path: Path, name: str, options: Options) -> Catalogue:
    from lapclip.data.formats.annotations import looks_like_annotations, open_annotations
    from lapclip.data.formats.tables import SUFFIXES, looks_like_table, open_table

    if options.format in ANNOTATION_FORMATS or (options.format is None and looks_like_annotations(path)):
        return open_annotations([path], name, options)
    if options.format in TABLE_FORMATS or path.name.lower().endswith(SUFFIXES) or looks_like_table(path):
        return open_table([path], name, options)
    if path.suffix.lower() in (".zip", ".gz", ".tgz", ".rar", ".7z"):
        hint = "unpack it and pass the folder; `.tar` files are read directly"
        raise UserError(f"`{name}` is an archive", hint=hint)
    if path.suffix.lower() == ".json" and options.format is None:
        return open_annotations([path], name, options)  # says where it is damaged, or what it should hold
    if is_image_name(name):
        raise UserError(f"`{name}` is one image", hint=f"pass its folder: `{typed(path.parent)}`")
    raise UserError(f"`{name}` has no format that lapclip can read", hint=f"a source is {EXAMPLES}")


def open_directory(path: Path, name: str, options: Options) -> Catalogue:
    """A folder: a saved dataset, of shards, with annotations, with a table, or of images.

    One stray table or archive does not make a folder of captioned images anything else, unless it has a name that
    tables of captions have, or, where the captions are not in files beside the images, it names images itself.
    """
    from lapclip.data.formats.annotations import looks_like_annotations, open_annotations
    from lapclip.data.formats.folder import kind_of, look_through, open_folder
    from lapclip.data.formats.hugging_face import open_hugging_face
    from lapclip.data.formats.shards import read_shards
    from lapclip.data.formats.tables import SUFFIXES, looks_like_table, open_table

    def may_be(*formats: str) -> bool:
        return options.format is None or options.format in formats

    try:
        with os.scandir(os.path.realpath(path)) as found:  # once only: a folder may be large
            entries = list(found)
    except OSError as error:
        what = f"`{name}` cannot be opened: {error.strerror}"
        raise UserError(what, hint="check its permissions") from None
    if options.format in FOLDER_FORMATS:
        return open_folder(look_through(path, options, entries), name, options)
    names = {entry.name for entry in entries}
    if may_be("hf") and is_saved_dataset(path, names):
        return open_hugging_face(f"hf:{path}", options)
    shards = own_files(path, names, ".tar") if may_be("tar") else []
    known, others = find_tables(path, names) if may_be(*TABLE_FORMATS) else ([], [])
    listing = None
    if options.format is None and 0 < len(shards) + len(others) < sum(map(is_image_name, names)):
        listing = look_through(path, options, entries)
        if kind := kind_of(listing):
            shards = []
            others = [] if kind == "txt" else [file for file in others if looks_like_table(file)]
    if shards:
        return read_shards([str(shard) for shard in shards], name, options)
    if may_be(*ANNOTATION_FORMATS):
        files = own_files(path, names, ".json") + files_below(path, names, "annotations", ".json")
        if annotations := [file for file in sorted(files) if looks_like_annotations(file)]:
            return open_annotations(annotations, name, options)
    if len(others) > 1 and any(table.suffix.lower() != ".parquet" for table in others):
        more = f" and {len(others) - 5:,} more" if len(others) > 5 else ""
        listed = f"{len(others):,} tables: {', '.join(f'`{file.name}`' for file in others[:5])}{more}"
        raise UserError(f"`{path}` holds {listed}", hint=f"pass the one you mean: `{typed(others[0])}`")
    if known or others:
        catalogue = open_table(known or others, name, options)
        beside = own_files(path, names - {known[0].name}, (*SUFFIXES, *FIRST_TABLES)) if known else []
        unused = [t.name for t in beside if t.suffix.lower() == ".parquet" or looks_like_table(t)]
        catalogue.tables = (known[0].name, *unused) if unused else ()
        return catalogue
    if options.format is not None:
        what = f"`{name}` has no data in format `{options.format}`"
        raise UserError(what, hint="omit `--format`: lapclip detects it")
    return open_folder(listing or look_through(path, options, entries), name, options)


def own_files(path: Path, names: Iterable[str], suffix: str | tuple[str, ...] = "") -> list[Path]:
    """The regular files among some names; a link that leads out of the folder is nothing that a person passed."""
    from lapclip.data.formats.hugging_face import own_folders

    folders = Folders(*own_folders(os.path.abspath(path)))
    files = sorted(path / name for name in names if name.lower().endswith(suffix))
    return [file for file in files if file.is_file() and folders.contains(os.path.realpath(file))]


def files_below(path: Path, names: Iterable[str], folder: str, suffix: str) -> list[Path]:
    """The same in a folder within, if there is one."""
    inner = os.listdir(path / folder) if folder in names and (path / folder).is_dir() else []
    return own_files(path, [os.path.join(folder, name) for name in inner], suffix)


def is_saved_dataset(path: Path, names: set[str]) -> bool:
    """Whether `save_to_disk` wrote it: a dataset, or one in each folder."""
    if own_files(path, {"dataset_dict.json"} & names):
        return bool(own_files(path, [os.path.join(name, "state.json") for name in names]))
    beside = [name for name in names if name == "dataset_info.json" or name.endswith(".arrow")]
    return bool(own_files(path, {"state.json"} & names) and own_files(path, beside))


def find_tables(path: Path, names: set[str]) -> tuple[list[Path], list[Path]]:
    """The table of a folder that is known by its name; if there is none, all Parquet files, or all other tables."""
    from lapclip.data.formats.tables import SUFFIXES, looks_like_table

    for name in FIRST_TABLES:
        found = own_files(path, {name} & names)
        if found and (name != "captions.txt" or looks_like_table(found[0])):
            return found, []
    if parquet := own_files(path, names, ".parquet") or files_below(path, names, "data", ".parquet"):
        return [], parquet
    # Captions beside images are many small text files, and a table is none of them.
    stems = {os.path.splitext(name)[0] for name in names if is_image_name(name)}
    texts = own_files(path, (n for n in names if os.path.splitext(n)[0] not in stems), (".txt", ".json"))
    return [], sorted({*own_files(path, names, SUFFIXES), *filter(looks_like_table, texts)})


def real_names(source: str) -> set[str]:
    """What a source consists of, as real paths; `emoji` is `/emoji`, not a path in this folder."""
    return {os.path.realpath(os.path.join(os.sep, name)) for name, _ in parse_source(source)}


def are_nested(some: Iterable[str], others: Iterable[str]) -> bool:
    """Whether the folder of one of these paths is that of one of the others, lies in it or holds it."""
    real = [[os.path.realpath(path) for path in paths] for paths in (some, others)]
    one, two = ({path if os.path.isdir(path) else os.path.dirname(path) for path in own} for own in real)
    return any(os.path.commonpath([a, b]) in (a, b) for a in one - {os.sep} for b in two - {os.sep})
