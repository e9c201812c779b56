"""A fleet on several Ray nodes of this machine, requests of many kinds, and their answers."""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import secrets
import shutil
import socket
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.frame import HERE, Checkout, Json, serving
from hotcold.actors.processes.cluster import NAMESPACE, OwnFolders, keep_stdout_clean

SYSTEM = {"threads": 1, "context": 512, "kv-tokens": 8192}  # options of each system
_STORE_BYTES = 200 << 20
_TIMEOUT_S = 300.0
_TEXT = inspect.getsource(textwrap) + inspect.getsource(random)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
_LARK = 'start: "[" /[a-z ]{1,30}/ ("," /[a-z]{1,8}/)* "]"'


class Broken(Exception):
    """The connection broke off, or what is before the door said that it failed."""


@dataclass
class Fleet:
    """Ray nodes of which the first, the head, has no CPUs; at `url` their proxies listen.

    apart: whether each node's processes have `num_cpus` cores that no other node's have
    """

    cluster: Any
    url: str
    num_cpus: int
    port: int
    apart: bool = False

    def add_node(self) -> None:
        """Start one more."""
        number = len(self.cluster.worker_nodes)
        node = self.cluster.add_node(
            num_cpus=self.num_cpus,
            object_store_memory=_STORE_BYTES,
        )
        if self.apart:
            cores = sorted(os.sched_getaffinity(0))[number * self.num_cpus :][: self.num_cpus]
            os.sched_setaffinity(node.all_processes["raylet"][0].process.pid, cores)  # and children

    def free(self, title: str) -> None:
        """Let processes of actors whose titles begin so have all cores."""
        for process in self.processes(title):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, os.sched_getaffinity(0))

    def nodes(self) -> list[Any]:
        """All but the head."""
        return sorted(self.cluster.worker_nodes, key=lambda node: str(node.node_id))

    def processes(self, title: str, of: Sequence[Any] = ()) -> list[psutil.Process]:
        """Processes of actors whose titles begin so, of all nodes or of some."""
        found = []
        for node in of or self.cluster.list_all_nodes():
            for process in processes_of(node):
                with suppress(psutil.Error):
                    if " ".join(process.cmdline()).startswith(f"ray::{title}"):
                        found.append(process)
        return found


def processes_of(node: Any) -> list[psutil.Process]:
    """The raylet of a node and all that it started."""
    found = []
    for one in node.all_processes.get("raylet", []):
        with suppress(psutil.NoSuchProcess):
            raylet = psutil.Process(one.process.pid)
            found += [raylet, *raylet.children(recursive=True)]
    return found


@contextmanager
def fleet(num_nodes: int, num_cpus: int = 1, apart: bool = False) -> Iterator[Fleet]:
    """A Ray cluster of this program's own with Ray Serve, closed to others; nothing is deployed."""
    folder = Path(tempfile.mkdtemp(prefix="hc", dir="/tmp"))  # short: it holds unix sockets
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    os.environ |= {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_worker_niceness": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "4",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    from hotcold.actors.private_ray.closed_ray import read_anew

    read_anew()
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={**head, "temp_dir": str(folder / "ray")}
    )
    try:
        ray.init(
            address=cluster.address, namespace=NAMESPACE, logging_level="error",
            log_to_driver=False, job_config=OwnFolders(),
        )  # fmt: skip
        keep_stdout_clean()
        port = free_port()
        found = Fleet(cluster, f"http://127.0.0.1:{port}", num_cpus, port, apart)
        for _ in range(num_nodes):
            found.add_node()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield found
    finally:
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        for node in cluster.list_all_nodes():
            for process in processes_of(node):
                with suppress(psutil.Error):
                    process.kill()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


@contextmanager
def one_system(*model: str, **options: Any) -> Iterator[str]:
    """The address of a server with one system, of `SYSTEM` and these options."""
    port = free_port()
    flags = [
        text for name, value in {**SYSTEM, **options}.items() for text in (f"--{name}", str(value))
    ]
    with serving(Checkout(), *model, *flags, "--no-page", port=port):
        url = f"http://127.0.0.1:{port}"
        while httpx.get(f"{url}/health").json().get("status") != "ok":
            time.sleep(0.1)
        yield url


@dataclass
class Answer:
    """What a client got of an answer; `at_s` are the moments of its pieces, by time.monotonic."""

    texts: dict[int, str] = field(default_factory=dict)  # by choice
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    counts: tuple[int, int] | None = None  # tokens of prompt and answer
    num_cached: int = 0
    at_s: list[float] = field(default_factory=list)

    def difference(self, other: Answer) -> str:
        """What is not the same; "" for nothing."""
        for name in ("texts", "logprobs", "ends", "counts"):
            mine, wanted = getattr(self, name), getattr(other, name)
            if mine != wanted:
                return f"{name}: {mine!r} instead of {wanted!r}"
        return ""


def pool(count: int, seed: int = 0) -> list[Json]:
    """Requests, each with its `path`; chat, completions and Ollama's, of all kinds and lengths."""
    return [_request(random.Random(f"{seed} {number}")) for number in range(count)]


def _words(chance: random.Random, low: int, high: int) -> str:
    first = chance.randrange(len(_TEXT) - high)
    return _TEXT[first : first + chance.randrange(low, high)]


def _request(chance: random.Random) -> Json:
    most = chance.randrange(2, 24) if chance.random() < 0.4 else chance.randrange(40, 400)
    options: Json = {"temperature": 0.0}
    if chance.random() < 0.6:
        options = {"temperature": chance.uniform(0.3, 1.4), "seed": chance.randrange(1 << 31)}
        options |= chance.choice([{}, {"top_k": 40}, {"top_p": 0.9}, {"repeat_penalty": 1.2}])
    if chance.random() < 0.25:
        options["stop"] = chance.sample(["\n\n", "return", " the", ").", "self", "import"], 2)
    # Some begin as others do.
    start = _TEXT[(at := 1500 * chance.randrange(4)) : at + 350] if chance.random() < 0.5 else ""
    text = start + (_words(chance, 4, 60) if chance.random() < 0.6 else _words(chance, 120, 300))
    path = chance.choice(["/v1/chat/completions", "/v1/completions", "/api/chat", "/api/generate"])
    held = chance.random() < 0.2  # by a grammar
    body: Json = {"path": path, "model": "demo"}
    if path.startswith("/api"):
        body |= {"options": {**options, "num_predict": most}}
        body |= {"format": _SCHEMA} if held else {}
    else:
        body |= {**options, "max_tokens": most}
        if held:
            named = {"name": "one", "schema": _SCHEMA}
            body |= chance.choice([
                {"response_format": {"type": "json_schema", "json_schema": named}},
                {"grammar": _LARK},
            ])  # fmt: skip
        elif chance.random() < 0.6:
            body["ignore_eos"] = True
        if chance.random() < 0.4:
            chats = {"logprobs": True, "top_logprobs": 2}
            body |= chats if "chat" in path else {"logprobs": 2}
        if chance.random() < 0.1:
            body["n"] = 2
    if path.endswith(("/chat", "/chat/completions")):
        messages = [{"role": "user", "content": text}]
        return body | {
            "messages": [*([{"role": "system", "content": start}] * bool(start)), *messages]
        }
    return body | {"prompt": text}


def ask(
    client: httpx.Client,
    request: Json,
    streamed: bool,
    told: Callable[[float, float], None] | None = None,
) -> Answer:
    """An answer, as a stream or whole; `told` has the moments between which nothing came.

    Errors:  Broken; ValueError where the door refuses, or the answer says that it failed
    """
    body = {name: value for name, value in request.items() if name != "path"}
    body["stream"] = streamed
    if streamed and not request["path"].startswith("/api"):
        body["stream_options"] = {"include_usage": True}
    found, last_s, is_whole = Answer(), time.monotonic(), False
    try:
        with client.stream("POST", request["path"], json=body, timeout=_TIMEOUT_S) as reply:
            if reply.status_code != 200:
                text = reply.read().decode()
                if not text.startswith("{"):  # the proxy's, not the door's
                    raise Broken(f"{reply.status_code}: {text[:200]}")
                raise ValueError(f"{reply.status_code}: {text[:300]}")
            for line in reply.iter_lines():
                line = line.removeprefix("data: ").strip()
                if not line.startswith("{"):  # none, or a comment that keeps the connection
                    is_whole = is_whole or line == "[DONE]"
                    continue
                now = time.monotonic()
                if told is not None and streamed:
                    told(last_s, now)
                last_s = now
                found.at_s.append(now)
                is_whole = _read(found, json.loads(line)) or is_whole or not streamed
    except (httpx.TransportError, json.JSONDecodeError) as error:
        raise Broken(repr(error)) from None
    if not is_whole:
        raise Broken("the answer has no end")
    return found


def _read(found: Answer, piece: Json) -> bool:
    """Add a piece, or the whole, of an answer; whether Ollama calls it the last."""
    if "error" in piece:
        raise ValueError(f"error: {piece['error']}")
    if "choices" not in piece:  # Ollama's
        message = piece.get("message", piece)
        text = message.get("content", message.get("response", ""))
        found.texts[0] = found.texts.get(0, "") + text
        if piece["done"]:
            found.ends[0] = piece["done_reason"]
            found.counts = piece["prompt_eval_count"], piece["eval_count"]
        return bool(piece["done"])
    for choice in piece["choices"]:
        at = choice["index"]
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("content", part.get("text")) or ""
        found.texts[at] = found.texts.get(at, "") + text
        if logprobs := choice.get("logprobs"):
            rows = logprobs.get("content") or [
                list(row)
                for row in zip(
                    logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True
                )
            ]
            found.logprobs[at] = found.logprobs.get(at, []) + rows
        if choice.get("finish_reason"):
            found.ends[at] = choice["finish_reason"]
    if usage := piece.get("usage"):
        found.counts = usage["prompt_tokens"], usage["completion_tokens"]
        found.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return False
