"""Print a table of all transformers in the installed diffusers: `python -m routing.adapters.families`.

*yes*: tests/routing/test_entries.py proves the row on small models of the pinned version. *fails*: the
forward of this version lacks arguments that the row names.
"""

import inspect
import sys

import torch.nn as nn

from routing.adapters.families import FAMILIES, REFUSED
from routing.adapters.families.table import ROWS


def classes() -> dict[str, type[nn.Module]]:
    """Return the transformer classes of diffusers by name."""
    from diffusers.models import transformers
    from diffusers.models.modeling_utils import ModelMixin

    kinds = {name: kind for name, kind in vars(transformers).items() if inspect.isclass(kind)}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, ModelMixin)}


def row(name: str, kind: type[nn.Module]) -> str:
    """Return the last two cells of a class: its status, and its lists of blocks or the reason."""
    if name in REFUSED:
        return f"refused | {REFUSED[name]}"
    if name not in FAMILIES:
        return "unknown | "
    adapter = ROWS[name]
    if missing := {*adapter.accepts, *adapter.residuals} - set(inspect.signature(kind.forward).parameters):
        return f"fails | forward takes no {', '.join(sorted(missing))}"
    return f"yes | `{', then '.join(spec.name for spec in adapter.block_lists)}`"


def table(kinds: dict[str, type[nn.Module]]) -> str:
    """Return a table of classes in Markdown."""
    lines = [f"| `{name}` | {row(name, kind)} |" for name, kind in kinds.items()]
    return "\n".join(["| class | routes | lists of blocks, or reason |", "|---|---|---|", *lines])


if __name__ == "__main__":
    print(text := table(classes()))
    sys.exit("| fails |" in text)
