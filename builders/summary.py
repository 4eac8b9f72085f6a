"""What a user wants to see before a run starts."""

from typing import Any

import torch.nn as nn

from builders.rules import INIT_OBJECTIVES


def summary(config: dict[str, Any], details: dict[str, Any], net: nn.Module, resumed_step: int) -> str:
    """Return what a user wants to see before a run starts."""
    train, resolved, cost = config["train"], details["resolved"], details["cost"]
    blind = train["eval_every"] and not details["data"]["manifest"]["num_held_out"]
    attention = f", {resolved['attention']} attention" if "attention" in resolved else ""
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    lines = [
        f"run        {config['output_dir']}" + (f", resumed at step {resumed_step}" if resumed_step else ""),
        f"network    {num_parameters / 1e6:.2f}M parameters, {len(net.blocks)} blocks, {net.num_tokens} "
        "tokens",
        f"cost       {cost['dense_forward_flops'] / 2e9:.3g} GMAC for one image and forward pass",
        *(f"route      {line}" for line in details["routes"]),
        *([f"saving     {_saving(net, cost)}"] if net.routes else []),
        *([f"fp32 block {_fp32_block(cost)}"] if cost["fp32_slowdown"] != 1 else []),
        f"batch      {train['batch_size']} images, micro-batches of {resolved['micro_batch_size']}, "
        f"{details['num_processes']} process(es) on {details['device']}, {resolved['num_workers']} reading "
        "ahead",
        "precision  fp32 weights, "
        f"{'bf16 autocast' if resolved['mixed_precision'] == 'bf16' else 'no autocast'}, "
        f"{'TF32 for what is in fp32, ' if details['tf32'] else ''}"
        f"{'compiled' if resolved['compile'] else 'uncompiled'} blocks{attention}",
        *(
            [f"memory     what a step frees is {_freed(resolved)} (train.keep_freed_memory)"]
            if details["device"] == "cpu"
            else []
        ),
        *([f"data       {details['data']['note']}"] if "note" in details["data"] else []),
        *(
            ["evaluation no val_loss_dense: the data have no held-out entries (num_held_out)"]
            if blind
            else []
        ),
        *(f"changed    {change}" for change in details["changes"]),
        *([f"start      {_start(details['init_from'])}"] if "init_from" in details else []),
        f"length     {train['total_steps']} steps, checkpoint every {train['save_every']}",
    ]
    if resolved["compile"]:
        lines.append("The first step compiles the blocks: this can take a minute.")
    return "\n".join(lines)


def _saving(net: nn.Module, cost: dict[str, float]) -> str:
    if cost["routed_training_flops"] == cost["dense_training_flops"]:
        return "none: the blocks of the windows process all tokens"
    return (
        f"{cost['routed_forward_flops'] / 2e9:.3g} GMAC with routes: training steps can be "
        f"{cost['predicted_speedup']:.2f}x as "
        f"fast by their FLOPs (if all tokens that may bypass these blocks did: {cost['ceiling']:.2f}x)"
    )


def _fp32_block(cost: dict[str, float]) -> str:
    without = cost["dense_training_flops"] / cost["routed_training_flops"]
    return (
        f"outside autocast products take {cost['fp32_slowdown']:.1f}x as long here: without "
        "model.fp32_after_route the steps "
        f"could be {without:.2f}x as fast"
    )


def _start(init_from: dict[str, str | None]) -> str:
    entry = f" ({init_from['entry']})" if init_from["entry"] else ""
    known = INIT_OBJECTIVES[init_from["objective"]]
    anew = (
        f". warning: it {known}; what its time embedding and its output mean has to be learnt again"
        if known
        else ""
    )
    return f"weights of {init_from['file']}{entry}{anew}"


def _freed(resolved: dict[str, Any]) -> str:
    return "kept for the next one" if resolved["keep_freed_memory"] else "given back to the system"
