"""Write the averaged weights of a run as one `.safetensors` file that carries its configuration.

python -m models.export run=runs/NAME output=tread.safetensors
python sample.py checkpoint=tread.safetensors
"""

import json
from dataclasses import dataclass
from pathlib import Path

import hydra
from omegaconf import MISSING, DictConfig
from safetensors.torch import save_file

from builders import config as configuration
from builders.public import CONFIG, MANIFEST
from builders.sampling import UNGUIDED, open_run, read_run
from runtime.config import run_main, user_mistakes
from runtime.files import atomic_write
from runtime.output import check_free


@dataclass
class ExportConfig:
    """What `models.export` can be asked."""

    run: str = MISSING
    output: str = MISSING
    checkpoint: str | None = None  # a step, a name or a path; None: the newest
    overwrite: bool = False


configuration.register("export", ExportConfig)


@hydra.main(version_base="1.3", config_path="../configs", config_name="export")
def main(cfg: DictConfig) -> None:
    """Read a run and write its network."""
    with user_mistakes():
        request = configuration.resolve(cfg)
        output = Path(request["output"])
        if output.suffix != ".safetensors":
            raise ValueError(f"output={output} must end in .safetensors")
        check_free("output", output, [], request["overwrite"])
        run = open_run(request["run"], request["checkpoint"], guidance=UNGUIDED)
        config, _ = read_run(request["run"])
        texts = {CONFIG: json.dumps(config), MANIFEST: json.dumps(run.details["data"]["manifest"])}
        with atomic_write(output) as partial:
            save_file(run.precond.net.state_dict(), partial, metadata=texts)
    print(f"{output}: sample.py checkpoint={output} draws from it")


if __name__ == "__main__":
    run_main(main)
