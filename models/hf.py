"""Hugging Face checkpoints: a local directory with config.json and safetensors, or a hub id that is downloaded to one."""

import json
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from models.config import ModelConfig, from_hf

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("BF16", "F16", "F32")
_BUFFER = "rotary_emb.inv_freq"
"""End of the names of a buffer that old Llama checkpoints carry; it follows from the configuration."""


def download(repo_id: str, *, weights: bool = True) -> Path:
    """The local directory of a hub repository: from the cache, or downloaded (only what `load` reads; JSON without `weights`).

    Raises:
        FileNotFoundError: it is not in the cache and the hub cannot be reached, or has no such repository for us.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", *(["*.safetensors", "*.jinja", "*.txt", "*.model"] if weights else [])]
        return Path(snapshot_download(repo_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id!r} is neither a local path nor in the Hugging Face cache, and the hub cannot be reached; "
            "connect, or give a local directory"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(f"{repo_id!r} is no local path, and the hub refuses it: {error}") from error


def describe(path: Path) -> ModelConfig:
    """The configuration of a local directory; ValueError if it is refused. The weights need not be there."""
    generation = path / "generation_config.json"
    try:
        return from_hf(_read_json(path / "config.json"), _read_json(generation) if generation.exists() else {})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class HfDirectory:
    """A local checkpoint directory: a source of tensors for `models.assemble`, its configuration, and its generation defaults.

    Raises:
        ValueError: the configuration is refused, tensors are missing from their files, stored twice or of a dtype that we
            do not read.
        FileNotFoundError: there are no safetensors, or a shard is missing.
    """

    def __init__(self, path: Path):
        self.path = path
        self.generation_config: dict[str, Any] = {}
        if (path / "generation_config.json").exists():
            self.generation_config = _read_json(path / "generation_config.json")
        try:
            self.config: ModelConfig = from_hf(_read_json(path / "config.json"), self.generation_config)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        self._files = _tensor_files(path)

    @property
    def names(self) -> Set[str]:
        """Names of all tensors."""
        return self._files.keys()

    def read(self, name: str) -> np.ndarray:
        """The tensor as stored, [out, in]."""
        # Opened for one tensor and closed: pages of a mapped file count as this process's memory.
        with safe_open(self._files[name], framework="np") as file:
            if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
                raise ValueError(f"{self._files[name]}: {name} is {dtype}; known: {', '.join(_DTYPES)}")
            return file.get_tensor(name)


def _tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> its file."""
    if (path / _INDEX).exists():
        expected = _read_json(path / _INDEX)["weight_map"]
        shards = sorted(set(expected.values()))
    elif (path / _SINGLE).exists():
        expected, shards = {}, [_SINGLE]
    else:
        raise FileNotFoundError(f"{path} has neither {_SINGLE} nor {_INDEX} (only safetensors are read)")
    files: dict[str, Path] = {}
    for shard in shards:
        if not (path / shard).exists():
            raise FileNotFoundError(f"{path} lacks the shard {shard}, which {_INDEX} names")
        try:
            with safe_open(path / shard, framework="np") as file:
                names = file.keys()
        except SafetensorError as error:
            raise ValueError(f"{path / shard} is no readable safetensors file: {error}") from error
        for name in names:
            if name in files:
                raise ValueError(f"{path}: {name} is stored twice, in {files[name].name} and {shard}")
            files[name] = path / shard
    for name, shard in expected.items():
        if name not in files or files[name].name != shard:
            raise ValueError(f"{path}: {_INDEX} says that {name} is in {shard}; it is not")
    return {name: file for name, file in files.items() if not name.endswith(_BUFFER)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
