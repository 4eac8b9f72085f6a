"""`pip install ./routing`: the package alone, and the loop of a trainer that has it."""

import subprocess
import sys

import pytest

from tests.programs import ROOT

# A loop as trainers have it: checkpointed blocks, clipping, evaluation. Two lines are those of routing.
LOOP = """
import inspect, sys
import torch
from routing import Adapter, BlockList, Route, attach

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.mlp = torch.nn.Linear(16, 16)

    def forward(self, hidden_states):
        x = hidden_states + self.attention(hidden_states, hidden_states, hidden_states)[0]
        lengths.append(x.shape[1])
        return x + self.mlp(x)

class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(6))

    def forward(self, hidden_states):
        for block in self.blocks:
            hidden_states = torch.utils.checkpoint.checkpoint(block, hidden_states, use_reentrant=False)
        return hidden_states

lengths, transformer = [], Transformer()
attach(transformer, [Route(0.5, 2, -2)], adapter=Adapter([BlockList("blocks")], accepts=["hidden_states"]))
assert "hidden_states" in inspect.signature(transformer.forward).parameters
optimizer = torch.optim.AdamW(transformer.parameters())
for step in range(2):
    transformer.train()
    loss = (transformer(torch.randn(2, 8, 16)) - torch.randn(2, 8, 16)).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    assert lengths[:6] == [8, 8, 4, 4, 4, 8], lengths
    lengths.clear()
    transformer.eval()
    with torch.no_grad():
        transformer(torch.randn(2, 8, 16))
    assert lengths == [8] * 6
    lengths.clear()
print(sys.modules["routing"].__file__, *sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.slow
def test_it_installs_and_trains_without_the_rest_of_the_project(tmp_path):
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        tmp_path,
        ROOT / "routing",
    ]
    subprocess.run(install, check=True)
    command, environment = [sys.executable, "-c", LOOP], {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    file, *modules = result.stdout.split()
    assert file == str(tmp_path / "routing/__init__.py")
    assert not {"runtime", "models", "training", "diffusers", "hydra", "timm", "accelerate"} & set(modules)
