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
