"""Networks of timm with weights from a file, whose tensors are all checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn as nn


def load_timm(model: str, file: Path, options: Mapping[str, Any]) -> nn.Module:
    """Build a network of timm in eval mode.

    Args:
        file: a safetensors file.
        options: of `timm.create_model`.

    Raises:
        ValueError: the file does not have the weights of this network.
    """
    import timm
    from safetensors import SafetensorError, safe_open

    try:
        net = timm.create_model(model, pretrained=True, pretrained_cfg_overlay={"file": str(file)}, **options)
        with safe_open(file, "pt") as weights:  # without a head, timm does not check for missing tensors
            if missing := net.state_dict().keys() - {*weights.keys()}:
                raise RuntimeError(f"{', '.join(sorted(missing)[:3])} and others are missing")
    except (RuntimeError, SafetensorError, TypeError) as error:  # TypeError: it does not have these options
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{file} does not hold the weights of {model}: {reason}") from error
    return net.eval()
