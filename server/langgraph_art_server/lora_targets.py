"""Which linear layers of a base model can carry an adapter, told from the files of the model alone.

Invariant: free of torch, because the API process asks when a policy is created; the trainer asks the loaded model.
"""

from __future__ import annotations

import json
from pathlib import Path

SERVED_LINEARS = frozenset(
    {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "qkv_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "gate_up_proj",
    }
)
"""Linear layers of a decoder block on which vLLM serves LoRA, by their names in ``transformers``."""


def served_linears(directory: Path) -> frozenset[str]:
    """Names of the layers of a base model that vLLM serves LoRA on.

    Args:
        directory: The model's directory. The headers of its safetensors files name every weight.

    Returns:
        ``SERVED_LINEARS`` as far as the model has them; all of them if no file tells.
    """
    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found |= {name.rpartition(".")[0].rpartition(".")[2] for name in header}
    return (SERVED_LINEARS & found) or SERVED_LINEARS
