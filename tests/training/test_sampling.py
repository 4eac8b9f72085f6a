import pytest

from training.sampling import find_checkpoint


def test_a_checkpoint_is_given_by_step_name_or_path(tmp_path):
    folders = [tmp_path / "checkpoints" / f"step_{step:08d}" for step in (4, 12)]
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        find_checkpoint(tmp_path, None)
    for folder in folders:
        folder.mkdir(parents=True)
    assert find_checkpoint(tmp_path, None) == folders[1]
    for asked in ("4", "00000004", "step_00000004", str(folders[0])):
        assert find_checkpoint(tmp_path, asked) == folders[0]
    for asked in ("5", "step_5", "nowhere"):
        with pytest.raises(FileNotFoundError, match=rf"checkpoint={asked} not found: run=.* has steps 4, 12"):
            find_checkpoint(tmp_path, asked)
