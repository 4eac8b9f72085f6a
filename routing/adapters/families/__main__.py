"""What is known of every transformer of the installed diffusers: `python -m routing.adapters.families`.

*yes*: its row is proved in tests/routing/test_proof.py, on a small model of the pinned version. *fails*: the
class of this version takes other arguments than the row names.
"""

import inspect
import sys

import torch.nn as nn

from routing.adapters.families import FAMILIES, REFUSED
from routing.adapters.families.table import ROWS


def classes() -> dict[str, type[nn.Module]]:
    """Find diffusers' transformers, by their names."""
    from diffusers.models import transformers
    from diffusers.models.modeling_utils import ModelMixin

    kinds = {name: kind for name, kind in vars(transformers).items() if inspect.isclass(kind)}
    return {name: kind for name, kind in kinds.items() if issubclass(kind, ModelMixin)}


def row(name: str, kind: type[nn.Module]) -> str:
    """Say what is known of a class: in a word, and in detail."""
    if name in REFUSED:
        return f"refused | {REFUSED[name]}"
    if name not in FAMILIES:
        return "not known | "
    adapter = ROWS[name]
    if missing := {*adapter.accepts, *adapter.residuals} - set(inspect.signature(kind.forward).parameters):
        return f"fails | forward takes no {', '.join(sorted(missing))}"
    return f"yes | `{', then '.join(spec.name for spec in adapter.block_lists)}`"


def table(kinds: dict[str, type[nn.Module]]) -> str:
    """Lay out what is known of classes in Markdown."""
    lines = [f"| `{name}` | {row(name, kind)} |" for name, kind in kinds.items()]
    return "\n".join(["| class | routes | blocks, or why not |", "|---|---|---|", *lines])


if __name__ == "__main__":
    print(text := table(classes()))
    sys.exit("| fails |" in text)
