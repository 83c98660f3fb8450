"""A folder behind a real HTTP server on loopback, and the fsspec file system that reads it.

fsspec's own for http:// needs aiohttp. This one needs the standard library, and like an object
store it knows sizes and tags, and reads ranges.
"""

from __future__ import annotations

import re
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

PATIENCE_SECONDS = 100


class WebFiles:
    """What is served, and how often each file was asked for."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"web://127.0.0.1:{port}"
        self.reads: Counter[str] = Counter()


@contextmanager
def serving(folder: Path) -> Iterator[WebFiles]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            files.reads[self.path] += 1
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            path = folder / self.path.lstrip("/")
            try:
                data, modified = path.read_bytes(), path.stat().st_mtime_ns
            except OSError:
                self.send_error(404)
                return
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            part = data[int(asked[1]) : int(asked[2]) + 1] if asked else data
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{modified:x}"')
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            if with_body:
                self.wfile.write(part)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    files = WebFiles(folder, server.server_port)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield files
    finally:
        server.shutdown()
        thread.join(PATIENCE_SECONDS)
        server.server_close()


class WebFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    protocol = "web"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def _request(self, path: str, method: str, headers: dict[str, str]) -> Any:
        url = path.replace("web://", "http://")
        request = urllib.request.Request(url, method=method, headers=headers)
        try:
            return urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)
        except urllib.error.HTTPError as error:
            error.close()
            raise FileNotFoundError(path) if error.code == 404 else error from None

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        with self._request(path, "HEAD", {}) as answer:
            return {
                "name": path,
                "type": "file",
                "size": int(answer.headers["Content-Length"]),
                "ETag": answer.headers["ETag"],
            }

    def cat_file(self, path: str, start: int = 0, end: int | None = None, **_: Any) -> bytes:
        stop = self.info(path)["size"] if end is None else end
        with self._request(path, "GET", {"Range": f"bytes={start}-{stop - 1}"}) as answer:
            data: bytes = answer.read()
        return data

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return _WebFile(self, path, mode, block_size=4096)


class _WebFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        data: bytes = self.fs.cat_file(self.path, start, end)
        return data


fsspec.register_implementation("web", WebFileSystem, clobber=True)
