"""The methods of Launch in one process; tests/test_two_processes.py starts two processes."""

from contextlib import nullcontext

import pytest
import torch

from runtime.launch import Launch


def test_a_sum_does_not_change_its_argument(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))
    of_this_rank = torch.ones(3)
    assert Launch(0, 2).sum(of_this_rank).tolist() == [2, 2, 2]
    assert of_this_rank.tolist() == [1, 1, 1]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("rank", "order"), [(0, ["block", "barrier"]), (1, ["barrier", "block"])])
def test_the_first_rank_goes_before_the_others_even_if_it_fails(monkeypatch, rank, order, fails):
    seen = []
    monkeypatch.setattr(Launch, "barrier", lambda self: seen.append("barrier"))
    with pytest.raises(ValueError) if fails else nullcontext(), Launch(rank, 2).main_first():
        seen.append("block")
        if fails:
            raise ValueError
    assert seen == order


def test_only_the_first_rank_locks_the_file_of_a_result(monkeypatch, tmp_path):
    monkeypatch.setattr(Launch, "broadcast_from_main", lambda self, do: do() if self.is_main else None)
    place = {"file": tmp_path / "a.npz", "others": [], "overwrite": False}
    with Launch(1, 2).exclusive_output(**place):
        assert not list(tmp_path.iterdir())
        with Launch(0, 2).exclusive_output(**place):
            assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
