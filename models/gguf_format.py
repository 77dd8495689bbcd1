"""The container of GGUF files: metadata and where each tensor lies. What tensors mean is for `models.gguf_file`.

The `gguf` package has a reader too, but it makes several NumPy views for every string: seconds for a vocabulary. Its
dequantisation is used. Source: the GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Value type -> its `struct` code."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file: `shape` in NumPy's order, `offset` in bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int


@dataclass(frozen=True)
class GgufContents:
    """What a file declares: metadata by key, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised to float32.

        Raises:
            ValueError: a type that `gguf` cannot dequantise, or the file ends early.
        """
        info = self.tensors[name]
        stored_shape = gguf.quants.quant_shape_to_byte_shape(info.shape, info.type)
        num_bytes = int(np.prod(stored_shape))
        # Read, not mapped: pages of a mapped file would count as this process's memory.
        data = np.fromfile(self.path, np.uint8, num_bytes, offset=info.offset)
        if data.size != num_bytes:
            raise ValueError(f"{self.path} ends within the tensor {name}: {data.size} of {num_bytes} bytes")
        try:
            return gguf.quants.dequantize(data.reshape(stored_shape), info.type)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {name} is {info.type.name}, which cannot be dequantised") from error


def read_contents(path: Path) -> GgufContents:
    """Metadata and tensor list of a GGUF file; no tensor is read.

    Raises:
        ValueError: not a GGUF file of a version that we know, or a damaged one.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start[:4] != _MAGIC:
            raise ValueError(f"{path} is not a GGUF file")
        if len(start) < 8 or (version := int.from_bytes(start[4:], "little")) not in _VERSIONS:
            raise ValueError(f"{path} has an unknown GGUF version; known: {_VERSIONS}, little-endian")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, _Cursor(data, 8))
            except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
                raise ValueError(f"{path} is a damaged GGUF file (version {version}): {error}") from error


class _Cursor:
    """A position in the file, and the kinds of value that can be read there."""

    def __init__(self, data: mmap.mmap, position: int):
        self.data, self.position = data, position

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (size,) = self.scalars("Q", 1)
        start, self.position = self.position, self.position + size
        if self.position > len(self.data):
            raise ValueError("a string runs past the end")
        return self.data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalars(_SCALARS[kind], 1)[0]
        (item_kind,) = self.scalars("I", 1)
        (count,) = self.scalars("Q", 1)
        if item_kind in _SCALARS:
            return list(self.scalars(_SCALARS[item_kind], count))
        return [self.value(item_kind) for _ in range(count)]


def _parse(path: Path, cursor: _Cursor) -> GgufContents:
    num_tensors, num_keys = cursor.scalars("Q", 2)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalars("I", 1)[0])
    declared = []
    for _ in range(num_tensors):
        name = cursor.string()
        (num_axes,) = cursor.scalars("I", 1)
        shape = cursor.scalars("Q", num_axes)[::-1]
        kind, offset = *cursor.scalars("I", 1), *cursor.scalars("Q", 1)
        declared.append(TensorInfo(name, shape, gguf.GGMLQuantizationType(kind), offset))
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    tensors = {info.name: TensorInfo(info.name, info.shape, info.type, start + info.offset) for info in declared}
    if len(tensors) != num_tensors:
        raise ValueError("two tensors have the same name")
    return GgufContents(path, metadata, tensors)
