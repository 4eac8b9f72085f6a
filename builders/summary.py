"""What a user wants to see before a run starts."""

from typing import Any

import torch.nn as nn


def summary(config: dict[str, Any], details: dict[str, Any], net: nn.Module, resumed_step: int) -> str:
    """Return what a user wants to see before a run starts."""
    train, resolved, cost = config["train"], details["resolved"], details["cost"]
    num_parameters = f"{sum(parameter.numel() for parameter in net.parameters()) / 1e6:.2f}M parameters"
    resumed = f", resumed at step {resumed_step}" if resumed_step else ""
    lines = [
        f"run        {config['output_dir']}{resumed}",
        f"network    {num_parameters}, {len(net.blocks)} blocks, {net.num_tokens} tokens",
        f"cost       {cost['dense_forward_flops'] / 2e9:.3g} GMAC for one image and forward pass",
        *(f"route      {line}" for line in details["routes"]),
    ]
    if net.routes:
        lines.append(f"saving     {_saving(cost)}")
    if cost["fp32_slowdown"] != 1:
        lines.append(f"fp32 block {_fp32_block(cost)}")
    processes = f"{details['num_processes']} process(es) on {details['device']}"
    batch = f"{train['batch_size']} images, micro-batches of {resolved['micro_batch_size']}"
    lines += [
        f"batch      {batch}, {processes}, {resolved['num_workers']} reading ahead",
        f"precision  {_precision(resolved, details['tf32'])}",
    ]
    if details["device"] == "cpu":
        freed = "kept for the next one" if resolved["keep_freed_memory"] else "given back to the system"
        lines.append(f"memory     what a step frees is {freed} (train.keep_freed_memory)")
    if "note" in details["data"]:
        lines.append(f"data       {details['data']['note']}")
    if train["eval_every"] and not details["data"]["manifest"]["num_held_out"]:
        lines.append("evaluation no val_loss_dense: the data have no held-out entries (num_held_out)")
    lines += [f"changed    {change}" for change in details["changes"]]
    if "init_from" in details:
        lines.append(f"start      {_start(details['init_from'])}")
    lines.append(f"length     {train['total_steps']} steps, checkpoint every {train['save_every']}")
    if resolved["compile"]:
        lines.append("The first step compiles the blocks: this can take a minute.")
    return "\n".join(lines)


def _precision(resolved: dict[str, Any], tf32: bool) -> str:
    autocast = "bf16 autocast" if resolved["mixed_precision"] == "bf16" else "no autocast"
    parts = ["fp32 weights", autocast, *(["TF32 for what is in fp32"] if tf32 else [])]
    parts.append(f"{'compiled' if resolved['compile'] else 'uncompiled'} blocks")
    parts += [f"{resolved['attention']} attention"] if "attention" in resolved else []
    return ", ".join(parts)


def _saving(cost: dict[str, float]) -> str:
    if cost["routed_training_flops"] == cost["dense_training_flops"]:
        return "none: the blocks of the windows process all tokens"
    ceiling = f"(if all tokens that may bypass these blocks did: {cost['ceiling']:.2f}x)"
    return (
        f"{cost['routed_forward_flops'] / 2e9:.3g} GMAC with routes: training steps can be "
        f"{cost['predicted_speedup']:.2f}x as fast by their FLOPs {ceiling}"
    )


def _fp32_block(cost: dict[str, float]) -> str:
    without = cost["dense_training_flops"] / cost["routed_training_flops"]
    return (
        f"outside autocast products take {cost['fp32_slowdown']:.1f}x as long here: without "
        f"model.fp32_after_route the steps could be {without:.2f}x as fast"
    )


def _start(init_from: dict[str, Any]) -> str:
    entry = f" ({init_from['entry']})" if init_from["entry"] else ""
    warning = (
        f". warning: they were trained as {init_from['precond']}: what time and output mean is learnt again"
    )
    return f"weights of {init_from['file']}{entry}" + (warning if init_from["other_objective"] else "")
