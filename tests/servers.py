"""A local HTTP server of the files of a folder, with faults on request."""

import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PIECES, PAUSE_SEC = 8, 0.05  # between the bytes of a drip


class Server(ThreadingHTTPServer):
    """Serve the files of a folder; the next requests meet the `faults`, one each.

    `starts` are those of ranges that were asked for, which `ranges` obeys; `stated` headers replace others.
    A fault is an address to redirect to, "cut" after half of the file, "endless" after the file, "drip" (a
    byte now and then) or "drip headers".
    """

    def __init__(self, folder):
        self.folder, self.faults = Path(folder), []
        self.starts, self.ranges, self.stated = [], True, {}
        super().__init__(("127.0.0.1", 0), Files)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Say nothing of a client that went away."""


class Files(BaseHTTPRequestHandler):
    """The files of the folder at the root."""

    def do_GET(self):
        server = self.server
        fault = server.faults.pop(0) if server.faults else None
        if fault and fault.startswith("http:"):
            self.send_response(302)
            self.send_header("Location", fault)
            self.end_headers()
        elif fault in ("endless", "drip", "drip headers"):
            self.go_on(fault)
        else:
            self.answer(fault)

    do_HEAD = do_GET

    def go_on(self, fault):
        """Send without end, until the client goes away."""
        self.wfile.write(b"HTTP/1.0 200 OK\r\n")
        self.wfile.write(b"X: " if fault == "drip headers" else f"Content-Length: {2**40}\r\n\r\n".encode())
        file = self.server.folder / self.path.lstrip("/")
        with suppress(ConnectionError):
            self.wfile.write(file.read_bytes() if fault == "endless" else b"")
            while True:
                self.wfile.write(bytes(2**20) if fault == "endless" else b"x")
                time.sleep(0 if fault == "endless" else PAUSE_SEC)

    def answer(self, fault):
        file = self.server.folder / self.path.lstrip("/")
        if not file.is_file():
            self.send_error(404)
            return
        data, server = file.read_bytes(), self.server
        first = int(self.headers.get("Range", "bytes=0-")[6:-1])
        server.starts += [first] if self.command == "GET" else []
        first = first if server.ranges else 0
        self.send_response(206 if first else 200)
        for key, value in {"Content-Length": len(data) - first, **server.stated}.items():
            if value is not None:
                self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        size = len(data) // PIECES + 1
        for start in range(first, len(data), size):
            if fault == "cut" and start > len(data) // 2:
                return
            self.wfile.write(data[start : start + size])

    def log_message(self, *_):
        pass


@contextmanager
def serving(folder, monkeypatch):
    """Serve a folder at `server.url`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(folder) as server:
        yield server
