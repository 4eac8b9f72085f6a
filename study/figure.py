"""The figure of the twin study: when routing pays, why, and what it does with few images."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from runtime.files import atomic_write
from study.records import EXCESS, Records, interpolate, score_of, twins_of
from study.twins import LOSS, STUDIES

# The panels after the first: study, score, title, axis.
PANELS = (
    ("mixture-64", EXCESS, "mixture-64: loss above the optimum", "training TFLOPs"),
    ("digits-200", LOSS, "digits-200: loss on unseen digits", "steps"),
)


def change_at_equal_cost(
    records: Records, study: str, key: str, arms: Sequence[str]
) -> dict[int, dict[int, float]]:
    """Return {seed: {step: the ratio of a score of the first arm to the second's, minus 1}}.

    The steps are those of the first arm. The second arm has cost the same then, and is interpolated.
    """
    first, second = (records.curve(study, arm, key) for arm in arms)
    changes: dict[int, dict[int, float]] = {}
    for seed in first.keys() & second.keys():
        points = [point[1:] for point in second[seed]]
        scores = [(step, score, interpolate(points, gflop, key)) for step, gflop, score in first[seed]]
        changes[seed] = {step: score / other - 1 for step, score, other in scores if other is not None}
    return changes


def draw(records: Records, file: Path) -> None:
    """Plot the panels that have records; without any, write no file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    changes = {study: pairs[0] for study in STUDIES if (pairs := twins_of(records, study))}
    panels = [panel for panel in PANELS if records.rows[panel[0]]]
    if not changes:
        return
    figure, all_axes = plt.subplots(1, 1 + len(panels), figsize=(4.3 * (1 + len(panels)), 3.8), squeeze=False)
    figure.set_layout_engine("constrained")
    _draw_changes(all_axes[0][0], records, changes)
    for axes, panel in zip(all_axes[0][1:], panels, strict=True):
        _draw_scores(axes, records, *panel)
    for axes in all_axes[0]:
        axes.tick_params(labelsize=7)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=7)
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=130, format="png")
    plt.close(figure)


def _draw_changes(axes: Any, records: Records, changes: dict[str, tuple[str, str]]) -> None:
    for i, (study, arms) in enumerate(changes.items()):
        key = EXCESS if records.is_mixture(study) else LOSS
        seeds = [*change_at_equal_cost(records, study, key, arms).values()]
        steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
        label = f"{study} (n = {len(seeds)})"
        _plot(axes, steps, [[100 * seed[step] for seed in seeds] for step in steps], label, i)
    axes.axhline(0, color="0.4", linewidth=1)
    title = "loss of routed against dense at equal FLOPs, %\n(below 0: routing pays)"
    axes.set(title=title, xlabel="steps of the routed network")
    _set_scale(axes.xaxis, "log")


def _draw_scores(axes: Any, records: Records, study: str, key: str, title: str, x: str) -> None:
    for i, arm in enumerate(records.arms(study)):
        curves = [{p[0]: p for p in points} for points in records.curve(study, arm, key).values()]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        costs = [step if x == "steps" else curves[0][step][1] / 1e3 for step in steps]
        label = f"{arm} (n = {len(curves)})"
        _plot(axes, costs, [[curve[step][2] for curve in curves] for step in steps], label, i)
    for name, row in records.baselines_of(study).items():
        if name == "class Gaussians" and (level := score_of(row, key)):
            axes.axhline(level, color="0.4", linewidth=1, linestyle=":")
            text = {"transform": axes.get_yaxis_transform(), "fontsize": 7, "va": "bottom"}
            axes.text(0.4, level, name, color="0.3", **text)
    axes.set(title=title, xlabel=x)
    _set_scale(axes.xaxis, "log")
    _set_scale(axes.yaxis, "log")


def _plot(axes: Any, x: Sequence[float], scores: Sequence[Sequence[float]], label: str, color: int) -> None:
    """Plot the mean over seeds and, as a band, its lowest and highest."""
    axes.plot(x, [mean(values) for values in scores], ".-", color=f"C{color}", label=label)
    bounds = [min(values) for values in scores], [max(values) for values in scores]
    axes.fill_between(x, *bounds, color=f"C{color}", alpha=0.2, linewidth=0)


def _set_scale(axis: Any, scale: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axis.axes, f"set_{axis.axis_name}scale")(scale)
    axis.set(major_locator=LogLocator(subs=(1, 2, 3, 5, 7)), minor_formatter=NullFormatter())
    axis.set_major_formatter("{x:g}")
