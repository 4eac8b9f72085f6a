"""Finished parts of an encoding job: latents (n, [2,] C, H, W), positions (n,) of their images, and masks.

Images of a part that could not be read are listed in `NNNNNNN.errors.json`, written before the part, and
removed after one without errors: whenever a process is killed, a part without that file is complete.
"""

from pathlib import Path

import numpy as np

from runtime.files import write_json
from runtime.parts import PartFolder, explained, read_object


class EncodedParts(PartFolder):
    """The parts of one job, which is described by `about`; those with errors are done again."""

    def done(self) -> set[int]:
        return super().done() - {int(f.name.partition(".")[0]) for f in self.path.glob("*.errors.json")}

    def write_part(self, i: int, arrays: dict[str, np.ndarray], errors: dict[int, str]) -> None:
        """Write a part, and by position why images are not in it."""
        if errors:
            with explained(self.file(i)):
                write_json(self._errors(i), errors)
        self.write(i, arrays)
        if not errors:
            self._errors(i).unlink(missing_ok=True)

    def errors(self) -> dict[int, str]:
        """Why images could not be read, by position."""
        found = [read_object(file) for file in sorted(self.path.glob("*.errors.json"))]
        return {int(position): error for errors in found for position, error in errors.items()}

    def _errors(self, i: int) -> Path:
        return self.path / f"{i:07d}.errors.json"
