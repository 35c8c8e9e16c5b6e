"""`lapclip models`: pretrained models that suit a laptop; downloading and removing them."""

from typing import Annotated

from cyclopts import App, Parameter

from lapclip.cli.flags import AsJson
from lapclip.cli.screen import follow, own_name, print_json, print_table, say, stop_requests
from lapclip.errors import UserError, shortened, typed

models = App(name="models", help="List pretrained models that suit a laptop; download or remove them.")
Name = Annotated[str, Parameter(help="a model of the list, or `hf-hub:OWNER/NAME[@REVISION]`")]


@models.default
def list_models(*, json: AsJson = False) -> int:
    """List pretrained models that suit a laptop, and others that were downloaded."""
    from lapclip.weights.hub import MODELS, PREFIX, downloaded, local

    them = [(name, its, local(name)) for name, its in MODELS.items()]
    them += [(PREFIX + its.repository, its, path) for path, its in downloaded().items() if not its.good_at]
    if json:
        records = [{"name": name, **vars(its), "path": path and str(path)} for name, its, path in them]
        print_json({"models": records})
    else:
        rows = [(name, its.megabytes * 1e6, its.licence, its.good_at, bool(path)) for name, its, path in them]
        print_table("model, size: bytes, licence, good at, here", rows)
        say(f"to download one: `{own_name()} models get NAME`")
    return 0


@models.command
def get(name: Name, /) -> int:
    """Download a model. Stop at any time: the same command continues."""
    from lapclip.weights.hub import downloaded, fetch

    with stop_requests("stopping; what was downloaded is kept") as requests:
        path = follow(fetch(name), requests, "downloading", is_kept=True)
    say(f"`{name}` is in `{path}`; its licence: {downloaded()[path].licence}")
    say(f"next: `{own_name()} index photos/ --model {typed(name)}`")
    return 0


@models.command
def remove(name: Name, /) -> int:
    """Remove a downloaded model, in every revision, or what an interrupted download left of it."""
    from lapclip.files import cache_folder, remove_folder
    from lapclip.weights.hub import wanted

    its = wanted(name)
    folders = its and list((cache_folder() / "models").glob(f"{its.repository.replace('/', '--')}@*"))
    if not folders:
        raise UserError(f"`{shortened(name)}` has not been downloaded", hint="`lapclip models` lists what is")
    for folder in folders:
        remove_folder(folder)
    say(f"removed `{name}`; an index that was made with it has its own copy")
    return 0


def fetch_missing(*models: str | None) -> None:
    """Downloads models that are named as `hf-hub:OWNER/NAME` and are not here."""
    from lapclip.search.index import indexes_of, path_of_model
    from lapclip.weights.hub import fetch, must_fetch

    for model in filter(None, models):
        if not indexes_of(model) and not path_of_model(model) and must_fetch(model):
            follow(fetch(model), what="downloading")
