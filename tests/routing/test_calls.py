"""Adapters accept what pipelines of the installed diffusers pass: names are read from their sources."""

import ast
import inspect
from functools import cache
from pathlib import Path

import diffusers
import pytest

from routing.adapters.families import FAMILIES, __main__

CALLED = ("transformer", "transformer_2", "unconditional_transformer", "current_model", "current_transformer")
CALLED += ("decoder", "model")
# Sampling alone: caches of keys and values, and guidance that skips blocks or attention.
SAMPLING = {"kv_cache", "kv_cache_mode", "kv_caches", "num_ref_tokens", "skip_layers"}
SAMPLING |= {"perturbation_mask", "spatio_temporal_guidance_blocks"}
REFUSED = {
    "Kandinsky5Transformer3DModel": {"sparse_params"},  # attention to tiles of tokens
    "Transformer2DModel": {"added_cond_kwargs", "attention_mask", "class_labels"},  # of patches, refused
    "ZImageTransformer2DModel": {"siglip_feats", "image_noise_mask"},  # several images per sample
}
NOT_IN_PIPELINES = {"DreamLiteTransformer2DModel"}  # part of a U-Net


@cache
def sources():
    """Return the text of every file of the pipelines."""
    root = Path(diffusers.__file__).parent
    files = [file for folder in ("pipelines", "modular_pipelines") for file in (root / folder).rglob("*.py")]
    return [file.read_text() for file in files]


parsed = cache(ast.parse)  # most files name no class of the table


def passed_to(name, parameters):
    """Return the arguments that files which name a class pass to a model, in calls and dictionaries."""
    passed = set()
    for text in sources():
        if name not in text:
            continue
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in CALLED:
                passed |= {keyword.arg for keyword in node.keywords}
            if isinstance(node, ast.Dict):
                passed |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return passed & parameters.keys()


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - NOT_IN_PIPELINES))
def test_a_class_accepts_what_its_pipelines_pass(name):
    parameters = inspect.signature(__main__.classes()[name].forward).parameters
    passed = passed_to(name, parameters)
    assert passed, "no pipeline calls it: its name, or CALLED, has changed"
    assert passed - set(FAMILIES[name].accepts) - SAMPLING == REFUSED.get(name, set())
