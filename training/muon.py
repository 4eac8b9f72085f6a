"""Muon for the matrices of the blocks, and AdamW for everything else. [Muon]

[Muon] K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. Muon is meant for
hidden matrices, not for embeddings, outputs, biases and scales. Both optimizers share one learning rate: the
update of Muon is scaled to the RMS of AdamW's (J. Liu et al., "Muon is Scalable for LLM Training", 2025).
"""

import re
from collections.abc import Iterable

import torch


def muon(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    /,
    lr: float,
    matrices: str,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> dict[str, torch.optim.Optimizer]:
    """Split parameters by their names, and build an optimizer for each part.

    Args:
        lr, weight_decay: used by both.
        matrices: regular expression; Muon optimizes the two-dimensional parameters whose names it matches.
        momentum, nesterov, ns_steps: used by Muon; ns_steps is the number of Newton-Schulz iterations.
        betas, eps: used by AdamW.
    """
    muon_parameters, others = [], []
    for name, parameter in named_parameters:
        is_matrix = parameter.ndim == 2 and re.search(matrices, name)
        (muon_parameters if is_matrix else others).append((name, parameter))
    options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    options |= {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "fused": True}
    return {"muon": torch.optim.Muon(muon_parameters, **options), "adamw": torch.optim.AdamW(others, **adamw)}
