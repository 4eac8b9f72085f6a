"""Downloads, from a server in this process that can be told to misbehave."""

import base64
import hashlib
import time
from dataclasses import replace

import numpy as np
import pytest

from evaluation.fetch import RANDOM, fetch
from evaluation.files import PUBLISHED, PublishedFile
from runtime import servers
from tests.programs import start
from tests.servers import serving

MAX_BYTES = 2**22
CONTENT = np.random.default_rng(0).bytes(3 * 2**20 + 17)


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("server")
    (folder / "weights.pth").write_bytes(CONTENT)
    with serving(folder, monkeypatch) as server:
        yield server


def published(server, content=CONTENT):
    sha256 = None if content is None else hashlib.sha256(content).hexdigest()
    return PublishedFile(f"{server.url}/weights.pth", "a file", MAX_BYTES, sha256)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_resumes_where_it_stopped(server, tmp_path, ranges):
    server.faults, server.ranges = [None, "cut"], ranges
    with pytest.raises(OSError, match="broke after 1572876 of 3145745 bytes"):
        fetch(published(server), tmp_path)
    have = (tmp_path / "weights.pth.partial").stat().st_size
    assert not (tmp_path / "weights.pth").exists()
    for _ in range(2):  # once
        assert fetch(published(server), tmp_path).read_bytes() == CONTENT
    assert server.starts == [0, have]
    assert [file.name for file in tmp_path.iterdir()] == ["weights.pth"]


def test_a_complete_download_that_was_not_moved_is_used(server, tmp_path):
    (tmp_path / "weights.pth.partial").write_bytes(CONTENT)
    assert fetch(published(server), tmp_path).read_bytes() == CONTENT
    (tmp_path / "weights.pth").unlink()
    assert not server.starts
    (tmp_path / "weights.pth.partial").write_bytes(CONTENT + b"more")
    with pytest.raises(ValueError, match="3145749 bytes, the server has 3145745"):
        fetch(published(server, None), tmp_path)
    assert not (tmp_path / "weights.pth.partial").exists()


def test_another_file_than_the_published_one_is_refused(server, tmp_path):
    with pytest.raises(ValueError, match="not the published file"):
        fetch(published(server, b"other"), tmp_path)
    assert not list(tmp_path.glob("weights.pth*th"))
    assert not list(tmp_path.glob("*.partial"))
    (tmp_path / "weights.pth").write_bytes(b"mine")
    with pytest.raises(ValueError, match="not the published file"):
        fetch(published(server), tmp_path)
    assert (tmp_path / "weights.pth").read_bytes() == b"mine"


def test_where_no_hash_is_published_the_servers_is_checked(server, tmp_path):
    server.stated = {"Content-MD5": base64.b64encode(hashlib.md5(CONTENT).digest()).decode()}
    assert fetch(published(server, None), tmp_path).read_bytes() == CONTENT
    (tmp_path / "weights.pth").unlink()
    # Also where the beginning comes from an earlier, broken download.
    (tmp_path / "weights.pth.partial").write_bytes(bytes(2**20))
    with pytest.raises(ValueError, match="damaged in transfer"):
        fetch(published(server, None), tmp_path)
    server.stated = {"Content-MD5": base64.b64encode(hashlib.md5(b"other").digest()).decode()}
    with pytest.raises(ValueError, match="damaged in transfer"):
        fetch(published(server, None), tmp_path)


def test_more_than_the_file_can_have_is_refused(server, tmp_path):
    server.stated = {"Content-Length": MAX_BYTES + 1}
    with pytest.raises(
        ValueError, match=f"/weights.pth gives {MAX_BYTES + 1} bytes or more, must give at most {MAX_BYTES}"
    ):
        fetch(published(server, None), tmp_path)
    assert not server.starts
    server.stated = {"Content-Length": None}
    assert fetch(published(server), tmp_path / "whole").read_bytes() == CONTENT, "without a length, too"
    server.faults = [None, "endless"]
    with pytest.raises(ValueError, match=f"bytes or more, must give at most {MAX_BYTES}"):
        fetch(published(server, None), tmp_path)
    assert not list(tmp_path.glob("*.pth*l"))


@pytest.mark.parametrize(
    ("faults", "told"),
    [([None, "drip"], r"bytes came in 0 s, must be at least"), (["drip headers"], "no answer in 1 s")],
)
def test_a_server_that_drips_bytes_is_given_up(server, tmp_path, monkeypatch, faults, told):
    monkeypatch.setattr(servers, "WINDOW_SEC", 0.3)
    monkeypatch.setattr(servers, "ANSWER_SEC", 1)
    server.faults = faults
    began = time.monotonic()
    with pytest.raises(OSError, match=told):
        fetch(published(server), tmp_path)
    assert time.monotonic() - began < 5


def test_the_internet_does_not_redirect_into_the_local_network(server, tmp_path, monkeypatch):
    file = published(server)
    server.faults, known = [file.url], servers._addresses
    monkeypatch.setattr(servers, "_addresses", lambda host: known("8.8.8.8" if host == "localhost" else host))
    asked = replace(file, url=file.url.replace("127.0.0.1", "localhost"))
    with pytest.raises(
        PermissionError, match=r"localhost leads to 127\.0\.0\.1 \(127\.0\.0\.1\), an address of a local"
    ):
        fetch(asked, tmp_path)
    assert not server.starts


def test_without_a_connection_the_manual_way_is_printed(tmp_path):
    nobody = {"https_proxy": "http://127.0.0.1:9"}
    options = ("-m evaluation.fetch", "files=[inception]", f"folder={tmp_path}")
    result = start(*options, check=False, variables=nobody)
    file = PUBLISHED["inception"]
    assert result.returncode == 1
    assert result.stderr.startswith("error: inception: ")
    assert all(part in result.stderr for part in (file.url, file.sha256, f"{tmp_path}/{file.name}"))
    listing = start("-m evaluation.fetch")
    assert all(file.url in listing.stdout for file in PUBLISHED.values())
    assert "Warning" not in listing.stderr
    unknown = start("-m evaluation.fetch", "files=[cifar]", check=False)
    assert unknown.returncode == 1
    assert unknown.stderr == f"error: files=cifar must be one of {', '.join((*PUBLISHED, RANDOM))}\n"
