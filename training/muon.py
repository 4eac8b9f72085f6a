"""Muon for the matrices of the blocks, and AdamW for everything else. [Muon]

[Muon] K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. It is meant for
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
        lr, weight_decay: of both.
        matrices: a regular expression: Muon has the two-dimensional parameters in whose names it is found.
        momentum, nesterov, ns_steps: of Muon; the last are Newton-Schulz iterations.
        betas, eps: of AdamW.
    """
    of_muon, others = [], []
    for name, parameter in named_parameters:
        is_matrix = parameter.ndim == 2 and re.search(matrices, name)
        (of_muon if is_matrix else others).append((name, parameter))
    options = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    options |= {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    adamw = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "fused": True}
    return {"muon": torch.optim.Muon(of_muon, **options), "adamw": torch.optim.AdamW(others, **adamw)}
