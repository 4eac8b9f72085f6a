"""The bytes of a step agree with the formula."""

import pytest

from benchmarks import communication


def test_a_prediction_is_the_bytes_over_the_slowest_link():
    rows = {(r["network"][:4], r["GPUs"], r["kind"]): r for r in communication.predictions()}
    num_weights = 674_834_208
    (inside, across) = (float(rows["XL/2", gpus, "fsdp"]["ms"]) for gpus in (8, 64))
    assert inside == pytest.approx(1000 * 12 * num_weights * 7 / 8 / 450e9, abs=0.5)
    assert across == pytest.approx(1000 * 12 * num_weights * 63 / 64 / 400e9, abs=0.5)


@pytest.mark.slow
def test_two_processes_send_the_bytes_of_the_formula(monkeypatch):
    """Other tests may send a few percent more at the same time."""
    monkeypatch.setattr(communication, "NUM_PROCESSES", (2,))
    rows = communication.measure(("model/size=s_4", "train.compile=false"))
    assert [row["kind"] for row in rows] == list(communication.KINDS)
    for row in rows:
        assert row["mib"] == pytest.approx(row["predicted_mib"], rel=0.2)
