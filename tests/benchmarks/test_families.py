"""The families of diffusers that are timed: what is counted and what is recorded."""

import pytest
import torch

from benchmarks import families
from routing.adapters.families import Sizes


@pytest.mark.parametrize("name", families.WIDTHS)
def test_a_routed_step_saves_the_flops_of_its_window(name):
    sizes = Sizes(128, 2, 12, side=8, batch=2, num_text=77)
    (row,) = families.measure(name, sizes, repeats=1, device=torch.device("cpu"))
    # 7 of 12 blocks take half of the image's tokens: their products save at most half, attention at most
    # three quarters.
    assert 1 < row["predicted_speedup"] < 12 / (12 - 7 * 0.75)
    assert row["dense_sec"] / row["routed_sec"] == pytest.approx(row["speedup"])


@pytest.mark.parametrize("name", ["T5FilmDecoder", "ZImageTransformer2DModel"])
def test_classes_that_return_something_else_are_timed(name):
    (row,) = families.measure(name, Sizes(depth=8), repeats=1, device=torch.device("cpu"))
    assert row["predicted_speedup"] > 1
