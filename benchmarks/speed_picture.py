"""Draw measured against predicted speed-up of the routes, from a record of benchmarks.train_step.

python -m benchmarks.speed_picture RECORD.csv OUT.png
"""

import sys
from pathlib import Path

import torch

from benchmarks.results import read_results
from models import DiT, cost_of
from routing import Route

SIZES = {"S/2": (384, 12, 6), "B/2": (768, 12, 12), "L/2": (1024, 24, 16), "XL/2": (1152, 28, 16)}
SIDES = (16, 32, 64, 128)


def main() -> None:
    """Read, predict, draw."""
    record, out = map(Path, sys.argv[1:])
    rows = [row for row in read_results(record) if row["setting"].endswith(" tokens")]
    rows = [row for row in rows if row["step"] == "routed"]
    measured = {int(row["num_tokens"]): float(row["speedup_over_dense"]) for row in rows}
    draw(measured, int(rows[0]["hidden_size"]), out)


def predictions(hidden_size: int, depth: int, num_heads: int) -> dict[int, float]:
    """Return the speed-up that FLOPs promise at each number of tokens, with the published route."""
    predicted = {}
    for side in SIDES:
        with torch.device("meta"):
            net = DiT(side, 2, 4, hidden_size, depth, num_heads, routes=[Route(0.5, 2, -4)])
        predicted[net.num_tokens] = cost_of(net).predicted_speedup
    return predicted


def draw(measured: dict[int, float], hidden_size: int, out: Path) -> None:
    """Draw a line for each size of network, and the measured points beside theirs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name, size in SIZES.items():
        predicted = predictions(*size)
        (line,) = axes.plot(list(predicted), list(predicted.values()), label=f"{name}, predicted from FLOPs")
        if size[0] == hidden_size:
            style = {"color": line.get_color(), "label": f"{name}, measured"}
            axes.plot(list(measured), list(measured.values()), "o", **style)
    axes.set_ylim(bottom=1.0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(predicted), [str(tokens) for tokens in predicted])
    axes.set(xlabel="tokens", ylabel="dense step / routed step")
    axes.set_title("Half of the tokens bypass blocks 2 to depth-4", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
