import pytest
import torch.distributed as dist

from tests.runs import tiny_run
from training.run_folder import RunFolder


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """The folder of a one-step run."""
    folder = tmp_path_factory.mktemp("short") / "run"
    tiny_run(folder, "train.total_steps=1")
    return RunFolder(folder)


@pytest.fixture
def gloo():
    """A process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
