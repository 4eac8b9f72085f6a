"""The figure of the twin study: how much cheaper routing is over a training, and scores against cost."""

import hashlib
import math
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

from runtime.files import atomic_write
from study.records import EXCESS, Records, score_of, twins_of
from study.twins import LOSS, STUDIES

# The panels after the first: study, score, title.
PANELS = (
    ("mixture-64", EXCESS, "mixture-64: loss above the optimum"),
    ("digits-200", LOSS, "digits-200: loss on unseen digits"),
)
BASELINE = "class Gaussians"


def draw(records: Records, file: Path, page: str) -> None:
    """Plot the panels that have records; without any, write no file.

    Args:
        page: text of the page of the figure; the file contains its hash.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    twins = {study: pairs[0] for study in STUDIES if (pairs := twins_of(records, study))}
    panels = [panel for panel in PANELS if records.rows[panel[0]]]
    if not twins:
        return
    size = (4.3 * (1 + len(panels)), 3.8)
    figure, all_axes = plt.subplots(1, 1 + len(panels), figsize=size, squeeze=False, layout="constrained")
    _draw_costs(all_axes[0][0], records, twins)
    for axes, panel in zip(all_axes[0][1:], panels, strict=True):
        _draw_scores(axes, records, *panel)
    for axes in all_axes[0]:
        axes.tick_params(labelsize=7)
        axes.title.set_fontsize(10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(edgecolor="none", framealpha=0.9, fontsize=7)
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=130, format="png", metadata={"Comment": page_hash(page)})
    plt.close(figure)


def page_hash(page: str) -> str:
    """Return the hash of a page that its figure contains."""
    return hashlib.sha256(page.encode()).hexdigest()


def _draw_costs(axes: Any, records: Records, twins: dict[str, tuple[str, str]]) -> None:
    from matplotlib import colormaps

    colors = cycle(colormaps["Dark2"].colors)
    for study, arms in twins.items():
        key = EXCESS if records.is_mixture(study) else LOSS
        if changes := records.costs_of_equal_scores(study, key, arms):
            n, name = len(next(iter(changes.values()))), arms[0].removeprefix("routed")
            ratios = [[math.exp(value) for value in values] for values in changes.values()]
            _plot(axes, [*changes], ratios, f"{study}{name} (n = {n})", next(colors))
    axes.axhline(1, color="0.4", linewidth=1)
    axes.set(title="FLOPs to the same loss, routed over dense\n(below 1: routing pays)")
    axes.set(xlabel="steps of the routed network")
    _set_log(axes.xaxis)


def _draw_scores(axes: Any, records: Records, study: str, key: str, title: str) -> None:
    for i, arm in enumerate(records.arms(study)):
        curves = [{p[0]: p for p in points} for points in records.curve(study, arm, key).values()]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        scores = [[curve[step][2] for curve in curves] for step in steps]
        tflops = [curves[0][step][1] / 1e3 for step in steps]
        _plot(axes, tflops, scores, f"{arm} (n = {len(curves)})", f"C{i}")
    if level := score_of(records.baselines_of(study).get(BASELINE, {}), key):
        label = "a Gaussian per class (no network)"
        axes.axhline(level, color="0.4", linewidth=1, linestyle=":", label=label)
    axes.set(title=title, xlabel="training TFLOPs")
    _set_log(axes.xaxis)
    _set_log(axes.yaxis)


def _plot(axes: Any, x: Sequence[float], scores: Sequence[Sequence[float]], label: str, color: Any) -> None:
    """Plot the mean over seeds and, as a band, its lowest and highest."""
    axes.plot(x, [mean(values) for values in scores], ".-", color=color, label=label)
    bounds = [min(values) for values in scores], [max(values) for values in scores]
    axes.fill_between(x, *bounds, color=color, alpha=0.2, linewidth=0)


def _set_log(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    axis.set(major_locator=LogLocator(subs=(1, 2, 3, 5, 7)), minor_formatter=NullFormatter())
    axis.set_major_formatter("{x:g}")
