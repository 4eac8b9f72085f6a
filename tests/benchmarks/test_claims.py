"""What is made of the records of the twin study: effects, outcomes, the page."""

import math
import re

import pytest
import torch

from benchmarks import claims, effects, finetuning
from benchmarks.effects import CONFIRMED, OPEN, REFUTED, Finetuned, Growth, Measured, Pair, Records, effect_of
from benchmarks.results import Record, write_results
from benchmarks.twins import CFG, SPARSE
from runtime.provenance import environment
from tests.programs import ROOT


def row(arm, seed, step, gflop, guidance="none", **scores):
    same = {"part": "training", "lr": "0.001", "commit": "0123456789"}
    return {"arm": arm, "seed": seed, "step": step, "gflop": gflop, "guidance": guidance, **same, **scores}


@pytest.fixture
def folder(tmp_path):
    """Dense and routed on the mixture, three seeds of three evaluations; dense ones cost twice as much."""
    about = environment(torch.device("cpu")) | {"tiny": False}
    record = Record("twins_mixture", tmp_path, about)
    for seed, wobble in enumerate((0.99, 1.0, 1.01)):
        for arm, cost, excess in (("dense", 2, (0.4, 0.3, 0.2)), ("routed", 1, (0.3, 0.2, 0.1))):
            rows = [
                row(
                    arm,
                    seed,
                    step,
                    cost * step,
                    val_loss_dense_ema=0.5 + value * wobble,
                    val_loss_optimal=0.5,
                )
                for step, value in zip((100, 150, 200), excess, strict=True)
            ]
            record.add(f"{arm} {seed}", rows)
        record.add(f"search {seed}", [row("dense", seed, 200, 1, val_loss_dense_ema=9) | {"part": "search"}])
    steps = Record("twins_steps", tmp_path, about)
    steps.add("mixture", [{"arm": "dense", "ms": 10}, {"arm": "routed", "ms": 20}])
    return tmp_path


def pair(**how):
    return Pair("mixture", "routed", "dense", effects.EXCESS, **how)


def test_an_interval_is_student_s():
    effect = effect_of([1.0, 2.0, 3.0])
    assert effect.value == 2 and effect.high - effect.value == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)
    assert effect_of([5.0])[2:] == (-math.inf, math.inf), "one seed decides nothing"
    assert effects.outcome_of(effect_of([5.0]), lower=False) == OPEN


def test_scores_are_compared_seed_by_seed_at_equal_steps(folder):
    finding = pair()(Records(folder))
    assert finding == (CONFIRMED, "mixture, excess loss: -50.0 % [-50.0, -50.0]", "3", ("0123456",))
    assert pair(lower=False)(Records(folder)).outcome == REFUTED


def test_scores_are_compared_at_equal_flops_and_seconds(folder):
    """Routed networks end at 200 GFLOP: there dense ones have had 100 steps. In seconds it is the reverse."""
    records = Records(folder)
    of_flops, of_seconds = (pair(at=at).changes(records) for at in ("gflop", "seconds"))
    assert of_flops == pytest.approx(dict.fromkeys(range(3), math.log(0.1 / 0.4)))
    assert of_seconds == pytest.approx(dict.fromkeys(range(3), math.log(0.3 / 0.2)))


def test_a_curve_is_read_between_evaluations_that_are_near_alone():
    """A power law is a line in logarithms; between evaluations far apart it would decide by its bend."""
    power_law = [(cost, 3 * cost**-0.5) for cost in (100, 140, 200)]
    for cost in (100, 120, 170, 200):
        assert pair()._between(power_law, cost) == pytest.approx(3 * cost**-0.5)
    assert pair()._between([power_law[0], power_law[2]], 170) is None
    assert pair()._between([power_law[0], power_law[2]], 200) == pytest.approx(3 * 200**-0.5)
    assert pair()._between(power_law, 90) is None and pair()._between(power_law, 210) is None
    share = Pair("digits", "routed", "dense", "recall")
    assert share._between([(100, 0.0), (144, 0.5)], 120) == pytest.approx(0.25), "no logarithm of a share"


def test_intervals_across_zero_leave_a_claim_open(folder):
    about = environment(torch.device("cpu")) | {"tiny": False}
    record = Record("twins_digits", folder, about)
    for seed, value in enumerate((1.0, 2.0, 4.0)):
        for arm, distance in (("routed", value), ("dense", 2.0)):
            guided = [
                row(arm, seed, 9, 9, g, fd_pixel=d) for g, d in ((CFG[0], 0.5), (CFG[1], 9), (SPARSE, 0.4))
            ]
            record.add(f"{arm} {seed}", [row(arm, seed, 9, 9, fd_pixel=distance, recall=0.5), *guided])
    records, same = Records(folder), ("digits", "routed", "dense")
    assert Pair(*same, "fd_pixel")(records).outcome == OPEN
    assert set(Pair(*same, "fd_pixel", guidance=effects.BEST).changes(records).values()) == {0.0}
    best = records.final("digits", "routed", "fd_pixel", effects.BEST)
    assert best == dict.fromkeys(range(3), 0.5), "of the scales that every arm has"
    (of_guidance,) = (claim for claim in claims.CLAIMS if claim.says.startswith("Sparse guidance"))
    finding = of_guidance.tests[0](records)
    assert finding.outcome == CONFIRMED and "against cfg guidance_scale=1.25): -20.0 %" in finding.text
    outcome, findings = claims.judged([pair(), Pair(*same, "fd_pixel")], records)
    assert (outcome, len(findings)) == (CONFIRMED, 2), "what is open on one task does not undo another"
    assert claims.judged([pair(), pair(lower=False)], records)[0] == OPEN
    assert claims.judged([Pair("glyphs", "routed", "dense", "recall")], records) == (effects.ABSENT, [])
    assert claims.judged((), records)[0] == "cannot be tested at this scale"


def test_two_rows_of_one_evaluation_are_refused(folder):
    """Of two learning rates, or of two machines: they would count as two seeds, or hide each other."""
    (file,) = folder.glob("twins_mixture_*.csv")
    file.with_name(
        file.name.replace("AMD", "ANOTHER").replace("twins_mixture_", "twins_mixture_X-")
    ).write_text(file.read_text())
    with pytest.raises(ValueError, match="records of mixture have twice dense, 0, 100, none"):
        Records(folder)


def test_growth_is_the_change_of_the_change(folder):
    records = Records(folder)
    same = pair()
    assert Growth(same, same)(records).outcome == OPEN
    grown = Growth(pair(), Pair("mixture", "dense", "dense", effects.EXCESS))(records)
    assert grown.outcome == CONFIRMED and "-50.0 %" in grown.text


def test_a_measured_claim_holds_for_every_row(folder):
    about = environment(torch.device("cpu")) | {"tiny": False}
    write_results("speed", [{"x": 1.2}, {"x": 1.4}, {"x": None}], about, folder)
    write_results("speed_of_another", [{"x": 9}], about, folder)
    records = Records(folder)
    for bound, outcome in ((1.1, CONFIRMED), (1.3, OPEN), (1.5, REFUTED)):
        finding = Measured("speed", claims.number("x"), "steps", lambda x, b=bound: x > b, "x")(records)
        assert finding[:3] == (outcome, "steps: 1.20 to 1.40x", "2")


def test_fine_tunes_are_compared_with_the_dense_one_of_their_kind(folder):
    about = environment(torch.device("cpu")) | {"tiny": False}
    record = Record("finetuning_twins", folder, about)
    for kind, gain in (("full", 1.2), ("lora", 0.9)):
        for seed, wobble in enumerate((0.99, 1.0, 1.01)):
            for arm, loss in (("dense", 0.5), ("ratio 0.5", 0.5 * gain * wobble)):
                ends = {"kind": kind, "arm": arm, "seed": seed, "commit": "0123456789"}
                ends["lr"] = {"full": "0.0003", "lora": "0.01"}[kind]
                rows = [{**ends, "val_loss_dense": 9}, {**ends, "val_loss_dense": loss, "fd_pixel": 1}]
                record.add(f"{kind} {arm} {seed}", rows)
    full, lora = (
        Finetuned(kind, "ratio 0.5", "val_loss_dense")(Records(folder)) for kind in ("full", "lora")
    )
    assert (full.outcome, lora.outcome, full.n, full.commits) == (REFUTED, CONFIRMED, "3", ("0123456",))
    assert "+20.0 %" in full.text and "-10.0 %" in lora.text
    assert ("an end of those tried" in full.text, "an end of those tried" in lora.text) == (False, True)
    assert Finetuned("full", "ratio 0.25", "fd_pixel")(Records(folder)).outcome == effects.ABSENT
    Record("finetuning_twins", folder, about | {"tiny": True, "processor": "another"}).add(
        "x", [{"kind": "full"}]
    )
    with pytest.raises(ValueError, match="fine-tunes of two machines"):
        Records(folder)


def test_the_page_has_every_claim_and_arm_and_the_figure(folder):
    records = Records(folder)
    text = claims.page(records)
    whole = claims.page(Records())
    assert all(f"| {claim.says} |" in whole for claim in claims.CLAIMS)
    assert "records in this folder" in text and "| It converges faster per step |" in text
    assert effects.ABSENT not in text and "| Precision rises, unguided |" not in text, (
        "what it has no record of"
    )
    assert re.search(r"\| routed \| .* \| 3 \| 0.1 ± 0.002 \| .* \| -50.0 % \[-50.0, -50.0\] \|", text)
    (folder / "empty").mkdir()
    assert "No claim is about these arms" in claims.page(Records(folder / "empty"))
    claims.draw(records, folder / "twins.png")
    assert (folder / "twins.png").read_bytes().startswith(b"\x89PNG")


def test_an_arm_is_compared_with_the_dense_one_of_its_own_change():
    arms = (
        "dense",
        "routed",
        "dense, a=1",
        "routed, a=1",
        "ratio 0.25",
        "routed, equal FLOPs",
        "routed, equal FLOPs, a=1",
    )
    same = ["dense", "dense", "dense, a=1", "dense, a=1", "dense", "dense", "dense, a=1"]
    assert [*map(claims.base_of, arms)] == same


def test_the_records_of_the_project_are_read():
    found = {claim.says: claims.judged(claim.tests, Records())[0] for claim in claims.CLAIMS}
    assert found["A routed step is cheaper"] == CONFIRMED
    assert found["It gains at 1,024 tokens"] == "cannot be tested at this scale"


def test_a_rehearsal_is_not_taken_for_a_result(folder):
    assert claims.REHEARSAL not in claims.page(Records(folder))
    (file,) = folder.glob("twins_mixture_*.csv")
    file.write_text(file.read_text().replace("# tiny: False", "# tiny: True"))
    assert claims.REHEARSAL in claims.page(Records(folder))


def test_every_claim_names_studies_and_arms_that_there_are():
    for claim in claims.CLAIMS:
        for test in claim.tests:
            if isinstance(test, Finetuned):
                assert test.kind in finetuning.LRS and test.arm in finetuning.ARMS, claim.says
                assert test.key in (finetuning.LOSS, *finetuning.SCORES), claim.says
            pairs = {
                Pair: lambda t: [t],
                Growth: lambda t: [t.larger, t.smaller],
                Measured: lambda t: [],
                Finetuned: lambda t: [],
            }
            for each in pairs[type(test)](test):
                assert {each.arm, each.other} <= set(claims.STUDIES[each.study].arms), claim.says


# What confirms each claim that compares arms, as it is said.
DIRECTIONS = {
    "It converges faster per step": "routed below dense",
    "It converges faster per FLOP": "routed below dense; routed, equal FLOPs below dense",
    "It converges faster per second": "routed below dense",
    "Its training loss is higher": "routed above dense in train_loss",
    "Precision rises, unguided": "routed above dense in precision",
    "Recall falls, unguided": "routed below dense in recall",
    "A ratio of 0.5 is better than 0.25": "routed below ratio 0.25",
    "A ratio of 0.5 is better than 0.75": "routed below ratio 0.75",
    "A ratio of 0.75 is worse than dense": "ratio 0.75 above dense",
    "A window must not start at block 0": "routed below early start",
    "A window must end before the last blocks": "routed below late end",
    "Removal is what helps: tokens that stay as context are worse": "no removal above routed",
    "Guidance gains from dense steps at the end": "dense end below routed",
    "Guided, routed training is ahead too": "routed below dense",
    "Keeping tokens by their norm is better than at random": "importance below routed",
    "SPRINT's sparse middle is better than TREAD's window per step (both in the block of DiT: no rotary "
    "positions, no QK-norm; and without SPRINT's second stage)": "sprint below routed",
    "Sparse guidance beats classifier-free guidance": "routed below routed",
}


def test_claims_are_decided_in_the_direction_that_they_say():
    lower_is_better = (effects.EXCESS, *effects.DISTANCES.values())
    found = {}
    for claim in claims.CLAIMS:
        pairs = [test for test in claim.tests if isinstance(test, Pair)]
        said = [
            f"{p.arm} {'below' if p.lower else 'above'} {p.other}"
            + ("" if p.key in lower_is_better else f" in {p.key}")
            for p in pairs
        ]
        if said:
            found[claim.says] = "; ".join(dict.fromkeys(said))
    assert found == DIRECTIONS
    for claim in claims.CLAIMS:
        for test in claim.tests:
            if isinstance(test, Growth):
                large, small = (int(pair.arm.rpartition("=")[2]) for pair in (test.larger, test.smaller))
                assert (large > small) == ("tokens" not in claim.says), "a smaller patch has more tokens"


def test_the_page_is_what_the_program_writes():
    assert (ROOT / "CLAIMS.md").read_text() == claims.page(Records())
