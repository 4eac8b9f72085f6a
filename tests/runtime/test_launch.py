"""The methods of Launch in one process; tests/test_two_processes.py starts two processes."""

import pytest
import torch

from runtime.launch import Launch


def test_a_sum_does_not_change_its_argument(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))
    of_this_rank = torch.ones(3)
    assert Launch(0, 2).sum(of_this_rank).tolist() == [2, 2, 2]
    assert of_this_rank.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("rank", "order"), [(0, ["block", "barrier"]), (1, ["barrier", "block"])])
def test_the_first_rank_goes_before_the_others(monkeypatch, rank, order):
    seen = []
    monkeypatch.setattr(Launch, "barrier", lambda self: seen.append("barrier"))
    with Launch(rank, 2).main_first():
        seen.append("block")
    assert seen == order


def test_the_others_do_not_wait_for_a_first_rank_that_failed(monkeypatch):
    seen = []
    monkeypatch.setattr(Launch, "barrier", lambda self: seen.append("barrier"))
    with pytest.raises(ValueError, match="damaged"), Launch(0, 2).main_first():
        raise ValueError("damaged")
    assert seen == ["barrier"]


def test_only_the_first_rank_locks_the_file_of_a_result(monkeypatch, tmp_path):
    monkeypatch.setattr(
        Launch, "broadcast_from_main", lambda self, decide: decide() if self.is_main else None
    )
    place = {"file": tmp_path / "a.npz", "others": [], "overwrite": False}
    with Launch(1, 2).exclusive_output(**place):
        assert not list(tmp_path.iterdir())
        with Launch(0, 2).exclusive_output(**place):
            assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
