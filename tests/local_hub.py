"""A hub of models, served on this machine as Hugging Face serves its own."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Repositories by name, each with its files' bytes; `asked` is what has been asked for."""

    daemon_threads = True

    def __init__(self, repositories: dict[str, dict[str, bytes]], token: str | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.token = token
        self.asked: list[str] = []
        self.ranges: list[str] = []
        self.breaks_after: dict[str, int] = {}  # bytes of a file, once

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> list[str]:
        """Names of the files whose content was asked for."""
        return [
            line.split("/")[-1]
            for line in self.asked
            if line.startswith("GET ") and "/resolve/" in line
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append(f"{self.command} {path}")
        if self.server.token and self.headers["Authorization"] != f"Bearer {self.server.token}":
            return self._refuse(401, "GatedRepo", "access is restricted")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+|/tree/[^/]+)?", path):
            files = self.server.repositories.get(found[1])
            if files is None:
                return self._refuse(404, "RepoNotFound", "Repository not found")
            is_tree = (found[2] or "").startswith("/tree")
            return self._json(_tree(files) if is_tree else _info(found[1], files))
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            files = self.server.repositories.get(found[1])
            if files is None:
                return self._refuse(404, "RepoNotFound", "Repository not found")
            if found[2] not in files:
                return self._refuse(404, "EntryNotFound", "Entry not found")
            return self._file(found[2], files[found[2]], is_head)
        self._refuse(404, "RepoNotFound", "Repository not found")

    def _file(self, name: str, content: bytes, is_head: bool) -> None:
        first = 0
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first = int(asked[1])
            self.server.ranges.append(f"{name} from {first}")
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        if is_head:
            return
        breaks_after = self.server.breaks_after.pop(name, None)
        self.wfile.write(content[first:] if breaks_after is None else content[first:breaks_after])
        if breaks_after is not None:
            self.close_connection = True

    def _json(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _info(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
    return {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": [],
            "private": False, "downloads": 0, "likes": 0}  # fmt: skip


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {
            "type": "file",
            "path": file,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }
        for file, content in files.items()
    ]


@contextmanager
def serving(repositories: dict[str, dict[str, bytes]], token: str | None = None) -> Iterator[Hub]:
    """A hub with these repositories."""
    with Hub(repositories, token) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
