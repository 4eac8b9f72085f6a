"""Export the averaged weights of a run and its configuration as one `.safetensors` file.

python -m builders.export run=runs/NAME out=tread.safetensors
python sample.py checkpoint=tread.safetensors
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file

from builders.public import CONFIG, MANIFEST
from builders.sampling import open_run
from runtime.config import command, run_main
from runtime.files import atomic_write
from runtime.output import check_free


@dataclass
class ExportConfig:
    """The keys of `builders.export`."""

    run: str
    out: str
    checkpoint: str | None = None  # a step, a name or a path; None: the newest
    overwrite: bool = False


@command("export", ExportConfig, __doc__)
def main(request: ExportConfig) -> None:
    """Load a run and write its network."""
    out = Path(request.out)
    if out.suffix != ".safetensors":
        raise ValueError(f"out={out} must end in .safetensors")
    check_free(out, [], request.overwrite)
    run = open_run(request.run, request.checkpoint, guided=False)
    written = {CONFIG: run.experiment.written, MANIFEST: run.experiment.details["data"]["manifest"]}
    texts = {name: json.dumps(content) for name, content in written.items()}
    with atomic_write(out) as partial:
        save_file(run.precond.net.state_dict(), partial, metadata=texts)
    print(f"{out}: draw from it with `python sample.py checkpoint={out}`")


if __name__ == "__main__":
    run_main(main)
