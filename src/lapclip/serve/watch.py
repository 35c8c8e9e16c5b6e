"""The live page of `lapclip watch --web`: each run is read once for all pages that show it.

Server-sent events by Starlette's own streaming response: sse-starlette would encode each message for every page again,
and on import replaces uvicorn's signal handler in the whole process.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from lapclip.errors import UserError, suggest
from lapclip.runs.history import Summary
from lapclip.runs.run import RUNS, Run, all_runs, is_run, newest_run
from lapclip.runs.status import status_of
from lapclip.serve.http import Guard, build_app, json_response, send_file, send_static
from lapclip.serve.limits import Refused
from lapclip.view.live import columns_of, now_of

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_HEARTBEATS = 15.0
RETRY_MILLISECONDS = 1500
MAX_STREAMS = 32
MAX_IDLE_RUNS = 8  # kept in memory without a stream
SNAPSHOT = r"(step-\d{1,12}\.json|pictures/\d{1,12}\.jpg)"
EVENT_STREAM = "text/event-stream"


def page_app(shown: Run | None, address: str) -> ASGIApp:
    """The page and what it asks for; `shown` is the run to begin with."""
    watching = Watching(shown)

    def snapshot(request: Request) -> Response:
        folder = watching.find(request.path_params["run"]).path / "snapshots"
        name = request.path_params["file"]
        fresh = 300 if name.startswith("pictures/") else 0
        return send_file(folder, name, pattern=SNAPSHOT, max_bytes=8 << 20, fresh_seconds=fresh)

    async def stream(request: Request) -> Response:
        run = watching.find(request.query_params.get("run", ""))
        if request.method == "HEAD":
            return Response(media_type=EVENT_STREAM)
        if sum(told.num_streams for told in watching.watched.values()) >= MAX_STREAMS:
            raise Refused(503, f"{MAX_STREAMS} pages are already open", "close one of them", retry_seconds=1)
        place = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return StreamingResponse(watching.follow(run, place), media_type=EVENT_STREAM)

    routes = [
        Route("/", lambda request: send_static("watch.html")),
        Route("/static/{name}", lambda request: send_static(request.path_params["name"])),
        Route("/runs", lambda request: json_response(watching.list_runs())),
        Route("/stream", stream),
        Route("/snapshots/{run}/{file:path}", snapshot),
    ]
    return Guard(build_app(routes), address=address)


class Watching:
    """The runs that may be shown, and those that are."""

    def __init__(self, shown: Run | None):
        self.shown = shown
        self.watched: dict[str, Told] = {}

    def known(self) -> dict[str, Run]:
        """Runs by name: those in `runs/` here, newest first, and the one that was asked for."""
        own = {self.shown.name: self.shown} if self.shown else {}
        return own | {run.name: run for run in all_runs() if run.name not in own}

    def find(self, name: str) -> Run:
        """Called for every image, so other runs are only listed when there is none of that name."""
        if self.shown is not None and name == self.shown.name:
            return self.shown
        with suppress(OSError, ValueError):  # too long for a name, or none
            if name == Path(name).name and not name.startswith(".") and is_run(RUNS / name):
                return Run(RUNS / name)
        known = suggest(name, self.known())
        raise UserError(f"there is no run `{name}`{known}", hint="`/runs` lists all runs")

    def list_runs(self) -> dict[str, Any]:
        """How every run stands, and which one to show when none is named."""
        first = self.shown or newest_run()
        rows = [row_of(run) for run in self.known().values()]
        return {"runs": rows, "shown": first.name if first else None}

    async def follow(self, run: Run, place: str) -> AsyncIterator[bytes]:
        """Server-sent events of a run for one page, from a place in its events on."""
        told = self.watched.setdefault(run.name, Told(run))
        told.num_streams += 1
        try:
            await told.look()
            is_current = place == told.follower.place  # else the page gets everything again
            first = told.tell("more", columns_of([])) if is_current else told.tell_all()
            yield b"retry: %d\n\n" % RETRY_MILLISECONDS + first
            version, last_sent = told.version, time.monotonic()
            while True:
                # All streams wake at the same moments, so that one of them reads for all.
                await asyncio.sleep(SECONDS_BETWEEN_LOOKS - time.monotonic() % SECONDS_BETWEEN_LOOKS)
                await told.look()
                body = b""
                if told.version != version:
                    body = told.news if told.version == version + 1 else told.tell_all()
                elif time.monotonic() - last_sent > SECONDS_BETWEEN_HEARTBEATS:
                    body = b": heartbeat\n\n"
                version = told.version
                if body:
                    yield body
                    last_sent = time.monotonic()
        finally:
            told.num_streams -= 1
            idle = [name for name, kept in self.watched.items() if not kept.num_streams]
            for name in idle[: max(0, len(idle) - MAX_IDLE_RUNS)]:  # the others are for pages that come back
                del self.watched[name]


def row_of(run: Run) -> dict[str, str]:
    now = status_of(run)
    recall = "" if now.recall_1 is None else f", recall@1 {now.recall_1:.1%}"
    return {"name": now.run.name, "words": f"{now.state}, step {now.history.num_steps:,}{recall}"}


class Told(Summary):
    """One run, read once for all pages that show it; `version` counts its messages."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.version = 0
        self.news = b""  # the message that leads from the version before to this one
        self.last_look = -1.0
        self.looking = asyncio.Lock()
        self.num_streams = 0

    async def look(self) -> None:
        """Reads what was added, unless another stream has just done so."""
        async with self.looking:
            if time.monotonic() - self.last_look < SECONDS_BETWEEN_LOOKS / 2 and self.version:
                return
            await asyncio.to_thread(self.read_on)  # at first, a day's events take a second or two
            self.last_look = time.monotonic()

    def read_on(self) -> None:
        before = (self.state, self.is_preparing)
        events, is_reset = self.read()
        if is_reset or events or (self.state, self.is_preparing) != before or not self.version:
            self.version += 1
            self.news = self.tell_all() if is_reset else self.tell("more", columns_of(events))

    def tell_all(self) -> bytes:
        history = self.history
        points = columns_of([*history.steps, *history.inspections, *history.evaluations])
        if names := points["evaluations"].get("snapshot"):
            there = {f"snapshots/{path.name}" for path in (self.run.path / "snapshots").glob("step-*.json")}
            points["evaluations"]["snapshot"] = [name if name in there else None for name in names]
        return self.tell("history", points)

    def tell(self, kind: str, points: dict[str, Any]) -> bytes:
        data = json.dumps({**points, "now": now_of(self)}, separators=(",", ":"))
        return f"id: {self.follower.place}\nevent: {kind}\ndata: {data}\n\n".encode()
