"""Measures what batching the requests of several clients gains, and how long the clients wait.

    python benchmarks/serving.py --model RUN                        # 64 clients, texts, five rounds of 3 s for each
    python benchmarks/serving.py --model RUN --clients 1 --json
    python benchmarks/serving.py --model RUN --pictures FOLDER      # the same with uploaded images

Two servers of the same model run, one with `--no-batching`. The same clients query them in turn, so that load on the
machine affects both. The clients are a separate process that uses HTTP over plain sockets and keeps its connections
open. Every text is different, so that no cache can answer. The server's CPU time is measured too, because it depends
less on other load.
"""

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil

FIGURES = ("requests_per_second", "p50_milliseconds", "p99_milliseconds", "cpu_milliseconds")
MODES = {"batching": True, "no batching": False}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a run or a model folder")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per round and server")
    parser.add_argument("--pictures", type=Path, help="upload the images of this folder instead of texts")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--port", type=int, help=argparse.SUPPRESS
    )  # of the server; this is the clients' process
    asked = parser.parse_args()
    if asked.port:
        print(json.dumps(asyncio.run(load(asked.port, asked.clients, asked.seconds, asked.pictures))))
        return
    result = compare(asked.model, asked.clients, asked.rounds, asked.seconds, asked.pictures)
    print(json.dumps(result) if asked.json else in_words(result))


def compare(
    model: str, clients: int, rounds: int, seconds: float, pictures: Path | None = None
) -> dict[str, Any]:
    """Requests a second and waiting times with and without batching, and their ratio."""
    with contextlib.ExitStack() as stack:
        servers = {mode: stack.enter_context(server(model, batching)) for mode, batching in MODES.items()}
        for one in servers.values():
            ask_with_clients(one, clients, 1.0, pictures)  # warm
        blocks: dict[str, list[dict[str, Any]]] = {mode: [] for mode in servers}
        for number in range(rounds):
            for mode in list(servers) if number % 2 else list(servers)[::-1]:
                blocks[mode].append(ask_with_clients(servers[mode], clients, seconds, pictures))
    result: dict[str, Any] = {"clients": clients, "what": "pictures" if pictures else "texts"}
    for mode, some in blocks.items():
        result[mode] = {name: statistics.median(block[name] for block in some) for name in FIGURES} | {
            "num_errors": sum(block["num_errors"] for block in some)
        }
    ratios = [
        one["requests_per_second"] / other["requests_per_second"]
        for one, other in zip(blocks["batching"], blocks["no batching"], strict=True)
    ]
    return result | {"gain": statistics.median(ratios), "gains": sorted(ratios)}


@contextlib.contextmanager
def server(model: str, batching: bool) -> Iterator[tuple[int, psutil.Process]]:
    """A server in a process of its own, and its port."""
    command = [sys.executable, "-m", "lapclip", "serve", "--model", model, "--port", "0", "--no-open"]
    command += [] if batching else ["--no-batching"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        found = re.search(r"127\.0\.0\.1:(\d+)/", said)
        if not found:
            raise SystemExit(said + process.stderr.read())
        yield int(found[1]), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(10)
        process.stderr.close()


def ask_with_clients(
    server: tuple[int, psutil.Process], clients: int, seconds: float, pictures: Path | None
) -> dict[str, Any]:
    """What clients in a process of their own saw, and what it cost the server."""
    port, process = server
    arguments = ["--model", "-", "--port", str(port), "--clients", str(clients), "--seconds", str(seconds)]
    arguments += ["--pictures", str(pictures)] if pictures else []
    before = sum(process.cpu_times()[:2])
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True)
    told = json.loads(done.stdout)
    spent = sum(process.cpu_times()[:2]) - before
    return told | {"cpu_milliseconds": 1000 * spent / max(1, told["num_requests"])}


async def load(port: int, clients: int, seconds: float, pictures: Path | None) -> dict[str, Any]:
    """Each client asks again as soon as it has its answer."""
    bodies = image_bodies(pictures) if pictures else text_bodies()
    waits: list[float] = []
    num_errors = 0
    end = time.perf_counter() + seconds

    async def ask() -> None:
        nonlocal num_errors
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (started := time.perf_counter()) < end:
            kind, body = next(bodies)
            head = f"POST /embed HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: {kind}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            found = re.search(rb"content-length: (\d+)", answer)
            await reader.readexactly(int(found[1]) if found else 0)
            waits.append(time.perf_counter() - started)
            num_errors += not answer.startswith(b"HTTP/1.1 200")
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(clients)))
    elapsed_seconds = time.perf_counter() - started
    waits.sort()
    return {
        "requests_per_second": len(waits) / elapsed_seconds,
        "p50_milliseconds": 1000 * waits[len(waits) // 2],
        "p99_milliseconds": 1000 * waits[len(waits) * 99 // 100],
        "num_errors": num_errors,
        "num_requests": len(waits),
    }


def text_bodies() -> Iterator[tuple[str, bytes]]:
    words = ("red", "green", "blue", "small", "large", "old", "new", "cat", "dog", "tree", "boat", "bird")
    start = time.time_ns()
    for number in count():
        text = f"a photo of a {words[number % 12]} {words[number // 12 % 12]} on a table, {start + number}"
        yield "application/json", json.dumps({"texts": [text]}).encode()


def image_bodies(folder: Path) -> Iterator[tuple[str, bytes]]:
    files = [path.read_bytes() for path in sorted(folder.glob("*.jpg"))[:500]]
    for number in count():
        yield "image/jpeg", files[number % len(files)]


def in_words(result: dict[str, Any]) -> str:
    lines = [f"{result['clients']} clients, {result['what']}"]
    for mode in MODES:
        told = result[mode]
        lines.append(
            f"  {mode:12} {told['requests_per_second']:7.0f} requests a second,"
            f" p50 {told['p50_milliseconds']:.1f} ms, p99 {told['p99_milliseconds']:.1f} ms,"
            f" {told['cpu_milliseconds']:.2f} ms of processor a request, {told['num_errors']} errors"
        )
    lowest, highest = result["gains"][0], result["gains"][-1]
    return "\n".join(
        [*lines, f"  batching answers {result['gain']:.2f} times as many ({lowest:.2f} to {highest:.2f})"]
    )


if __name__ == "__main__":
    main()
