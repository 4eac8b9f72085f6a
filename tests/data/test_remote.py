import os
import re
import ssl
import tarfile
import time
import tracemalloc
from types import SimpleNamespace

import fsspec
import pytest
from s3fs import S3FileSystem

from data import open_shards, remote
from data.remote import read_file
from data.shards import read_shard_manifest
from runtime import servers
from tests.outside import SIZES, shards_folder
from tests.servers import serving

DATA = os.urandom(2**22)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(remote, "PAUSE_SEC", 0.01)


@pytest.fixture(params=["http", "s3"])
def served(request, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(DATA)
    with serving(request.param, tmp_path, monkeypatch) as (server, path):
        yield server, path


def read(path, name="a"):
    return read_file(path, name, lambda stream: stream.read())


def refused(path, name="a"):
    """Return how a file is refused, in one line that names it."""
    with pytest.raises((OSError, ValueError)) as raised:
        read(path, name)
    text = str(raised.value)
    assert len(text.splitlines()) == 1
    assert path in text
    return f"{type(raised.value).__name__}: {text}"


def test_a_server_gives_the_same_as_a_folder_in_one_request(served, tmp_path):
    server, path = served
    assert read(str(tmp_path)) == read(path) == DATA
    assert len(server.asked) == 1
    assert read(f"{path}/") == DATA


@pytest.mark.parametrize("fault", [503, "cut"])
def test_what_fails_once_is_tried_again(served, fault):
    server, path = served
    server.faults = [fault]
    assert read(path) == DATA
    assert len(server.asked) == 2


@pytest.mark.parametrize(("fault", "message"), [(400, "Bad Request"), ("cut", "not completed")])
def test_what_always_fails_is_tried_three_times(served, fault, message):
    server, path = served
    server.faults = [fault] * 100
    assert re.match(f"OSError: {path}/a cannot be read, tried 3 times: .*{message}", refused(path))
    assert len(server.asked) == remote.ATTEMPTS, "the libraries do not try again beside"


def test_missing_files_are_named(tmp_path, monkeypatch):
    assert "/a is not there: No such file" in refused(str(tmp_path))
    with serving("http", tmp_path, monkeypatch) as (server, path):
        assert f"FileNotFoundError: {path}/a is not there: 404 Not Found" in refused(path)
        server.faults = [403]
        assert f"PermissionError: {path}/a cannot be read: 403 Forbidden" in refused(path)
        assert len(server.asked) == 2, "it is not tried again"
    with serving("s3", tmp_path, monkeypatch) as (server, _):
        server.faults = [403]
        assert refused("s3://bucket").startswith("PermissionError: s3://bucket/a cannot be read: ")
        assert len(server.asked) == 1
        assert "s3://bucket/a is not there: The specified key does not exist" in refused("s3://bucket")
        assert "s3://other/a is not there: The bucket does not exist" in refused("s3://other")
        assert "Invalid bucket name" in refused("s3://b~@"), "botocore says this in two lines"


def test_a_file_that_appears_later_is_found(served, tmp_path):
    _, path = served
    assert "is not there" in refused(path, "b")
    (tmp_path / "b").write_bytes(b"new")
    assert read(path, "b") == b"new"
    (tmp_path / "b").write_bytes(b"newer")
    assert read(path, "b") == b"newer"


def test_an_untrusted_certificate_is_not_damage(tmp_path):
    (tmp_path / "a").write_bytes(DATA)

    def use(stream):
        raise ssl.SSLCertVerificationError(1, "self-signed")  # which is a ValueError, too

    with pytest.raises(OSError, match="cannot be read, tried 3 times: self-signed") as raised:
        read_file(str(tmp_path), "a", use)
    assert raised.type is OSError


def test_silence_ends_an_attempt_but_a_slow_download_does_not(served, monkeypatch):
    monkeypatch.setattr(servers, "SILENCE_SEC", 0.2)
    server, path = served
    server.faults = ["slow"]  # for longer than that
    assert read(path) == DATA
    assert len(server.asked) == 1
    server.faults = ["silent"]
    assert read(path) == DATA
    assert len(server.asked) == 3
    server.faults, server.asked = ["mute"] * 100, []
    assert "imeout on" in refused(path)
    assert len(server.asked) == remote.ATTEMPTS


@pytest.mark.parametrize(
    ("fault", "limit", "told"),
    [
        ("drip", ("WINDOW_SEC", 0.1), "bytes came in 0 s, must be at least 262144"),
        ("drip headers", ("ANSWER_SEC", 0.2), "no answer in 0 s"),
    ],
)
def test_a_server_that_drips_bytes_is_given_up(served, monkeypatch, fault, limit, told):
    server, path = served
    assert read(path) == DATA, "the first request to S3 also loads its library, which may take seconds"
    monkeypatch.setattr(servers, *limit)
    server.faults, server.asked = [fault] * 100, []
    assert told in refused(path)
    assert len(server.asked) == remote.ATTEMPTS


def test_only_waiting_counts_as_download_time(tmp_path, monkeypatch):
    """A clock that only a slow user of the file moves: it would be far beyond the limit."""
    (tmp_path / "a").write_bytes(DATA)
    clock = [0.0]
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))

    def use(stream):
        parts = []
        while part := stream.read(2**10):
            parts.append(part)
            clock[0] += servers.WINDOW_SEC
        return b"".join(parts)

    with serving("http", tmp_path, monkeypatch) as (server, path):
        assert read_file(path, "a", use) == DATA
        assert len(server.asked) == 1


@pytest.mark.parametrize("name", ["manifest.json", "shards.json", "held_out-000000.tar"])
def test_an_endless_server_is_given_up(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    read_shard_manifest.cache_clear()
    note = tarfile.TarInfo("././@LongLink")
    note.type, note.size = tarfile.GNUTYPE_LONGNAME, 2**32
    shards_folder("held_out-000000.tar", note.tobuf())
    with serving("http", "shards", monkeypatch) as (server, path):
        server.faults, server.of = ["endless"] * 3, name
        tracemalloc.start()
        try:
            message = rf"/{name} cannot be read, tried 3 times: "
            with pytest.raises((OSError, ValueError), match=message) as raised:
                open_shards(path, **SIZES)
            assert tracemalloc.get_traced_memory()[1] < 2**26
        finally:
            tracemalloc.stop()
        assert len(str(raised.value).splitlines()) == 1


def test_the_internet_does_not_redirect_into_the_local_network(tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a").write_bytes(DATA)
    with serving("http", tmp_path, monkeypatch) as (server, path):
        asked, inside = path.replace("127.0.0.1", "localhost"), f"{path}/b/a"
        server.faults = [inside]
        assert read(asked) == DATA, "a local server may lead to another"
        known = servers._addresses
        monkeypatch.setattr(
            servers, "_addresses", lambda host: known("8.8.8.8" if host == "localhost" else host)
        )
        server.asked, server.faults = [], [inside] * 3
        leads = "localhost leads to 127.0.0.1 (127.0.0.1), an address of a local"
        told = f"PermissionError: {asked}/a cannot be read: {leads}"
        assert refused(asked).startswith(told)
        assert server.asked == ["/a"], "it is not asked again"
        server.faults = [f"{asked}/b/a"]
        assert read(asked) == DATA
        server.faults = ["http://[::1]:1/a"]
        assert "leads to ::1" in refused(asked)


def test_a_file_closed_early_keeps_no_connection(served, recwarn, caplog):
    _, path = served
    for _ in range(12):  # a pool of S3 has ten
        assert read_file(path, "a", lambda stream: stream.read(10)) == DATA[:10]
    assert read(path) == DATA
    assert not [warning for warning in recwarn if re.search("nclosed|never awaited", str(warning.message))]
    assert not caplog.records


def test_proxies_are_found_in_the_environment(tmp_path, monkeypatch):
    with serving("http", tmp_path, monkeypatch) as (server, path):
        monkeypatch.setenv("http_proxy", path)
        assert "is not there" in refused("http://elsewhere.invalid")
    assert server.asked == ["http://elsewhere.invalid/a"]


def test_credentials_are_required_or_anonymous(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(DATA)
    with serving("s3", tmp_path, monkeypatch) as (_, path):
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        told = "PermissionError: s3://bucket/a cannot be read: Unable to locate credentials"
        assert refused(path).startswith(told)
        monkeypatch.setattr(fsspec.config, "conf", {})
        # As fsspec does when it is imported.
        fsspec.config.set_conf_env(fsspec.config.conf, {"FSSPEC_S3_ANON": "true"})
        S3FileSystem.clear_instance_cache()
        assert read(path) == DATA


def test_s3_without_its_library_says_what_to_install(monkeypatch):
    monkeypatch.setattr(remote, "find_spec", lambda name: None)
    assert refused("s3://bucket") == "ValueError: data.path=s3://bucket needs s3fs: pip install s3fs"


@pytest.mark.parametrize(
    "path",
    [
        *("pipe:cat a", "\tpipe:cat a", "PIPE:cat a", " \t FILE:///etc", "file:a", "gs://bucket"),
        *("hf://datasets/a/b", "memory://a", "ftp://host", "s3a://bucket", "S3://bucket", " https://host"),
        *("https://", "https://host/a b", "https://host/$(ls)", "https://host/a?b", "https://höst"),
        *("simplecache::https://host", "https://host::file:///etc", "s3://bucket/a::b"),
    ],
)
def test_other_addresses_are_refused_before_anything_is_opened(path, monkeypatch):
    monkeypatch.setattr(remote, "_open", lambda *_: pytest.fail("it was opened"))
    rule = "must be a folder, or an address http://, https:// or s3:// of plain signs"
    assert refused(path) == f"ValueError: data.path={path} {rule}"
