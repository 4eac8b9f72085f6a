"""What is known of every transformer of the installed diffusers, as a table.

    python -m routing.adapters.families            all classes
    python -m routing.adapters.families NAME ...   some

*yes*: its row is proved in tests/routing/test_proof.py, on a small model of the pinned version. *fails*: the
class of this version takes other arguments than the row names.
"""

import argparse
import importlib
import inspect
import pkgutil
import sys

import torch.nn as nn

from routing.adapters.families import FAMILIES, REFUSED


def classes() -> dict[str, type[nn.Module]]:
    """Find diffusers' transformers, by their names."""
    from diffusers.models import transformers
    from diffusers.models.modeling_utils import ModelMixin

    found = {}
    for info in pkgutil.iter_modules(transformers.__path__, f"{transformers.__name__}."):
        kinds = vars(importlib.import_module(info.name)).items()
        found |= {
            name: kind
            for name, kind in kinds
            if inspect.isclass(kind) and issubclass(kind, ModelMixin) and kind.__module__ == info.name
        }
    return found


def row(name: str, kind: type[nn.Module]) -> tuple[str, str, str]:
    """Say what is known of a class: its name, in a word, in detail."""
    if name in REFUSED:
        return name, "refused", REFUSED[name]
    if name not in FAMILIES:
        return name, "not known", ""
    adapter = FAMILIES[name]
    missing = {*adapter.accepts, *adapter.residuals} - set(inspect.signature(kind.forward).parameters)
    if missing:
        return name, "fails", f"forward takes no {', '.join(sorted(missing))}"
    return name, "yes", "`" + ", then ".join(spec.name for spec in adapter.block_lists) + "`"


def table(kinds: dict[str, type[nn.Module]]) -> str:
    """Lay out what is known of classes in Markdown."""
    rows = [row(name, kind) for name, kind in kinds.items()]
    lines = [f"| `{name}` | {word} | {detail} |" for name, word, detail in rows]
    return "\n".join(["| class | routes | blocks, or why not |", "|---|---|---|", *lines])


def main() -> None:
    """Print the table."""
    program, raw = "python -m routing.adapters.families", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(program, None, __doc__, formatter_class=raw)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of classes; none: all")
    names, kinds = parser.parse_args().names, classes()
    if unknown := set(names) - set(kinds):
        parser.error(f"the installed diffusers has no {', '.join(sorted(unknown))}")
    text = table({name: kinds[name] for name in names or kinds})
    print(text)
    sys.exit("| fails |" in text)


if __name__ == "__main__":
    main()
