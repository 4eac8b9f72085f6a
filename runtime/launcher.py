"""Environment variables of accelerate, torchrun and the user: refused, followed or recorded."""

import os

import psutil

LAUNCHERS = ("ACCELERATE_MIXED_PRECISION", "TORCHELASTIC_RUN_ID")  # set in the processes of launchers
OFF = ("", "0", "no", "none", "false", "f", "n", "off")  # values that accelerate reads as false
REFUSED = {
    "ACCELERATE_USE_FSDP": "train.parallel decides",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed is not supported",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM is not supported",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "model parallelism is not supported",
    "ACCELERATE_DYNAMO_BACKEND": "train.compile decides; examples.finetune does not compile",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "train.micro_batch_size decides, or batch_size",
}
ONE_MICRO_BATCH = ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
# Prefixes of variables that can change results or speed: they are recorded.
RECORDED = ("ACCELERATE_", "FSDP_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "MALLOC_")
RECORDED += ("GLIBC_TUNABLES", "LOKY_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "NCCL_", "PYTORCH_")
RECORDED += ("TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "WANDB_MODE", "LD_PRELOAD")


def check_launcher() -> None:
    """Raise a ValueError if a launcher sets an option that is not supported."""
    for name, instead in REFUSED.items():
        value = os.environ.get(name, "")
        if value.lower() not in OFF and (name, value) != ONE_MICRO_BATCH:
            remedy = "unset it, or change the launcher's configuration (accelerate launch --config_file)"
            raise ValueError(f"{name}={value}: {instead}: {remedy}")


def check_precision(setting: str, precision: str) -> None:
    """Raise a ValueError if the launcher sets another precision; `setting` starts the message."""
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()  # "no" is also the default
    if launched not in ("no", precision):
        raise ValueError(f"{setting}, but the launcher sets {launched}: they must agree")


def recorded_variables() -> dict[str, str]:
    """Return the environment variables that can change results or speed."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)}


def threads_are_chosen() -> bool:
    """True if the user has set the number of threads, by a variable or an option of accelerate.

    Launchers set OMP_NUM_THREADS=1 in their processes unless the user has set it.
    """
    num_threads = os.environ.get("OMP_NUM_THREADS", "")
    if num_threads != "1" or not any(name in os.environ for name in LAUNCHERS):
        return bool(num_threads or os.environ.get("MKL_NUM_THREADS"))
    for process in psutil.Process().parents():
        try:
            environment, command = process.environ(), " ".join(process.cmdline())
        except psutil.Error:  # it has ended, or belongs to another user
            return False
        if not any(name in environment for name in LAUNCHERS):  # the launcher itself
            return "OMP_NUM_THREADS" in environment or "cpu_threads_per_process" in command.replace("-", "_")
    return False
