"""Local servers of the files of a folder, by HTTP or as an S3 bucket, with faults on request."""

import os
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from s3fs import S3FileSystem

PIECES, PIECE_SEC = 8, 0.05  # of a file that is sent slowly
SILENT_SEC = 0.6
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "name",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "no_proxy": "127.0.0.1",
}


class Server(ThreadingHTTPServer):
    """Serve the files of a folder; the next requests whose paths end in `of` meet the `faults`, one each.

    `starts` are those of ranges that were asked for, which `ranges` obeys; `stated` headers replace others.
    A fault is a status, an address to redirect to, "mute" (no answer), "cut" or "silent" after half of the
    file, "slow", "endless" after the file, "drip" (a byte now and then) or "drip headers".
    """

    def __init__(self, folder, handler):
        self.folder, self.asked, self.faults, self.of = Path(folder), [], [], ""
        self.starts, self.ranges, self.stated = [], True, {}
        super().__init__(("127.0.0.1", 0), handler)
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
        server.asked.append(self.path)
        fault = server.faults.pop(0) if server.faults and self.path.endswith(server.of) else None
        if isinstance(fault, int):
            self.send_error(fault)
        elif fault == "mute":
            time.sleep(SILENT_SEC)
        elif fault and fault.startswith("http:"):
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
                time.sleep(0 if fault == "endless" else PIECE_SEC)

    def answer(self, fault):
        self.send_file(self.path, fault)

    def send_file(self, name, fault):
        file = self.server.folder / name.lstrip("/")
        if file.is_file():
            self.send(200, file.read_bytes(), fault)
        else:
            self.send(404, error("NoSuchKey", "The specified key does not exist."))

    def send(self, status, data, fault=None):
        first, server = int(self.headers.get("Range", "bytes=0-")[6:-1]), self.server
        server.starts += [first] if self.command == "GET" else []
        first = first if server.ranges else 0
        self.send_response(206 if first else status)
        for key, value in {"Content-Length": len(data) - first, **server.stated}.items():
            if value is not None:
                self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        size = len(data) // PIECES + 1
        for start in range(first, len(data), size):
            if fault in ("cut", "silent") and start > len(data) // 2:
                time.sleep(SILENT_SEC if fault == "silent" else 0)
                return
            time.sleep(PIECE_SEC if fault == "slow" else 0)
            self.wfile.write(data[start : start + size])

    def log_message(self, *_):
        pass


class Bucket(Files):
    """The part of S3 that reading needs: the objects of the bucket `bucket`."""

    def answer(self, fault):
        bucket, _, key = self.path.partition("?")[0].lstrip("/").partition("/")
        if bucket == "bucket":
            self.send_file(key, fault)
        else:
            self.send(404, error("NoSuchBucket", "The bucket does not exist"))


def error(code, message):
    """Return an error in the XML of S3."""
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


@contextmanager
def serving(kind, folder, monkeypatch):
    """Serve a folder by "http" or "s3"; yield the server and its address."""
    with Server(folder, {"http": Files, "s3": Bucket}[kind]) as server:
        for key, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": server.url}.items():
            monkeypatch.setenv(key, value)
        for key in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(key, raising=False)
        S3FileSystem.clear_instance_cache()  # of an earlier server
        yield server, server.url if kind == "http" else "s3://bucket"
