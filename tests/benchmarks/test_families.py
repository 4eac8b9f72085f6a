"""The timed families of diffusers: counted FLOPs and recorded rows."""

import pytest
import torch

from benchmarks import families

SIZE = families.Size(width=64, num_heads=1, depth=12, side=4, batch=2, num_text=5)


@pytest.mark.parametrize("name", families.WIDTHS)
def test_a_routed_step_saves_the_flops_of_its_window(name):
    (row,) = families.measure(name, SIZE, repeats=1, device=torch.device("cpu"))
    # 7 of 12 blocks take half of the image's tokens: their products save at most half, attention at most
    # three quarters.
    assert 1 < row["predicted_speedup"] < 12 / (12 - 7 * 0.75)
    assert row["dense_sec"] / row["routed_sec"] == pytest.approx(row["speedup"])
