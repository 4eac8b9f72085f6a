"""Files are written completely or not at all."""

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from runtime.arrays import read_array
from runtime.files import MAX_JSON_BYTES, atomic_write, read_json, write_json, write_text
from tests.outside import npy


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "record.json"
    write_json(file, {"a": 1})
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), atomic_write(file) as partial:
            partial.write_text("half")
            raise error
        assert read_json(file) == {"a": 1}
        assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_written_file_and_its_folder_are_synced(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda number: (synced.append(Path(f"/proc/self/fd/{number}").readlink()), fsync(number))
    )
    write_text(tmp_path / "a.txt", "new")
    assert synced == [tmp_path / ".a.partial.txt", tmp_path], "with the suffix of the file"


def test_a_link_at_the_partial_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".a.partial.json").symlink_to(tmp_path / "victim")
    write_json(tmp_path / "a.json", 1)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "a.json").is_symlink()


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"loss": float("nan"), "of": [1.5, float("inf"), (float("nan"), "x")]})
    expected = {"loss": None, "of": [1.5, None, [None, "x"]]}
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == expected


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"])
def test_damaged_json_is_named(tmp_path, text):
    write_text(tmp_path / "a.json", text)
    with pytest.raises(ValueError, match=r"a\.json is damaged, not JSON") as raised:
        read_json(tmp_path / "a.json")
    assert len(str(raised.value).splitlines()) == 1


def test_json_that_is_too_long_is_not_read(tmp_path):
    file = tmp_path / "a.json"
    write_text(file, '"' + "a" * 8 + '"')
    assert read_json(file, max_bytes=10) == "a" * 8
    with pytest.raises(ValueError, match=r"a\.json is damaged, .*: it holds more than 9 bytes"):
        read_json(file, max_bytes=9)
    with file.open("wb") as opened:
        opened.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ValueError, match=f"it holds more than {MAX_JSON_BYTES} bytes"):
        read_json(file)


def test_json_of_mostly_brackets_is_not_parsed(tmp_path):
    file = tmp_path / "a.json"
    write_text(file, json.dumps([["0", 0]] * 10_000, separators=(",", ":")))
    assert len(read_json(file)) == 10_000, "as short as labels can be"
    for nothing in ([], {}):
        write_text(file, json.dumps([nothing] * 10_000))
        with pytest.raises(ValueError, match=r"a\.json is damaged, .* holds 1000\d brackets in \d+ bytes"):
            read_json(file)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8"])
def test_an_array_is_read_in_its_order_and_type(order, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype, order=order)
    data = npy(array)
    loaded = read_array(io.BytesIO(data), len(data))
    assert np.array_equal(loaded, array) and loaded.dtype == array.dtype
