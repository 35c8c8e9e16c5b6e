"""`lapclip watch --web`: one live page of the runs here, each run read once for however many pages show it."""

import asyncio
import json
import re
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lapclip.errors import UserError, suggest
from lapclip.runs.events import Event, Follower, Started
from lapclip.runs.history import MAX_NEW, Summary
from lapclip.runs.run import RUNS, Run, find_run, is_run
from lapclip.runs.status import all_runs, newest_run, status_of
from lapclip.serve.http import (
    address_of,
    build_app,
    explained,
    listen,
    require_web,
    send_file,
    send_static,
    serve,
)
from lapclip.view.live import columns_of, now_of, points_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_HEARTBEATS = 15.0
MILLISECONDS_TO_RETRY = 1500
MOST_STREAMS = 32
MOST_RUNS_KEPT = 8  # in memory, of those that no stream shows
LONGEST_GAP = 2 << 20  # bytes of events; whoever missed more gets everything anew
SNAPSHOT = r"(step-\d{1,12}\.json|pictures/\d{1,12}\.jpg)"
PLACE = r"\d{1,20}-\d{1,18}"


def serve_page(run_name: str | None, port: int | None, open_browser: bool) -> None:
    """Serves the page until Ctrl-C."""
    require_web()
    shown = find_run(run_name) if run_name is not None else None
    with listen(port) as listening:
        address = address_of(listening)
        sys.stderr.write(f"the page is at {address} (Ctrl-C ends it; training goes on)\n")
        sys.stderr.flush()
        if open_browser:
            webbrowser.open(address)
        closing = asyncio.Event()
        try:
            serve(page_app(shown, listening.getsockname()[1], closing), listening, closing)
        except KeyboardInterrupt:  # the way to end it, not a failure
            sys.stderr.write("\n")


def page_app(shown: Run | None, port: int, closing: asyncio.Event) -> "ASGIApp":
    """The page and what it asks for; `shown` is the run to begin with."""
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    watching = Watching(shown)

    def page(request: "Request") -> "Response":
        return send_static("watch.html")

    def static(request: "Request") -> "Response":
        return send_static(request.path_params["name"])

    def runs(request: "Request") -> "Response":
        return JSONResponse(watching.list_runs())

    def snapshot(request: "Request") -> "Response":
        folder = watching.find(request.path_params["run"]).path / "snapshots"
        name = request.path_params["file"]
        fresh = 300 if name.startswith("pictures/") else 0
        return send_file(folder, name, pattern=SNAPSHOT, most_bytes=8 << 20, seconds_fresh=fresh)

    async def stream(request: "Request") -> "ASGIApp":
        run = watching.find(request.query_params.get("run", ""))
        if watching.num_streams >= MOST_STREAMS:
            return explained(503, f"{MOST_STREAMS} pages are open already", "close one of them")
        place = request.headers.get("last-event-id") or request.query_params.get("after", "")
        return Stream(watching, run, place, closing)

    return build_app(
        [
            Route("/", page),
            Route("/static/{name}", static),
            Route("/runs", runs),
            Route("/stream", stream),  # an application is as good as an answer
            Route("/snapshots/{run}/{file:path}", snapshot),
        ],
        port=port,
    )


class Watching:
    """The runs that may be shown, and those that are."""

    def __init__(self, shown: Run | None):
        self.shown = shown
        self.watched: dict[str, Told] = {}

    @property
    def num_streams(self) -> int:
        return sum(watched.num_streams for watched in self.watched.values())

    def known(self) -> dict[str, Run]:
        """Runs by name: those in `runs/` here, newest first, and the one that was asked for."""
        own = {self.shown.name: self.shown} if self.shown else {}
        return own | {run.name: run for run in all_runs() if run.name not in own}

    def find(self, name: str) -> Run:
        """Asked for every image, so that the other runs are only looked at when there is none of that name."""
        if self.shown is not None and name == self.shown.name:
            return self.shown
        if is_here(name):
            return Run(RUNS / name)
        raise UserError(
            f"there is no run `{name}`{suggest(name, self.known())}", hint="`/runs` lists what there is"
        )

    def list_runs(self) -> dict[str, Any]:
        """How every run stands, and which one to show when none is named."""
        first = self.shown or newest_run()
        rows = [row_of(run) for run in self.known().values()]
        return {"runs": rows, "shown": first.name if first else None}

    def open(self, run: Run) -> "Told":
        if run.name not in self.watched:
            self.watched[run.name] = Told(run)
        watched = self.watched[run.name]
        watched.num_streams += 1
        return watched

    def close(self, watched: "Told") -> None:
        """Keeps a few that nobody looks at, for whoever comes back."""
        watched.num_streams -= 1
        idle = [name for name, kept in self.watched.items() if not kept.num_streams]
        for name in idle[: max(0, len(idle) - MOST_RUNS_KEPT)]:
            del self.watched[name]


def is_here(name: str) -> bool:
    """Whether there is a run of that plain name in `runs/` here, as `all_runs` would list it."""
    try:
        return name == Path(name).name and not name.startswith(".") and is_run(RUNS / name)
    except (OSError, ValueError):  # too long for a name, or none
        return False


def row_of(run: Run) -> dict[str, str]:
    now = status_of(run)
    recall = "" if now.recall_1 is None else f", recall@1 {now.recall_1:.1%}"
    return {"name": now.run.name, "words": f"{now.state}, step {now.history.num_steps:,}{recall}"}


class Told(Summary):
    """One run, read once for all pages that show it; `version` counts what there was to tell."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.version = 0
        self.news = b""  # the message that leads from the version before to this one
        self.last_look = -1.0
        self.looking = asyncio.Lock()
        self.num_streams = 0

    async def look(self) -> None:
        """Reads what was added since, but not again so soon after somebody else did."""
        async with self.looking:
            if time.monotonic() - self.last_look < SECONDS_BETWEEN_LOOKS / 2 and self.version:
                return
            if self.version == 0:
                await asyncio.to_thread(self.read_on)  # a day's events take a second or two
            else:
                self.read_on()
            self.last_look = time.monotonic()

    def read_on(self) -> None:
        before = self.state_words
        events, is_anew = self.read()
        if is_anew or events or self.state_words != before or not self.version:
            self.version += 1
            self.news = self.tell_all() if is_anew else self.tell("more", columns_of(events))

    def since(self, place: str) -> bytes:
        """What somebody who knows everything up to that place has to be told."""
        identity, _, offset = place.partition("-") if re.fullmatch(PLACE, place, re.ASCII) else ("", "", "")
        gap = self.follower.offset - int(offset or 0)
        if not offset or int(identity) != self.follower.identity or not 0 <= gap <= LONGEST_GAP:
            return self.tell_all()
        events: list[Event] = []
        again = Follower(self.follower.path, place)
        for event in again.new() if gap else ():
            if again.offset > self.follower.offset:
                break  # written since we looked: the next message has it
            if isinstance(event, Started) or again.num_restarts or len(events) > MAX_NEW:
                return self.tell_all()
            events.append(event)
        return self.tell("more", columns_of(events))

    def tell_all(self) -> bytes:
        points = points_of(self.history)
        if names := points["evaluations"].get("snapshot"):
            there = {f"snapshots/{path.name}" for path in (self.run.path / "snapshots").glob("step-*.json")}
            points["evaluations"]["snapshot"] = [name if name in there else None for name in names]
        return self.tell("history", points)

    def tell(self, kind: str, points: dict[str, Any]) -> bytes:
        now = now_of(self)
        data = json.dumps({**points, "now": now}, separators=(",", ":"))
        return f"id: {self.follower.place}\nevent: {kind}\ndata: {data}\n\n".encode()


class Stream:
    """One page's stream of what happens in a run, as server-sent events."""

    def __init__(self, watching: Watching, run: Run, place: str, closing: asyncio.Event):
        self.watching, self.run, self.place, self.closing = watching, run, place, closing

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        watched = self.watching.open(self.run)
        ends = [asyncio.ensure_future(self.closing.wait()), asyncio.ensure_future(disconnected(receive))]
        try:
            await self.tell(watched, send, ends)
        except OSError:
            pass  # the page was closed while we wrote to it
        finally:
            for end in ends:
                end.cancel()
            self.watching.close(watched)

    async def tell(self, watched: Told, send: "Send", ends: Sequence[asyncio.Future[Any]]) -> None:
        await watched.look()
        body = b"retry: %d\n\n" % MILLISECONDS_TO_RETRY + watched.since(self.place)
        version, place, last_sent = watched.version, watched.follower.place, time.monotonic()
        while not any(end.done() for end in ends):
            if body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                last_sent = time.monotonic()
            # All streams wake at the same moments, so that one of them reads for all.
            to_wait = SECONDS_BETWEEN_LOOKS - time.monotonic() % SECONDS_BETWEEN_LOOKS
            await asyncio.wait(ends, timeout=to_wait, return_when=asyncio.FIRST_COMPLETED)
            await watched.look()
            body = b""
            if watched.version != version:
                body = watched.news if watched.version == version + 1 else watched.since(place)
            elif time.monotonic() - last_sent > SECONDS_BETWEEN_HEARTBEATS:
                body = b": still here\n\n"
            version, place = watched.version, watched.follower.place
        await send({"type": "http.response.body", "body": b""})


async def disconnected(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
