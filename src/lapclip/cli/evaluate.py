"""`lapclip eval`: how well a run finds."""

from dataclasses import replace
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from lapclip.cli.flags import AsJson, with_settings
from lapclip.cli.screen import print_json, show_packing, stop_requests, working
from lapclip.config import SETTINGS, load_config
from lapclip.errors import UserError


@with_settings("format", "images", "image_column", "caption_column")
def evaluate(
    run: Annotated[str, Parameter(help="a run, by name or path; its best checkpoint is used")],
    source: Annotated[
        str | None, Parameter(help="where held-out pairs come from, if not from the run's own source")
    ] = None,
    *,
    num_validation: Annotated[
        int | None, Parameter(help="pictures to search among, if not as many as in training")
    ] = None,
    json: AsJson = False,
    flags: dict[str, Any],
) -> int:
    """Measure recall: how often the right picture is found for its words, and the right words for a picture."""
    if num_validation is not None and (problem := SETTINGS["num_validation"].problem(num_validation)):
        raise UserError(f"`--num-validation` {problem}", hint="512 is what training uses")
    from lapclip.run import open_run

    config = open_run(run).load_config()
    data = config.data if source is None else load_config(flags={"source": source}).data
    data = replace(
        data, pack=config.data.pack, **flags
    )  # packed or not, as in training: it decides the split
    with working("starting"):
        from lapclip.data.opening import open_source
        from lapclip.embedder import load
        from lapclip.evaluate import embed_pool, retrieval

        embedder = load(run)
    with stop_requests("stopping; what is packed already is kept") as requests:
        opened = show_packing(open_source(data, embedder.model.size.image_size), requests)
    with working("evaluating"):
        pool = embed_pool(embedder, opened.held_out, num_validation or config.data.num_validation)
        recall = retrieval(pool, config.train.batch_size or 12)
    if json:
        print_json(recall)
    else:
        from lapclip.monitor.line import recall_table

        Console().print(recall_table(recall), highlight=False)
    return 0
