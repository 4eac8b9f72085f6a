"""A run that was killed again and again ends like one that was not; `make soak` does more, and compiled."""

import pytest

from tests.faults.killing import VARIANTS, kill_often

NUM_KILLS = {"accumulation": 6, "two processes": 2}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_KILLS)
def test_a_run_killed_at_random_resumes_bitwise(tmp_path, name):
    outcome = kill_often(tmp_path, VARIANTS[name], NUM_KILLS[name], seed=0)
    assert outcome.lost == []
    assert sum(outcome.kills.values()) == NUM_KILLS[name]
