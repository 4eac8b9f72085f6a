"""Tests of what only a GPU can tell; on a CPU they run at small sizes."""

import json

import pytest
import torch

from training.speed import most_graphs


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The CPU, and the GPU where there is one; random state and compiled graphs are left as they were."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    graphs = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=most_graphs(2))
    with torch.random.fork_rng(), graphs:
        yield torch.device(request.param)
    torch._dynamo.reset()


@pytest.fixture
def tiny(device):
    """True if the sizes are small enough for a CPU."""
    return device.type == "cpu"


@pytest.fixture
def check(record_property):
    """Record checks of (what, error, bound), and fail in the end if one exceeds its bound or is no number."""
    exceeded = []

    def check(rows):
        for what, error, bound in rows:
            failed = "" if error <= bound else "more than the bound"
            row = {"what": what, "error": error, "bound": bound, "failed": failed}
            record_property("check", json.dumps(row))
            exceeded.extend([row] if failed else [])

    yield check
    assert not exceeded
