"""`pip install ./routing` installs the package alone, and a training loop works with it."""

import subprocess
import sys

import pytest

from tests.programs import ROOT

# A training step with checkpointed blocks, then evaluation. Two lines concern routing.
LOOP = """
import inspect, sys
import torch
from routing import Adapter, BlockList, Route, attach, propose_adapter, prove

class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = (torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True) for _ in range(6))
        self.blocks = torch.nn.ModuleList(layers)

    def forward(self, x):
        for block in self.blocks:
            lengths.append(x.shape[1])
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x

lengths, transformer = [], Transformer()
attach(transformer, [Route(0.5, 2, -2)], adapter=Adapter(BlockList("blocks", tokens="src"), accepts=["x"]))
assert "x" in inspect.signature(transformer.forward).parameters
transformer(torch.randn(2, 8, 16)).square().mean().backward()
transformer.eval()(torch.randn(2, 8, 16))
assert lengths == [8, 8, 8, 4, 4, 8] + [8] * 6, lengths
print(sys.modules["routing"].__file__, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_it_installs_and_trains_without_the_rest_of_the_project(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path]
    subprocess.run([*install, ROOT / "routing"], check=True)
    command, environment = [sys.executable, "-c", LOOP], {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    file, *modules = result.stdout.split()
    assert file == str(tmp_path / "routing/__init__.py")
    assert not {"runtime", "models", "training", "diffusers", "hydra", "timm", "accelerate"} & set(modules)
