"""The records of the twin study become effects, outcomes and a page."""

import csv
import math
import re
from statistics import mean

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from benchmarks.results import Record, read_results
from reports.effects import effect_of, seeds_to_decide
from runtime.provenance import environment
from study import claims, figure
from study import records as module
from study.baselines import SAME_DATA, TASKS
from study.claims import OPPOSITE, SEEN, UNDECIDED, UNTESTABLE, Bound, Comparison
from study.records import EXCESS, Records, compare, cost_to_reach, holm, interpolate
from study.twins import LOSS, STUDIES
from tests.programs import ROOT

CFG = [f"guidance=cfg guidance_scale={scale:g}" for scale in (1.5, 2)]
PAIR = ("routed", "dense")


def row(arm, seed, step, gflop, guidance="none", **scores):
    same = {"part": "training", "lr": "0.001"}
    return {"arm": arm, "seed": seed, "step": step, "gflop": gflop, "guidance": guidance, **same, **scores}


@pytest.fixture(scope="module")
def header():
    code = {"commit": "0123456789", "uncommitted_changes": True}
    return environment(torch.device("cpu")) | code | {"tiny": False}


@pytest.fixture
def folder(tmp_path, header):
    """Dense and routed on the mixture: three seeds, three evaluations; dense costs twice as much."""
    record = Record("twins_mixture-64", tmp_path, header)
    for seed, wobble in enumerate((0.99, 1.0, 1.01)):
        for arm, cost, excess in (("dense", 2, (0.4, 0.3, 0.2)), ("routed", 1, (0.3, 0.2, 0.1))):
            points = zip((100, 150, 200), excess, strict=True)
            rows = [row(arm, seed, step, cost * step, excess=e * wobble) for step, e in points]
            record.add(f"{arm} {seed}", rows)
        search = row("dense", seed, 200, 1, **{LOSS: 9 + seed}) | {"part": "search"}
        record.add(f"search {seed}", [search, search | {"lr": "0.002", LOSS: 1}])
    filters = [{"baseline": "class Gaussians", "excess": 0.25}, {"baseline": "real held-out", "excess": 0.01}]
    Record("baselines", tmp_path, header).add("mixture-64", filters)
    return tmp_path


def judged(records, *tests):
    return claims.judge([Comparison(*test[:2], **test[2]) for test in tests], records)


def twins(**test):
    return (PAIR, {"mixture-64": EXCESS}, test)


# Statistics


def test_two_means_are_compared_by_the_pooled_spread():
    groups, other = ([1.0, 2.0, 3.0], [2.5, 3.5, 4.5]), [7.0, 8.1, 9.2]
    effect, expected = effect_of(groups, (1, -1)), stats.ttest_ind(*groups)
    interval = expected.confidence_interval()
    assert effect[:5] == pytest.approx((3, -1.5, interval.low, interval.high, expected.pvalue))
    pooled = effect_of(groups, (1, -1), [other])
    spread = math.sqrt((1 + 1 + 1.1**2) / 3)
    half = stats.t.ppf(0.975, 6) * spread * math.sqrt(2 / 3)
    assert pooled.high - pooled.value == pytest.approx(half), "six degrees of freedom of three arms"
    one = effect_of(([1.0], [2.0]), (1, -1))
    assert one.high == math.inf and one.p == 1, "one seed decides nothing"
    assert effect_of(([1.0], [2.0]), (1, -1), [other]).high < 6, "the spread of another arm decides"
    alone = effect_of([[1.0, 2.0, 3.0]], (1,))
    assert alone.high - alone.value == pytest.approx(4.3027 / math.sqrt(3), rel=1e-4)


def test_two_constant_groups_do_not_differ():
    """Such as the copies of training images at an early checkpoint: none in any seed."""
    effect = effect_of(([0.0, 0.0], [0.0, 0.0]), (1, -1), [[0.0, 0.1, 0.3]])
    assert (effect.value, effect.low, effect.high, effect.p) == (0, 0, 0, 1)


@pytest.mark.parametrize("other", [[7.0, 7.001, 7.002, 6.999], [0.0, 0.0, 0.0]], ids=["small", "constant"])
def test_unequal_spreads_are_not_pooled(other):
    groups = ([1.0, 2.0, 3.0, 2.2], [2.5, 3.5, 4.5, 3.6])
    effect, expected = effect_of(groups, (1, -1), [other]), stats.ttest_ind(*groups, equal_var=False)
    assert effect.p == pytest.approx(expected.pvalue)


def test_intervals_cover_the_truth_in_nineteen_of_twenty_cases():
    rng, n = np.random.default_rng(0), 1000
    covered = 0
    for _ in range(n):
        effect = effect_of(rng.normal(size=(2, 3)).tolist(), (1, -1), rng.normal(size=(2, 3)).tolist())
        covered += effect.low <= 0 <= effect.high
    assert abs(covered / n - 0.95) < 3 * math.sqrt(0.95 * 0.05 / n)


def test_holm_adjusts_each_p_for_the_hypotheses_that_are_left():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_the_number_of_seeds_is_the_first_that_decides():
    n = seeds_to_decide(0.1, 0.02, 2)
    halves = [stats.t.ppf(0.975, 2 * (size - 1)) * math.sqrt(0.02 / size) for size in (n - 1, n)]
    assert halves[0] > 0.1 > halves[1]
    assert seeds_to_decide(0.1, 0.02, 1) > n, "paired changes have n - 1 degrees of freedom"
    assert seeds_to_decide(1e-9, 1.0, 2) is None


def test_the_number_of_seeds_for_unequal_spreads_is_the_first_whose_interval_excludes_zero():
    def groups(n):  # with standard deviations of 1 and 0.05 and a difference of 0.9
        z = np.linspace(-1, 1, n)
        z /= z.std(ddof=1)
        return [(0.9 + z).tolist(), (0.05 * z).tolist()]

    n = effect_of(groups(6), (1, -1)).seeds
    assert effect_of(groups(n - 1), (1, -1)).low < 0 < effect_of(groups(n), (1, -1)).low


# Comparisons


def test_arms_are_compared_at_equal_steps_and_flops(folder):
    """Routed networks end at 200 GFLOP, where dense ones have had 100 steps."""
    records = Records(folder)
    assert compare(records, "mixture-64", EXCESS, PAIR).value == pytest.approx(math.log(0.1 / 0.2))
    effect = compare(records, "mixture-64", EXCESS, PAIR, "gflop")
    assert effect.value == pytest.approx(math.log(0.1 / 0.4))
    assert effect.high - effect.low < 1e-9, "paired by seed: all seeds have the same ratio"
    assert compare(records, "mixture-64", EXCESS, ("separate", "dense")) is None


def test_guidance_of_one_arm_is_compared_by_seed(folder, header):
    """The seeds differ by a factor of 3, and guidance changes each by the same ratio."""
    record = Record("twins_digits-200", folder, header)
    for seed in range(3):
        drawn = [row("routed", seed, 9, 9, g, fd_pixel=3**seed / i) for i, g in enumerate(CFG, start=1)]
        record.add(f"routed {seed}", drawn)
    effect = compare(Records(folder), "digits-200", "fd_pixel", ("routed", "routed"), guidance=CFG)
    assert (effect.n, effect.value) == (3, pytest.approx(math.log(2)))
    assert effect.high - effect.low < 1e-9


def test_the_best_checkpoint_has_the_lowest_held_out_loss_of_its_seed(folder, header):
    record = Record("twins_digits-200", folder, header)
    for seed, losses in enumerate(((3, 1, 2), (1, 2, 3))):
        points = zip((100, 200, 300), losses, strict=True)
        record.add(f"dense {seed}", [row("dense", seed, step, step, **{LOSS: loss}) for step, loss in points])
        drawn = [row("dense", seed, s, s, noise=k, memorised=s + k) for s in (100, 200, 300) for k in (0, 1)]
        record.add(f"samples {seed}", drawn)
    records = Records(folder)
    assert records.scores("digits-200", "dense", LOSS, "best") == {0: 1, 1: 1}
    assert records.scores("digits-200", "dense", LOSS) == {0: 2, 1: 3}
    assert records.scores("digits-200", "dense", "memorised", "best") == {0: 200.5, 1: 100.5}, (
        "mean over noise"
    )


def test_a_curve_is_interpolated_only_between_near_evaluations():
    """A power law is a line in logarithms. Between distant evaluations the bend of a curve would decide."""
    power_law = [(cost, 3 * cost**-0.5) for cost in (100, 140, 200)]
    for cost in (100, 120, 170, 200):
        assert interpolate(power_law, cost, EXCESS) == pytest.approx(3 * cost**-0.5)
    assert interpolate([power_law[0], power_law[2]], 170, EXCESS) is None
    assert interpolate([power_law[0], power_law[2]], 200, EXCESS) == pytest.approx(3 * 200**-0.5)
    assert interpolate(power_law, 90, EXCESS) is None and interpolate(power_law, 210, EXCESS) is None
    assert interpolate([(100, 0.0), (144, 0.5)], 120, "recall") == pytest.approx(0.25), "linear for a share"


def test_two_rows_of_one_evaluation_are_refused(folder):
    """Rows of two learning rates or machines would count as two seeds, or hide each other."""
    (file,) = folder.glob("twins_mixture-64_*.csv")
    file.with_name("twins_mixture-64_Another.csv").write_text(file.read_text())
    file.with_name("twins_mixture-64_12th-Gen.csv").write_text(file.read_text())
    file.with_name("twins_mixture-64_Another.csv").unlink()
    with pytest.raises(ValueError, match="records of mixture-64 contain dense, 0, 100, none,  twice"):
        Records(folder)


# Outcomes


def test_an_outcome_is_seen_opposite_or_undecided(folder):
    records = Records(folder)
    outcome, (finding,) = judged(records, twins())
    assert (outcome, finding.n, finding.commits) == (SEEN, "3", ("0123456 with uncommitted changes",))
    assert finding.text.startswith("mixture-64, excess, routed against dense: -50.0 % [-51.1, -48.9]")
    assert judged(records, twins(higher=True))[0] == OPPOSITE
    assert judged(records, (PAIR, {"digits": "recall"}, {})) == (claims.NOT_MEASURED, [])
    assert judged(records)[0] == UNTESTABLE
    outcome, findings = judged(records, twins(), twins(higher=True))
    assert (outcome, [f.outcome for f in findings]) == (claims.MIXED, [SEEN, OPPOSITE])
    same = (("dense", "dense"), {"mixture-64": EXCESS}, {})
    outcome, findings = judged(records, same)
    assert outcome == UNDECIDED and "over 1,000 seeds" in claims.format_finding(findings[0])
    assert judged(records, twins(), same)[0] == SEEN, "an undecided test does not change it"


def test_p_values_are_adjusted_for_the_effects_of_the_claim(folder, header):
    record = Record("twins_mixture-256", folder, header)
    for seed, wobble in enumerate((0.7, 1.0, 1.35)):
        record.add(f"dense {seed}", [row("dense", seed, 200, 2, excess=0.1 * wobble)])
        record.add(f"routed {seed}", [row("routed", seed, 200, 1, excess=0.04 * wobble)])
    filters = [{"baseline": "class Gaussians", "excess": 0.25}]
    Record("baselines", folder, header).add("mixture-256", filters)
    records, test = Records(folder), (PAIR, {"mixture-256": EXCESS}, {})
    alone = judged(records, test)[1][0]
    assert alone.outcome == SEEN and 0.01 < alone.effect.p < 0.05
    several = judged(records, test, *[(*test[:2], {"at": "best"})] * 4)[1]
    assert {finding.outcome for finding in several} == {UNDECIDED}
    # Effects of one seed are not counted, and do not say how many seeds would decide them.
    for arm, excess in zip(PAIR, (0.1, 0.2), strict=True):
        record.add(f"{arm}, mlp 0", [row(f"{arm}, mlp", 0, 200, 2, excess=excess, typical=1)])
    single = (("routed, mlp", "dense, mlp"), {"mixture-256": "typical"}, {})
    several = judged(Records(folder), test, *[single] * 4)[1]
    assert [finding.outcome for finding in several] == [SEEN, *[UNDECIDED] * 4]
    assert claims.format_finding(several[1]).endswith("n = 1: undecided")


def test_a_failed_gate_makes_a_claim_untestable(folder, header):
    """Without a baseline, with a better one, without a gain of guidance, with a low precision."""
    records = Records(folder)
    assert claims.failed_gates(records, "mixture-64", EXCESS) == {"a": ""}
    records.baselines["mixture-64"]["class means"] = {"excess": "0.1"}
    outcome, (finding,) = judged(records, twins())
    assert outcome == finding.outcome == "not testable here (gate a)" and "-50.0 %" in finding.text
    assert claims.failed_gates(records, "mixture-64", EXCESS) == {"a": "excess 0.2, class means 0.1"}
    records.baselines.clear()
    assert claims.failed_gates(records, "mixture-64", EXCESS) == {"a": "not measured"}

    def gates(distance=0.1, guided=0.06, precision=0.5):
        record = Record("twins_digits-1500", folder, header)
        for seed in range(2):
            scores = {"fd_pixel_held_out": distance + seed / 1000, "precision": precision}
            drawn = [row("dense", seed, 9, 9, noise=0, **scores)]
            drawn += [row("dense", seed, 9, 9, g, noise=0, fd_pixel_held_out=guided) for g in CFG]
            record.add(f"dense {seed}", [*drawn, row("dense", seed, 9, 9, **{LOSS: 0.3})])
        real = {"baseline": "real held-out", "precision": 0.9, "fd_pixel_held_out": 0.01}
        gaussians = {"baseline": "class Gaussians", "fd_pixel_held_out": 0.12, "precision": 1, LOSS: 0.4}
        Record("baselines", folder, header).add("digits-1500", [real, gaussians])
        return claims.failed_gates(Records(folder), "digits-1500", "fd_pixel_held_out")

    assert gates() == {"a": "", "b": "", "c": ""}
    assert gates(distance=0.13)["a"] == "fd_pixel_held_out 0.131, class Gaussians 0.12"
    assert gates(guided=0.09)["b"] == "guidance lowers the distance by 10 %"
    assert gates(precision=0.2)["c"] == "precision over real data's: 22 %"
    for key in ("memorised", "accuracy"):
        assert claims.failed_gates(Records(folder), "digits-1500", key) == {"a": ""}, "no guidance needed"


def test_the_worst_dense_arm_decides_the_gates_of_samples(folder, header):
    record = Record("twins_captions-64", folder, header)
    real = {"baseline": "real held-out", "precision": 0.9}
    for arm, guided, precision in (("dense, prefix", 0.05, 0.5), ("dense, cross", 0.08, 0.2)):
        scores = {"fd_cells_held_out": 0.1, "precision": precision}
        guided = row(arm, 0, 9, 9, CFG[0], noise=0, fd_cells_held_out=guided)
        record.add(arm, [row(arm, 0, 9, 9, noise=0, **scores), guided])
    Record("baselines", folder, header).add("captions-64", [real])
    gates = claims.failed_gates(Records(folder), "captions-64", "fd_cells_held_out")
    assert gates["b"] == "guidance lowers the distance by 20 %"
    assert gates["c"] == "precision over real data's: 22 %"


def test_every_study_has_baselines_of_its_data():
    """Studies of the same data share them."""
    for name, study in STUDIES.items():
        baselines = TASKS[SAME_DATA.get(name, name)]
        assert f"data={study.data}" in baselines
        assert {key for key in study.task if key.startswith(("data.", "diffusion"))} <= {*baselines}


def test_all_changed_dense_arms_must_beat_the_baselines(folder, header):
    """In a study without the unchanged one."""
    for worse, failed in ((0.2, ""), (0.3, "excess 0.3, class Gaussians 0.25")):
        for depth, excess in ((6, worse), (16, 0.1)):
            record = Record("twins_mixture-256", folder, header)
            record.add(f"depth {depth}", [row(f"dense, depth={depth}", 0, 200, 2, excess=excess)])
        filters = [{"baseline": "class Gaussians", "excess": 0.25}]
        Record("baselines", folder, header).add("mixture-256", filters)
        assert claims.failed_gates(Records(folder), "mixture-256", EXCESS) == {"a": failed}


def test_a_bound_holds_for_every_value(folder, header):
    rows = [{"x": x, "y": 2, "z": "a"} for x in (1.2, 1.4)] + [{"x": None}, {"x": 9, "y": 1, "z": "b"}]
    Record("speed", folder, header).add("all", rows)
    Record("speed_of_another", folder, header).add("all", [{"x": 9}])

    def bounded(**bound):
        return Bound("speed", "x", "steps", where={"z": ["a"]}, **bound).findings(Records(folder))[0]

    found = [(f.outcome, f.text, f.n) for f in (bounded(above=bound) for bound in (1.1, 1.2, 1.4))]
    assert found == [(outcome, "steps: 1.20 to 1.40x", "2") for outcome in (SEEN, claims.MIXED, OPPOSITE)]
    assert [bounded(at_least=bound).outcome for bound in (1.2, 1.5)] == [SEEN, OPPOSITE]
    halved = bounded(divided_by="y", at_most=0.7, n="2 ways")
    assert (halved.outcome, halved.text, halved.n) == (SEEN, "steps: 0.60 to 0.70x", "2 ways")


# The page


def test_the_page_has_every_recorded_arm_claim_search_and_baseline(folder):
    text = claims.page(Records(folder))
    assert "records in this folder" in text and "| Routing converges faster per step |" in text
    assert claims.NOT_MEASURED not in text and "| Precision rises without guidance |" not in text
    assert re.search(r"\| routed \| .* \| 3 \| 0.1 ± 0.002 \| .* \| -50.0 % \[-51.1, -48.9\] \|", text)
    assert "| *class Gaussians* |  |  |  |  | 0.25 |" in text
    assert "| mixture-64 | dense | 3 | 10.0000 | **1.0000** |" in text
    assert "The claims have 2 intervals" in text
    (folder / "empty").mkdir()
    assert "These records test no claim" in claims.page(Records(folder / "empty"))
    assert "**This is a rehearsal" not in text
    (file,) = folder.glob("twins_mixture-64_*.csv")
    file.write_text(file.read_text().replace("# tiny: False", "# tiny: True"))
    assert "**This is a rehearsal" in claims.page(Records(folder))


def test_what_a_method_changes_with_and_without_routes(tmp_path, header):
    """Means of logarithms; the last column compares at the final cost of the routed arm."""
    losses = {"dense": 0.4, "routed": 0.5, "dense, Muon": 0.3, "routed, Muon": 0.45}
    record = Record("twins_stacks-256", tmp_path, header)
    for seed, wobble in enumerate((0.99, 1.0, 1.01)):
        for arm, loss in losses.items():
            cost, last = (2 if "dense" in arm else 1), {LOSS: loss * wobble}
            rows = [row(arm, seed, 100, 100 * cost, **{LOSS: loss * wobble * 2})]
            record.add(f"{arm} {seed}", [*rows, row(arm, seed, 200, 200 * cost, **last)])
    records = Records(tmp_path)
    arms = ("routed, Muon", "routed", "dense, Muon", "dense")
    effect = compare(records, "stacks-256", LOSS, arms)
    spread = effect_of([[math.log(w) for w in (0.99, 1.0, 1.01)]] * 4, (1, -1, -1, 1))
    assert effect.value == pytest.approx(math.log(0.45 / 0.5) - math.log(0.3 / 0.4))
    assert effect.high - effect.value == pytest.approx(spread.high - spread.value)
    table = claims.stacks_table(records)
    cells = [cell.strip() for cell in next(x for x in table.splitlines() if "| Muon" in x).split("|")]
    shown = [compare(records, "stacks-256", LOSS, pair).format(True) for pair in (arms[2:], arms[:2], arms)]
    assert cells[1:6] == ["Muon", "3", *shown]
    assert (
        shown[0].startswith("-25.0 %") and shown[1].startswith("-10.0 %") and shown[2].startswith("+20.0 %")
    )
    # The dense arm has cost 200 after 100 steps, where its loss is twice the last one: 0.6 against 0.45.
    assert cells[-2].startswith("-25.0 %")


def test_a_change_is_compared_with_the_one_of_another_study(tmp_path, header):
    """At equal FLOPs routes halve the loss on the first study and change it by 0.8 on the second."""
    pair = ("routed, prefix", "dense, prefix")
    for study, ratio in (("scenes-64", 0.8), ("scenes-1024", 0.5)):
        record = Record(f"twins_{study}", tmp_path, header)
        for seed, wobble in enumerate((0.99, 1.0, 1.01)):
            dense = [row(pair[1], seed, step, step, **{LOSS: 0.4}) for step in (50, 100)]
            record.add(f"dense {seed}", dense)
            record.add(f"routed {seed}", [row(pair[0], seed, 200, 50, **{LOSS: 0.4 * ratio * wobble})])
        effect = compare(Records(tmp_path), "scenes-1024", LOSS, pair, "gflop", than="scenes-64")
        if study == "scenes-64":
            assert effect is None, "one of the two has no records"
    assert effect.value == pytest.approx(math.log(0.5 / 0.8), abs=1e-4) and effect.low < effect.value
    lines = claims.when_table(Records(tmp_path)).splitlines()
    first, last = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert first[:5] == ["scenes-64", "prefix", "200", "3", "0.25x"]
    assert last[:4] == ["scenes-1024", "prefix", "200", "3"] and last[5].startswith("-50.0 %")
    Record("baselines", tmp_path, header).add("scenes-1024", [{"baseline": "class means", LOSS: 0.5}])
    (finding,) = Comparison(pair, {"scenes-1024": LOSS}, at="gflop", than="scenes-64").findings(
        Records(tmp_path)
    )
    assert finding.failed_gates == ("a",), "the other study has no baseline"
    (file,) = tmp_path.glob("twins_scenes-64_*.csv")
    file.unlink()
    assert compare(Records(tmp_path), "scenes-1024", LOSS, pair, "gflop", than="scenes-64") is None


def test_arms_of_the_mixture_are_compared_with_the_dense_one(folder, header):
    record = Record("twins_mixture-64", folder, header)
    for seed in range(3):
        scores = {EXCESS: 0.3, f"{EXCESS}/t=0.3": 0.1 * 1.01**seed, "sharpening": -0.1, "perplexity": 1.2}
        record.add(f"separate {seed}", [row("separate", seed, 200, 300, **scores)])
        more = {f"{EXCESS}/t=0.3": 0.2 * 1.01**seed, "sharpening": -0.2, "perplexity": 1.0, "noise": 0}
        record.add(f"dense {seed}, more", [row("dense", seed, 200, 400, **more)])
    table = claims.mechanism_table(Records(folder)).splitlines()
    header, _, routed, separate = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    routed, separate = (dict(zip(header, cells, strict=True)) for cells in (routed, separate))
    assert (routed["arm"], routed["n"], routed["FLOPs of a step"]) == ("routed", "3", "0.50x")
    assert routed["excess"].startswith("-50.0 %") and routed["t=0.3"] == ""
    assert separate["FLOPs of a step"] == "0.75x" and separate["excess"].startswith("+50")
    assert separate["t=0.3"].startswith("-50.0 %") and separate["perplexity"].startswith("+20.0 %")
    assert separate["sharpening"].startswith("+10.0 points") and "accuracy" not in header


def test_the_costs_of_equal_scores_are_compared(folder):
    """A dense step costs 2, a routed one 1. Dense networks have the first routed score after 150 steps."""
    records = Records(folder)
    costs = records.costs_of_equal_scores("mixture-64", EXCESS, PAIR)
    ratios = {100: 100 / 300, 150: 150 / 400}
    assert costs == {step: [pytest.approx(math.log(ratio))] * 3 for step, ratio in ratios.items()}
    effect = compare(records, "mixture-64", EXCESS, PAIR, "score")
    assert (effect.n, effect.value) == (3, pytest.approx(math.log(150 / 400))), "dense ones never have 0.1"
    curve = [(1, 100.0, 0.8), (2, 140.0, 0.4), (3, 200.0, 0.5), (4, 280.0, 0.1), (5, 900.0, 0.01)]
    assert cost_to_reach(curve, 0.4) == pytest.approx(140), "first reached"
    assert cost_to_reach(curve, 0.2) == pytest.approx(200 * 1.4 ** (math.log(2.5) / math.log(5)))
    assert [cost_to_reach(curve, score) for score in (0.9, 0.02, 0.001)] == [None] * 3


def test_the_figure_shows_costs_and_scores(folder, tmp_path, monkeypatch):
    plotted, plot = {}, figure._plot

    def record(axes, x, y, label, color):
        plotted[label] = (x, y)
        plot(axes, x, y, label, color)

    monkeypatch.setattr(figure, "_plot", record)
    figure.draw(Records(folder), tmp_path / "twins.png", "page")
    steps, ratios = plotted["mixture-64 (n = 3)"]
    assert steps == [100, 150] and ratios[1] == pytest.approx([150 / 400] * 3)
    tflops, scores = plotted["dense (n = 3)"]
    assert tflops == [0.2, 0.3, 0.4] and scores[2] == pytest.approx([0.198, 0.2, 0.202])
    (tmp_path / "empty").mkdir()
    figure.draw(Records(tmp_path / "empty"), tmp_path / "empty/twins.png", "page")
    assert not (tmp_path / "empty/twins.png").exists()


@pytest.mark.parametrize("name", ["README.md", "RESULTS.md"])
def test_every_interval_of_a_page_is_on_the_page_of_claims(name):
    """Such as "-10.2 % [-13.3, -7.0]"."""
    claimed, text = (" ".join((ROOT / file).read_text().split()) for file in ("CLAIMS.md", name))
    effects = re.findall(r"[-+]?[\d.]+ (?:%|points) \[[^\]]+\]", text)
    assert effects and not [effect for effect in effects if effect not in claimed]


def test_the_hours_of_the_next_runs_follow_from_measured_steps():
    """Three seeds of a dense and a routed run of 400,000 steps of 256 images, on one H200."""
    (file,) = (ROOT / "benchmarks/results").glob("gpu_step_NVIDIA-H200_*.csv")
    sec = {(row["setting"], row["step"]): 256 / float(row["images_per_sec"]) for row in read_results(file)}
    page = " ".join((ROOT / "RESULTS.md").read_text().split())
    texts = {"XL/2": "seeds of XL/2", "256 tokens": "B/2, three seeds", "1024 tokens": "of B/2 at 512 pixels"}
    for setting, text in texts.items():
        hours = 3 * 400_000 * (sec[setting, "dense"] + sec[setting, "routed"]) / 3600
        (printed,) = re.findall(rf"{text}: (\d+)", page)
        assert abs(int(printed) - hours) < 1


def test_every_claim_names_existing_arms_and_scores():
    records = Records()
    for test in (t for claim in claims.read_page()[1] for t in claim.tests if isinstance(t, Comparison)):
        for study, key in test.pairs():
            assert study in (*STUDIES, *module.EARLIER) and key in (*claims.SCORES, "val_loss_dense")
            if study in STUDIES:
                assert {*test.arms} <= {*STUDIES[study].arms}
        if {*test.scores} <= {*module.EARLIER}:  # some arms are recorded on some of the tasks
            assert test.findings(records)


def test_the_page_and_its_figure_are_what_the_program_writes():
    text = (ROOT / "CLAIMS.md").read_text()
    assert text == claims.page(Records())
    with Image.open(ROOT / claims.FIGURE) as picture:
        assert picture.info["Comment"] == figure.page_hash(text), "run `python -m study.claims`"


# Three rows, recomputed from the files without the code under test


def csv_rows(pattern):
    for file in (ROOT / "study/results").glob(pattern):
        with file.open(newline="") as opened:
            yield from csv.DictReader(line for line in opened if not line.startswith("#"))


def last_scores(pattern, score):
    """Return {arm: [score of the last unguided evaluation of each seed]}."""
    last = {}
    for line in csv_rows(pattern):
        if line["part"] == "training" and line["guidance"] == "none" and line.get("val_loss_dense_ema"):
            last[line["arm"], line["seed"]] = score(line)
    arms = {}
    for (arm, _), value in sorted(last.items()):
        arms.setdefault(arm, []).append(value)
    return arms


@pytest.mark.parametrize(
    ("study", "key", "score"),
    [
        ("mixture", "excess", lambda line: float(line[LOSS]) - float(line["val_loss_optimal"])),
        ("digits", "fd_pixel", lambda line: float(line["fd_pixel"])),
        ("glyphs", "fd_classifier", lambda line: float(line["fd_classifier"])),
    ],
)
def test_an_effect_on_the_page_agrees_with_an_independent_computation(study, key, score):
    logs = {arm: np.log(values) for arm, values in last_scores(f"twins_{study}_[A-Z]*", score).items()}
    groups = [values for values in logs.values() if len(values) > 1]
    a, b = logs["routed"], logs["dense"]
    if stats.bartlett(*groups).pvalue >= 0.05:
        freedom = sum(len(g) - 1 for g in groups)
        variance = sum(((g - g.mean()) ** 2).sum() for g in groups) / freedom
        half = stats.t.ppf(0.975, freedom) * math.sqrt(variance * (1 / len(a) + 1 / len(b)))
    else:
        half = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
        half = (half.high - half.low) / 2
    middle = mean(a) - mean(b)
    low, value, high = (100 * math.expm1(x) for x in (middle - half, middle, middle + half))
    expected = f"{study}, {key}, routed against dense: {value:+.1f} % [{low:+.1f}, {high:+.1f}]"
    assert expected in (ROOT / "CLAIMS.md").read_text()
