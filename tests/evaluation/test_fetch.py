"""Test downloads with a server in this process."""

import hashlib
import io
import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from evaluation.fetch import RANDOM, fetch
from evaluation.files import PUBLISHED, PublishedFile
from tests.programs import start


class Server(SimpleHTTPRequestHandler):
    """Serve a folder; send only half of a file called cut-*."""

    def copyfile(self, source, outputfile):
        content = source.read()
        outputfile.write(content[: len(content) // 2] if "cut" in self.path else content)

    def log_message(self, *_):
        """Log nothing."""


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    """The folder and the address of a local server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    folder = tmp_path_factory.mktemp("server")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def published(server, name, content, sha256=None):
    folder, address = server
    (folder / name).write_bytes(content)
    return PublishedFile(f"{address}/{name}", "a file", sha256)


def npz():
    file = io.BytesIO()
    np.savez(file, arr_0=np.arange(10_000))
    return file.getvalue()


def test_a_file_is_downloaded_once_and_checked(server, tmp_path):
    content = bytes(range(256)) * 4000
    file = published(server, "weights.pth", content, hashlib.sha256(content).hexdigest())
    assert fetch(file, tmp_path / "in/here").read_bytes() == content
    (server[0] / "weights.pth").unlink()
    assert fetch(file, tmp_path / "in/here").read_bytes() == content
    assert [file.name for file in (tmp_path / "in/here").iterdir()] == ["weights.pth"]


def test_only_old_parts_of_downloads_are_removed(server, tmp_path):
    """A new one may belong to another process that downloads the same file."""
    parts = [tmp_path / f".weights.partial.npz.{name}.partial" for name in ("old", "new")]
    for part in parts:
        part.write_bytes(b"")
    os.utime(parts[0], (1, 1))
    fetch(published(server, "weights.npz", npz()), tmp_path)
    assert [part.exists() for part in parts] == [False, True]


def test_another_file_than_the_published_one_is_refused(server, tmp_path):
    file = published(server, "weights.pth", b"other", hashlib.sha256(b"published").hexdigest())
    with pytest.raises(RuntimeError, match="invalid hash value"):
        fetch(file, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "weights.pth").write_bytes(b"mine")
    with pytest.raises(ValueError, match="not the published file"):
        fetch(file, tmp_path)
    assert (tmp_path / "weights.pth").read_bytes() == b"mine"


def test_a_broken_download_is_refused_without_a_published_hash(server, tmp_path):
    assert fetch(published(server, "batch.npz", npz()), tmp_path).read_bytes() == npz()
    with pytest.raises(ValueError, match="is truncated, or not an"):
        fetch(published(server, "cut-batch.npz", npz()), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["batch.npz"]


def test_without_a_connection_the_manual_way_is_printed(tmp_path):
    offline = {"https_proxy": "http://127.0.0.1:9"}
    options = ("-m evaluation.fetch", "files=[inception]", f"folder={tmp_path}")
    result = start(*options, check=False, variables=offline)
    file = PUBLISHED["inception"]
    assert result.returncode == 1
    assert result.stderr.startswith("error: inception: ")
    assert len(result.stderr.splitlines()) == 1
    assert all(part in result.stderr for part in (file.url, file.sha256, f"{tmp_path}/{file.name}", "curl"))
    listing = start("-m evaluation.fetch")
    assert all(file.url in listing.stdout for file in PUBLISHED.values())
    assert "Warning" not in listing.stderr
    unknown = start("-m evaluation.fetch", "files=[cifar]", check=False)
    assert unknown.returncode == 1
    assert unknown.stderr == f"error: files=cifar must be one of {', '.join((*PUBLISHED, RANDOM))}\n"
