"""The families of diffusers that are timed: what is counted and what is recorded."""

from functools import partial

import pytest
import torch

from benchmarks import families
from tests.routing.models import Sizes, build


@pytest.mark.parametrize("name", ["WanTransformer3DModel", "T5FilmDecoder", "ZImageTransformer2DModel"])
def test_a_routed_step_saves_the_flops_of_its_window(name):
    """Also of classes that return something else than an image."""
    sizes = Sizes(depth=12)
    (row,) = families.measure(partial(build, name, sizes), sizes, repeats=1, device=torch.device("cpu"))
    # 7 of 12 blocks take half of the image's tokens: their products save at most half, attention at most
    # three quarters.
    assert 1 < row["predicted_speedup"] < 12 / (12 - 7 * 0.75)
    assert row["dense_sec"] / row["routed_sec"] == pytest.approx(row["speedup"])
