"""Which device serves and trains."""

from __future__ import annotations

import shutil
import subprocess
from typing import Literal

Device = Literal["cpu", "cuda"]


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Device:
    """``auto`` means CUDA where the driver lists a GPU, else CPU. Asks the driver, so torch need not be imported."""
    if device != "auto":
        return device
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "cuda" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def split_gpus(train_gpu: int, visible: str | None) -> tuple[str, str]:
    """Which GPUs the engine and the trainer see.

    Args:
        train_gpu: Index of the trainer's among the visible ones.
        visible: ``CUDA_VISIBLE_DEVICES`` of this process, if set.

    Returns:
        ``CUDA_VISIBLE_DEVICES`` of the engine and of the trainer.

    Raises:
        ValueError: There is no such GPU, or none is left for the engine.
    """
    if visible is None:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        gpus = [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU")]
    else:
        gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()]
    if train_gpu >= len(gpus) or len(gpus) < 2:
        raise ValueError(f"train_gpu={train_gpu} needs that GPU and another for the engine; visible are {len(gpus)}")
    return ",".join(gpus[:train_gpu] + gpus[train_gpu + 1 :]), gpus[train_gpu]
