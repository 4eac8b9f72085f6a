"""One program writes an output file at a time, and existing files are overwritten only on request."""

from pathlib import Path

import pytest

from runtime.lock import Busy
from runtime.output import check_free, exclusive_output


def test_existing_files_are_overwritten_only_on_request(tmp_path):
    file, beside = tmp_path / "a.npz", tmp_path / "a.json"
    for existing in (file, beside):
        existing.write_text("before")
        for place in (check_free, lambda *arguments: exclusive_output(*arguments).__enter__()):
            with pytest.raises(
                FileExistsError, match=rf"^out={file}: {existing.name} already exists: set overwrite=true"
            ):
                place(file, [beside], False)
        with exclusive_output(file, [beside], True):
            assert existing.read_text() == "before", "it stays until it is replaced"
        existing.unlink()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_removed_again(tmp_path):
    with exclusive_output(tmp_path / "x/y/a.json", (), False):
        assert (tmp_path / "x/y").is_dir()
    assert list(tmp_path.iterdir()) == []
    with exclusive_output(tmp_path / "x/y/a.json", (), False):
        (tmp_path / "x/y/a.json").touch()
    assert [path.name for path in (tmp_path / "x/y").iterdir()] == ["a.json"]


def test_two_programs_do_not_write_the_same_file(tmp_path):
    for _ in range(2):
        with exclusive_output(tmp_path / "a.json", (), False):
            busy = pytest.raises(Busy, match=rf"^out={tmp_path}/a.json is in use by process \d+ on ")
            with busy, exclusive_output(tmp_path / "a.json", (), True):
                raise AssertionError


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        ("/proc/x/a.json", "cannot be written: "),
        ("/dev/null/a.json", "cannot be written: "),
        ("/dev", "(is a folder, must be a file|cannot be written)"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(place, rule):
    with pytest.raises(OSError, match=f"^out={place} {rule}"), exclusive_output(Path(place), (), False):
        raise AssertionError
