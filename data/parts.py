"""Finished parts of an encoding job.

Images of a part that could not be read are listed in `NNNNNNN.errors.json`, written before the part, and
removed after one without errors: whenever a process is killed, a part without that file is complete.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from runtime.files import write_json
from runtime.parts import PartFolder, explained, read_object


@dataclass(frozen=True)
class Part:
    """Latents (n, [2,] C, H, W), masks (n, H, W) or None, positions of their images; errors by position."""

    latents: np.ndarray
    masks: np.ndarray | None
    positions: np.ndarray
    errors: dict[int, str] = field(default_factory=dict)


class EncodedParts(PartFolder):
    """The parts of one job, which is described by `about`; those with errors are done again."""

    def done(self) -> set[int]:
        return super().done() - {int(f.name.partition(".")[0]) for f in self.path.glob("*.errors.json")}

    def write_part(self, i: int, part: Part) -> None:
        masks = {} if part.masks is None else {"masks": part.masks}
        if part.errors:
            with explained(self.file(i)):
                write_json(self._errors(i), part.errors)
        self.write(i, {"latents": part.latents, "positions": part.positions, **masks})
        if not part.errors:
            self._errors(i).unlink(missing_ok=True)

    def read_part(self, i: int) -> Part:
        """Read a part, without its errors."""
        arrays = self.read(i)
        if missing := {"latents", "positions"} - arrays.keys():
            raise ValueError(f"{self.file(i)} has no {min(missing)}: remove it")
        return Part(arrays["latents"], arrays.get("masks"), arrays["positions"])

    def errors(self, parts: list[int] | range) -> dict[int, str]:
        """Why images could not be read, by position."""
        found = [read_object(self._errors(i)) for i in parts if self._errors(i).exists()]
        return {int(position): error for errors in found for position, error in errors.items()}

    def _errors(self, i: int) -> Path:
        return self.path / f"{i:07d}.errors.json"
