"""`lapclip models`: pretrained models that suit a laptop; downloading and removing them."""

from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from lapclip.cli.flags import AsJson
from lapclip.cli.screen import follow, own_name, print_json, print_table, say, stop_requests
from lapclip.errors import UserError, shortened, suggest, typed
from lapclip.units import size

models = App(name="models", help="List pretrained models that suit a laptop; download or remove them.")
Name = Annotated[str, Parameter(help="a model of the list, or `hf-hub:OWNER/NAME[@REVISION]`")]


@models.default
def list_models(*words: Annotated[str, Parameter(show=False)], json: AsJson = False) -> int:
    """List pretrained models that suit a laptop, and others that were downloaded.

    `get NAME` downloads one, and `remove NAME` removes it.
    """
    from lapclip.view.document import Table, columns_of
    from lapclip.weights.hub import MODELS, PREFIX, downloaded, local

    if words:
        near = suggest(words[0], ("get", "remove"))
        raise CycloptsError(msg=f"there is no command `models {words[0]}`{near}")
    found = [(name, about, local(name)) for name, about in MODELS.items()]
    listed = {path for _, _, path in found}
    found += [
        (f"{PREFIX}{its.repository}", its, path) for path, its in downloaded().items() if path not in listed
    ]
    if json:
        records = [{"name": name, **vars(its), "path": path and str(path)} for name, its, path in found]
        print_json({"models": records})
        return 0
    rows = [(name, its.megabytes * 1e6, its.licence, its.good_at, bool(path)) for name, its, path in found]
    print_table(Table("", columns_of("model, size: bytes, licence, good at, here"), rows))
    say(
        f"to download one: `{own_name()} models get NAME`, also with `{PREFIX}OWNER/NAME` of any CLIP on the hub"
    )
    return 0


@models.command
def get(name: Name, /, *, json: AsJson = False) -> int:
    """Download a model. Stop at any time: the same command continues."""
    from lapclip.weights.hub import downloaded, fetch

    with stop_requests("stopping; what was downloaded is kept") as requests:
        path = follow(fetch(name), requests, "downloading", is_kept=True)
    its = downloaded()[path]
    if json:
        print_json({"name": name, **vars(its), "path": str(path)})
    say(f"`{name}` is in `{path}`; its licence: {its.licence}")
    say(f"next: `{own_name()} index photos/ --model {typed(name)}`")
    return 0


@models.command
def remove(name: Name, /, *, json: AsJson = False) -> int:
    """Remove a downloaded model, in every revision, or what an interrupted download left of it."""
    from lapclip.data.pack import folder_bytes
    from lapclip.files import remove_folder
    from lapclip.weights.hub import folders_of, wanted

    asked = wanted(name)
    paths = folders_of(asked.repository) if asked else []
    if not paths:
        hint = f"`{own_name()} models` shows what is here"
        raise UserError(f"`{shortened(name)}` has not been downloaded", hint=hint)
    num_bytes = sum(map(folder_bytes, paths))
    for path in paths:
        remove_folder(path)
    if json:
        print_json({"removed": list(map(str, paths)), "bytes": num_bytes})
    say(f"removed `{name}`, {size(num_bytes)}")
    return 0


def fetch_missing(*models: str | None) -> None:
    """Downloads models that are named as `hf-hub:OWNER/NAME` and are not here."""
    from lapclip.search.index import indexes_of, path_of_model
    from lapclip.weights.hub import MODELS, fetch, must_fetch

    for model in filter(None, models):
        if indexes_of(model) or path_of_model(model):
            continue
        if must_fetch(model):
            follow(fetch(model), what="downloading")
        elif near := suggest(model, MODELS, cutoff=0.8):
            raise UserError(
                f"there is no model `{shortened(model)}`{near}", hint="`lapclip models` lists them"
            )
