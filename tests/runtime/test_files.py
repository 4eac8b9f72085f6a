"""What is written is there whole or not at all."""

import json

import pytest

from runtime.files import atomic_write, read_json, write_json, write_text


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    file = tmp_path / "record.json"
    write_json(file, {"a": 1})
    with pytest.raises(RuntimeError), atomic_write(file) as partial:
        partial.write_text("half")
        raise RuntimeError
    with pytest.raises(KeyboardInterrupt), atomic_write(file) as partial:
        raise KeyboardInterrupt
    assert read_json(file) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_what_is_written_beside_has_the_suffix_by_which_libraries_tell_formats(tmp_path):
    with atomic_write(tmp_path / "a.npz") as partial:
        assert partial.parent == tmp_path and partial.suffix == ".npz" and partial.name.startswith(".")
        partial.touch()


def test_json_has_no_words_for_numbers_that_are_not_finite(tmp_path):
    file = tmp_path / "a.json"
    write_json(file, {"loss": float("nan"), "of": [1.5, float("inf"), (2, "x")]})
    assert json.loads(file.read_text(), parse_constant=pytest.fail) == {"loss": None, "of": [1.5, None, [2, "x"]]}


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"])
def test_damaged_json_is_named(tmp_path, text):
    write_text(tmp_path / "a.json", text)
    with pytest.raises(ValueError, match=r"a\.json is damaged, it is no JSON") as raised:
        read_json(tmp_path / "a.json")
    assert len(str(raised.value).splitlines()) == 1
