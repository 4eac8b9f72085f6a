"""Each failure set has its damage, the table judges it, and the page has the table of the record."""

import numpy as np
import pytest

from benchmarks.results import read_results
from study.failures import NONE, failure_sets, measure, table
from tests.programs import ROOT

(RECORD,) = (ROOT / "study/results").glob("failures_*.csv")


def a_set(n, seed=0):
    images = np.random.default_rng(seed).integers(0, 256, (n, 8, 8, 1), dtype=np.uint8)
    return images, np.arange(n) % 20


def is_among(images, others):
    """True for each of the images that is among the others."""
    known = {image.tobytes() for image in others}
    return np.array([image.tobytes() in known for image in images])


def test_failure_sets_keep_sizes_and_have_their_damage():
    real, train = a_set(100), a_set(300, seed=1)
    sets = failure_sets(real, train)
    for name, (images, labels) in sets.items():
        assert images.shape[1:] == (8, 8, 1) and images.dtype == np.uint8 and len(images) == len(labels)
        assert len(images) == (20 if "a fifth" in name else 100)
    images, labels = sets["a tenth of the classes is missing"]
    assert set(labels) == set(range(20)) - {0, 10} and is_among(images, real[0]).all()
    assert is_among(sets["copies of training images"][0], train[0]).all()
    assert not is_among(sets["two images in one"][0], real[0]).all()
    for name in ("blur", "contrast"):
        assert sets[name][0].std() < 0.9 * real[0].std()


def test_a_score_notices_a_change_of_three_standard_errors():
    keys = ("score", "failure", "value", "higher_is_better")
    cells = [("fd", NONE, 1.0, False), ("fd", "blur", 5.3, False), ("fd", "copies", -5.0, "False")]
    cells += [("recall", NONE, 1.0, "True"), ("recall", "blur", 5.2, True), ("recall", "copies", -9, True)]
    rows = [dict(zip(keys, row, strict=True), standard_error=1.0) for row in cells]
    assert table(rows).splitlines()[2:] == [
        "| `fd` | 1 ± 1 | 5.3 **worse** | -5 better |",
        "| `recall` | 1 ± 1 | 5.2 - | -9 **worse** |",
    ]


def test_the_page_has_the_tables_of_the_record():
    rows = read_results(RECORD)
    tables = [
        f"**{task}**\n\n{table([r for r in rows if r['setting'] == task])}" for task in ("digits", "glyphs")
    ]
    page = (ROOT / "evaluation/README.md").read_text()
    assert "<!-- study.failures -->\n" + "\n\n".join(tables) + "\n<!-- end -->" in page
    assert all(row["commit"] in page for row in rows)


@pytest.mark.slow
def test_the_record_can_be_measured_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it writes the digits
    rows = {(row["failure"], row["score"]): row for row in read_results(RECORD) if row["setting"] == "digits"}
    for row in measure("digits"):
        recorded = rows[row["failure"], row["score"]]
        assert row["value"] == pytest.approx(float(recorded["value"]), rel=0.01, abs=0.01)
    values = {key: float(row["value"]) for key, row in rows.items()}
    assert values["copies of training images", "authenticity"] == 0
    assert values["copies of training images", "memorised"] == 1
