"""Golden losses and images: a refactoring must not change any digit of them on one machine.

    python -m tests.golden OUT.json         in a checkout before the change, and in one after it
    diff BEFORE.json AFTER.json

OUT.json contains the losses of 8 training steps under each setting, and the hashes of 20 images of each
sampler and guidance. It takes about three minutes.
"""

import argparse
import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np

from tests.programs import start
from tests.runs import metrics

FIXED = ("model.hidden_size=32", "model.num_heads=4", "model.depth=8", "train.batch_size=8")
FIXED += ("train.total_steps=8", "train.log_every=1", "train.save_every=4", "train.eval_every=4")
FIXED += ("train.sample_every=null", "train.mixed_precision=no", "train.compile=false", "evaluation=none")
SETTINGS = {
    "routed": ("model=tread",),
    "dense": ("model=dit",),
    "sprint": ("model=sprint",),
    "by norm": ("model=tread", "model/router=norm"),
    "accumulated": ("model=tread", "train.micro_batch_size=2"),
    "bf16": ("model=tread", "train.mixed_precision=bf16"),
    "compiled": ("model=tread", "train.compile=true"),
    "checkpointed": ("model=tread", "model.gradient_checkpointing=true"),
    "clipped": ("model=tread", "train.grad_clip=0.1"),
    "schedule": ("model=tread", "routing.schedule=linear", "routing.end_factor=0"),
    "official": ("model=tread", "parity=official"),
    "flow": ("model=tread", "diffusion=flow"),
    "x0": ("model=tread", "diffusion=x0"),
    "ddpm": ("model=tread", "diffusion=ddpm"),
    "sgd": ("model=tread", "optimizer=sgd"),
    "muon": ("model=tread", "optimizer=muon"),
}
SAMPLERS = ("edm", "heun", "euler", "sde", "vp", "ve", "iddpm", "dopri5")
GUIDANCES = {"none": (), "cfg": ("guidance_scale=1.5",), "sparse": ("guidance_scale=1.5",)}


def losses(folder: Path, name: str, *overrides: str) -> list[dict]:
    """The lines of metrics of a tiny training, without times."""
    run = folder / name.replace(" ", "_")
    start("train.py", "data=digits", f"data.path={folder}/digits", *FIXED, *overrides, f"output_dir={run}")
    return metrics(run)


def image_hash(folder: Path, sampler: str, guidance: str) -> str:
    """The hash of 20 images of the routed run."""
    file = folder / f"{sampler}_{guidance}.npz"
    chosen = (f"sampler={sampler}", f"guidance={guidance}", *GUIDANCES[guidance])
    options = ("num_samples=20", "batch_size=8", "mixed_precision=no", "compile=false")
    start("sample.py", f"run={folder}/routed", *chosen, *options, f"out={file}")
    with np.load(file) as arrays:
        return hashlib.sha256(arrays["arr_0"].tobytes()).hexdigest()


def main() -> None:
    """Write the losses and the hashes."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.golden", description=__doc__, formatter_class=raw)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        results = {name: losses(folder, name, *overrides) for name, overrides in SETTINGS.items()}
        images = {f"{s}, {g}": image_hash(folder, s, g) for s in SAMPLERS for g in GUIDANCES}
    out.write_text(json.dumps({"losses": results, "images": images}, indent=1) + "\n")


if __name__ == "__main__":
    main()
