"""The records of the twin study become effects, outcomes and a page."""

import math
import re

import pytest
import torch

from benchmarks import finetuning
from benchmarks.results import Record
from runtime.provenance import environment
from study import claims
from study.claims import ABSENT, CONFIRMED, OPEN, REFUTED, Bound, Comparison
from study.records import BEST, EXCESS, Effect, Records, between, compare
from study.twins import CFG, SPARSE, STUDIES
from tests.programs import ROOT

TWINS = {"arms": ("routed", "dense"), "scores": {"mixture": EXCESS}}
DIGITS = ("routed", "dense")


def row(arm, seed, step, gflop, guidance="none", **scores):
    same = {"part": "training", "lr": "0.001"}
    return {"arm": arm, "seed": seed, "step": step, "gflop": gflop, "guidance": guidance, **same, **scores}


@pytest.fixture(scope="module")
def header():
    code = {"commit": "0123456789", "uncommitted_changes": False}
    return environment(torch.device("cpu")) | code | {"tiny": False}


@pytest.fixture
def folder(tmp_path, header):
    """Dense and routed on the mixture: three seeds, three evaluations; dense costs twice as much."""
    record = Record("twins_mixture", tmp_path, header)
    for seed, wobble in enumerate((0.99, 1.0, 1.01)):
        for arm, cost, excess in (("dense", 2, (0.4, 0.3, 0.2)), ("routed", 1, (0.3, 0.2, 0.1))):
            points = [
                (step, cost * step, 0.5 + e * wobble) for step, e in zip((100, 150, 200), excess, strict=True)
            ]
            scores = [{"val_loss_dense_ema": loss, "val_loss_optimal": 0.5} for *_, loss in points]
            rows = [
                row(arm, seed, *spent[:2], **losses) for spent, losses in zip(points, scores, strict=True)
            ]
            record.add(f"{arm} {seed}", rows)
        record.add(f"search {seed}", [row("dense", seed, 200, 1, val_loss_dense_ema=9) | {"part": "search"}])
    steps = Record("twins_steps", tmp_path, header)
    steps.add("mixture", [{"arm": "dense", "ms": 10}, {"arm": "routed", "ms": 20}])
    return tmp_path


def finding(records, **test):
    (finding,) = Comparison(**TWINS | test).findings(records)
    return finding


def test_an_interval_is_student_s():
    effect = Effect.of([1.0, 2.0, 3.0])
    assert effect.value == 2 and effect.high - effect.value == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert Effect.of([5.0])[2:] == (-math.inf, math.inf), "one seed decides nothing"
    assert claims.outcome_of(Effect.of([5.0]), higher=True) == OPEN


def test_arms_are_compared_seed_by_seed_at_equal_steps_flops_and_seconds(folder):
    """Routed networks end at 200 GFLOP, where dense ones have had 100 steps. Seconds are the reverse."""
    records = Records(folder)
    text = "mixture, excess loss: -50.0 % [-50.0, -50.0]"
    assert finding(records) == (CONFIRMED, text, "3", ("0123456",))
    assert finding(records, higher=True).outcome == REFUTED
    for at, ratio in (("gflop", 0.1 / 0.4), ("seconds", 0.3 / 0.2)):
        changes = compare(records, "mixture", EXCESS, ("routed", "dense"), at)
        assert changes == pytest.approx(dict.fromkeys(range(3), math.log(ratio)))
    grown = finding(records, over=("dense", "dense"))
    assert grown.outcome == CONFIRMED and "routed over dense: -50.0 %" in grown.text
    assert finding(records, over=("routed", "dense")).outcome == OPEN
    assert finding(records, arms=("sprint", "dense")).outcome == ABSENT


def test_a_curve_is_interpolated_only_between_near_evaluations():
    """A power law is a line in logarithms. Between distant evaluations the bend of a curve would decide."""
    power_law = [(cost, 3 * cost**-0.5) for cost in (100, 140, 200)]
    for cost in (100, 120, 170, 200):
        assert between(power_law, cost, EXCESS) == pytest.approx(3 * cost**-0.5)
    assert between([power_law[0], power_law[2]], 170, EXCESS) is None
    assert between([power_law[0], power_law[2]], 200, EXCESS) == pytest.approx(3 * 200**-0.5)
    assert between(power_law, 90, EXCESS) is None and between(power_law, 210, EXCESS) is None
    assert between([(100, 0.0), (144, 0.5)], 120, "recall") == pytest.approx(0.25), "no logarithm of a share"


def test_intervals_across_zero_leave_a_claim_open(folder, header):
    record = Record("twins_digits", folder, header)
    for seed, value in enumerate((1.0, 2.0, 4.0)):
        for arm, distance in (("routed", value), ("dense", 2.0)):
            scales = ((CFG[0], 0.5), (CFG[1], 9), (SPARSE, 0.4))
            guided = [row(arm, seed, 9, 9, guidance, fd_pixel=d) for guidance, d in scales]
            record.add(f"{arm} {seed}", [row(arm, seed, 9, 9, fd_pixel=distance, recall=0.5), *guided])
    records = Records(folder)
    unguided = Comparison(DIGITS, {"digits": "fd_pixel"})
    assert unguided.findings(records)[0].outcome == OPEN
    assert set(compare(records, "digits", "fd_pixel", DIGITS, guidance=(BEST, BEST)).values()) == {0.0}
    best = records.final("digits", "routed", "fd_pixel", BEST)
    assert best == dict.fromkeys(range(3), 0.5), "only of the scales that every arm has"
    (claim,) = (claim for claim in claims.CLAIMS if claim.says.startswith("Sparse guidance"))
    sparse, *_ = claim.tests[0].findings(records)
    assert sparse.outcome == CONFIRMED and "against cfg guidance_scale=1.25): -20.0 %" in sparse.text
    twins, reverse = Comparison(**TWINS), Comparison(**TWINS, higher=True)
    outcome, findings = claims.judged([twins, unguided], records)
    assert (outcome, len(findings)) == (CONFIRMED, 2), "an open task does not change the outcome"
    assert claims.judged([twins, reverse], records)[0] == OPEN
    assert claims.judged([Comparison(DIGITS, {"glyphs": "recall"})], records) == (ABSENT, [])
    assert claims.judged((), records)[0] == claims.UNTESTED


def test_two_rows_of_one_evaluation_are_refused(folder):
    """Rows of two learning rates or machines would count as two seeds, or hide each other."""
    (file,) = folder.glob("twins_mixture_*.csv")
    file.with_name("twins_mixture_another.csv").write_text(file.read_text())
    with pytest.raises(ValueError, match="records of mixture contain dense, 0, 100, none twice"):
        Records(folder)


def test_a_bound_holds_for_every_value(folder, header):
    rows = [
        {"x": 1.2, "y": 2, "z": "a"},
        {"x": 1.4, "y": 2, "z": "a"},
        {"x": None},
        {"x": 9, "y": 1, "z": "b"},
    ]
    Record("speed", folder, header).add("all", rows)
    Record("speed_of_another", folder, header).add("all", [{"x": 9}])

    def bounded(**bound):
        return Bound("speed", "x", "steps", where={"z": ["a"]}, **bound).findings(Records(folder))[0]

    outcomes = [bounded(above=bound)[:3] for bound in (1.1, 1.2, 1.4)]
    assert outcomes == [(outcome, "steps: 1.20 to 1.40x", "2") for outcome in (CONFIRMED, OPEN, REFUTED)]
    assert [bounded(at_least=bound).outcome for bound in (1.2, 1.5)] == [CONFIRMED, REFUTED]
    halved = bounded(divided_by="y", at_most=0.7, n="2 ways")
    assert halved[:3] == (CONFIRMED, "steps: 0.60 to 0.70x", "2 ways")


def test_fine_tunes_are_compared_with_the_dense_one_of_their_kind(folder, header):
    record = Record("finetuning_twins", folder, header)
    for kind, gain, lr in (("full", 1.2, 0.0003), ("lora", 0.9, 0.01)):
        for seed, wobble in enumerate((0.99, 1.0, 1.01)):
            for arm, loss in (("dense", 0.5), ("ratio 0.25", 0.5 * gain * wobble)):
                ends = {"kind": kind, "arm": arm, "seed": seed, "lr": lr, "step": 9}
                scores = [{"val_loss_dense": 9}, {"val_loss_dense": loss, "fd_pixel": 1}]
                record.add(f"{kind} {arm} {seed}", [ends | values for values in scores])
    (claim,) = (claim for claim in claims.CLAIMS if "small ratios" in claim.says)
    full, _, lora, _ = claim.tests[1].findings(Records(folder))
    assert (full.outcome, lora.outcome, full.n, full.commits) == (REFUTED, CONFIRMED, "3", ("0123456",))
    assert "+20.0 %" in full.text and "-10.0 %" in lora.text
    assert ["smallest or largest tried" in finding.text for finding in (full, lora)] == [False, True]
    record.file.with_name("finetuning_twins_another.csv").write_text(record.file.read_text())
    with pytest.raises(ValueError, match=r"records of full contain .* twice"):
        Records(folder)


def test_the_page_has_every_recorded_arm_and_claim(folder):
    text = claims.page(Records(folder))
    assert "records in this folder" in text and "| Routing converges faster per step |" in text
    assert ABSENT not in text and "| Precision rises without guidance |" not in text
    assert re.search(r"\| routed \| .* \| 3 \| 0.1 ± 0.002 \| .* \| -50.0 % \[-50.0, -50.0\] \|", text)
    (folder / "empty").mkdir()
    assert "No claim is about these arms" in claims.page(Records(folder / "empty"))
    claims.draw(Records(folder), folder / "twins.png")
    assert (folder / "twins.png").read_bytes().startswith(b"\x89PNG")
    assert claims.REHEARSAL not in text
    (file,) = folder.glob("twins_mixture_*.csv")
    file.write_text(file.read_text().replace("# tiny: False", "# tiny: True"))
    assert claims.REHEARSAL in claims.page(Records(folder))


def test_an_arm_is_compared_with_the_dense_arm_of_the_same_change():
    arms = ("dense", "routed", "routed, a=1", "ratio 0.25", "routed, equal FLOPs", "routed, equal FLOPs, a=1")
    dense = ["dense", "dense", "dense, a=1", "dense", "dense", "dense, a=1"]
    assert [*map(claims.base_of, arms)] == dense


def test_every_claim_names_existing_arms_and_scores():
    for test in (test for claim in claims.CLAIMS for test in claim.tests if isinstance(test, Comparison)):
        for study, key in test.pairs():
            arms = STUDIES[study].arms if study in STUDIES else finetuning.ARMS
            assert {*test.arms, *(test.over or ())} <= {*arms}
            assert key in (claims.SCORES if study in STUDIES else (finetuning.LOSS, *finetuning.SCORES))
            if test.over:  # a smaller patch has more tokens
                large, small = (int(pair[0].rpartition("=")[2]) for pair in (test.arms, test.over))
                assert (large > small) == (study != "tokens")


def test_the_page_is_what_the_program_writes():
    assert (ROOT / "CLAIMS.md").read_text() == claims.page(Records())
