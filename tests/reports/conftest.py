"""Runs for the tests of reports, trained once."""

import pytest

from tests.runs import tiny_run


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The folders of dense and routed runs with two seeds each; tests must not change them."""
    folder, runs = tmp_path_factory.mktemp("compared"), []
    for model in ("dit", "tread"):
        for seed in (0, 1):
            watched = ("train.eval_every=3", "train.sample_every=3", "sampler.num_steps=1")
            runs.append(folder / f"{model}_{seed}")
            tiny_run(runs[-1], f"model={model}", f"seed={seed}", *watched)
    return runs
