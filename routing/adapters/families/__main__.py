"""Every transformer of the installed diffusers: what is known of it, and whether that is right.

    python -m routing.adapters.families            all classes, as a table
    python -m routing.adapters.families NAME ...   some

A class that is known is built at a small size with random weights, in double precision, and its routes are
compared with the same network hiding the tokens that bypass (routing/adapters/proof.py).
"""

import argparse
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from routing.adapters.families import FAMILIES, Built, Family, Sizes
from routing.adapters.proof import prove
from routing.routes import Route

MAX_ERROR = 1e-6  # in double precision, of what routes change
ROUTE = Route(0.5, 1, -2)


def classes() -> Iterator[str]:
    """Yield the names of diffusers' transformers."""
    from diffusers.models import transformers
    from diffusers.models.modeling_utils import ModelMixin

    for info in pkgutil.iter_modules(transformers.__path__, f"{transformers.__name__}."):
        for name, kind in vars(importlib.import_module(info.name)).items():
            if inspect.isclass(kind) and issubclass(kind, ModelMixin) and kind.__module__ == info.name:
                yield name


def tried(name: str) -> tuple[str, str]:
    """Return what is found of a class: in a word, and in detail."""
    family = FAMILIES.get(name)
    if family is None:
        return "not known", ""
    if family.adapter is None:
        return "refused", family.refused
    try:
        model, arguments = built(family, Sizes())
        proof = prove(model, family.adapter, arguments, ROUTE)
    except Exception as error:  # of another version: whatever it is, the others are tried
        return "fails", " ".join(f"{type(error).__name__}: {error}".split())
    if proof.dense or not proof.routed < MAX_ERROR:
        return "fails", f"differs by {max(proof):.1g} of what routes change"
    lists = ", then ".join(spec.name for spec in family.adapter.block_lists)
    return "passes", f"`{lists}`"


def built(family: Family, sizes: Sizes) -> Built:
    """Return a small model in double precision, with random weights, and inputs."""
    torch.manual_seed(0)
    model, arguments = family.build(sizes)
    with torch.no_grad():
        for parameter in model.parameters():  # what starts at 0 could hide a mistake
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.double(), tree_map(_in_double, arguments)


def _in_double(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def table(names: Sequence[str]) -> tuple[str, bool]:
    """Return what is found of classes as a table, and whether none fails."""
    found = {name: tried(name) for name in names}
    rows = [f"| `{name}` | {word} | {detail} |" for name, (word, detail) in found.items()]
    head = ["| class | routes | blocks, or why not |", "|---|---|---|"]
    return "\n".join([*head, *rows]), all(word != "fails" for word, _ in found.values())


def main() -> None:
    """Print the table."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m routing.adapters.families", None, __doc__, formatter_class=raw
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of classes; none: all")
    names, known = parser.parse_args().names, [*classes()]
    if unknown := set(names) - set(known):
        parser.error(f"the installed diffusers has no {', '.join(sorted(unknown))}")
    text, is_right = table(names or known)
    print(text)
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
