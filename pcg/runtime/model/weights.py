"""The base model's weights by tensor, from safetensors files, a module, or random numbers.

Opening reads only headers; a tensor is mapped when it is loaded, and copied only if it is cast,
transposed, fused, moved, or joined with others. A checkpoint may use other names than the model:

- without or with the base prefix: `h.0.ln_1.weight` for `transformer.h.0.ln_1.weight`, in old
  checkpoints that were saved without their head;
- another word for a part of the name (transformers 5, conversion_mapping.py: "mixtral",
  "GPTNeoXForCausalLM", "granitemoe", "flint"), or Nemotron-H's `backbone.` for the prefix;
- `experts.3.w1.weight`, … or `experts.3.gate_proj.weight`, … for the fused `experts.gate_up_proj`
  and `experts.down_proj` (transformers 5, conversion_mapping.py, "mixtral" and "qwen2_moe").
"""

from __future__ import annotations

import difflib
import math
import platform
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pcg.errors import WeightsError
from pcg.formats.format import Format, Parts, StoredMatrix
from pcg.ranks.agreement import tensor_digest
from pcg.ranks.shards import Ranges
from pcg.source import ModelSource
from pcg.tensor_file import TensorInfo, read_header

Shape = tuple[int, ...]

# The separate tensors of experts for a fused parameter, in order of output features.
_EXPERT_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_OTHER_NAMES = (
    (".mlp.", ".block_sparse_moe."),
    ("lm_head.", "embed_out."),
    (".block_sparse_moe.experts.gate_up_proj", ".block_sparse_moe.input_linear.weight"),
    (".block_sparse_moe.experts.down_proj", ".block_sparse_moe.output_linear.weight"),
    (".block_sparse_moe.router.weight", ".block_sparse_moe.router.layer.weight"),
    (".self_attn.sinks", ".self_attn.softmax_offset"),
    (".self_attn.g_proj.", ".self_attn.gate_proj."),
    ("model.", "backbone."),
)
"""Parts of the model's names, and alternatives in checkpoints."""
_QUANTIZED = (
    "SCB", "qweight", "weight.absmax", "weight_packed", "weight_scale", "weight_scale_inv",
)  # fmt: skip
"""Suffixes of tensors that belong to a quantized matrix."""
_OF_GATE_AND_UP = 4
"""Number of dims of experts' gate and up in graphs: [experts, 2, f, in]."""
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}


class Weights(ABC):
    """Named tensors of a base model.

    Attributes:
        dtypes: dtypes in the index that `load` reads.
        read_bytes: bytes of all tensors and parts of tensors read so far.
    """

    dtypes: Collection[str] = tuple(DTYPE_NAMES.values())

    def __init__(
        self,
        index: Mapping[str, TensorInfo],
        base_prefix: str,
        config: Mapping[str, Any],
        where: str,
    ) -> None:
        self.index = index
        self.base_prefix = base_prefix
        self.config = config
        self.where = where
        self.read_bytes = 0
        self._used: set[str] = set()

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Read a tensor, or a part of it, in the graph's layout.

        Args:
            name: name in the model, such as `model.layers.0.mlp.up_proj.weight`.
            shape: shape of the whole tensor.
            transposed: True if the checkpoint holds [in, out], and the result is [out, in].
            ranges: the part of each dim to read; None for all.
            out: destination, which is then returned; None for new memory.
        Raises:
            WeightsError: the tensor is missing, has another shape, or is quantized, or the file is
                damaged.
        """
        shape = tuple(shape)
        self._check_float(name)
        stored_name = self._find(name)
        if stored_name is not None:
            self._check(name, stored_name, shape[::-1] if transposed else _stored(shape))
            stored = ranges[::-1] if transposed and ranges else ranges
            if _is_gate_and_up(shape):
                tensor = self._gate_and_up(stored_name, shape, ranges)
            else:
                tensor = self._take(stored_name, stored)
            if transposed:
                tensor = tensor.t()
            if out is None:
                return tensor.to(device=device, dtype=dtype).contiguous()
            return out.copy_(tensor)
        parts = self._expert_parts(name, shape)
        if parts is None:
            raise WeightsError(self._missing(name))
        fused = self._fuse(name, parts, shape, dtype, ranges)
        return fused.to(device) if out is None else out.copy_(fused)

    def shared(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
    ) -> Tensor | None:
        """Return a tensor in memory that equals `load`'s result; None without one."""
        return None

    def remote(self, name: str, shape: Sequence[int], serves: bool = False) -> Tensor | None:
        """Return a stand-in for a matrix of another process; None for a local matrix.

        Args:
            serves: True for serving without training.
        """
        return None

    def quantized(
        self, name: str, shape: Sequence[int], format_: Format, transposed: bool = False
    ) -> Parts:
        """Read a matrix as it is stored in a format, or quantize a float matrix.

        Args:
            name, shape, transposed: as for `load`.
        Raises:
            WeightsError: the checkpoint should have the matrix in this format, and has not.
        """
        rows, columns = shape
        format_.check(shape, name)
        settings = self.config.get("quantization_config")
        if not settings:
            dtype = self.float_dtype(name)
            return format_.quantize(self.load(name, shape, dtype, transposed))
        if transposed and format_.library != "bitsandbytes":
            raise WeightsError(
                f"{name} belongs to a Conv1D, whose order {self.where} may store as [in, out] in "
                f"{format_.name}; use a checkpoint of bitsandbytes, or float weights with "
                "quantization=FORMAT"
            )
        # bitsandbytes stores the matrix of a Conv1D as [out, in], like that of a Linear.
        for candidate in self._names(name):
            module = candidate.removesuffix(".weight")
            parts = format_.read(
                StoredMatrix(
                    module,
                    rows,
                    columns,
                    has=partial(self._has_part, module),
                    take=partial(self._take_part, module),
                    settings=settings,
                )
            )
            if parts is not None:
                return parts
        stored_name = self._find(name)
        kind = "is missing" if stored_name is None else f"is in {self.index[stored_name].dtype}"
        raise WeightsError(
            f"{name} of {self.where} should be stored as {format_.name}, as its "
            f"quantization_config says, and {kind} without the tensors of this format; name it "
            "among the skipped modules (ignore, modules_to_not_convert, llm_int8_skip_modules), or "
            "use the files of this checkpoint"
        )

    def _check_float(self, name: str) -> None:
        """Refuse a matrix that is stored quantized, and not declared so."""
        for candidate in self._names(name) if self.config.get("quantization_config") else ():
            module = candidate.removesuffix(".weight")
            other = next((s for s in _QUANTIZED if f"{module}.{s}" in self.index), None)
            if other is not None:
                raise WeightsError(
                    f"{name} of {self.where} is stored quantized ({module}.{other}), and its "
                    "quantization_config skips it; remove it from the skipped modules (ignore, "
                    "modules_to_not_convert, llm_int8_skip_modules)"
                )

    def _has_part(self, module: str, suffix: str) -> bool:
        return f"{module}.{suffix}" in self.index

    def _take_part(self, module: str, suffix: str) -> Tensor:
        return self._take(f"{module}.{suffix}")

    def float_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a floating-point tensor is stored in."""
        stored_name = self._find(name)
        dtypes = {text: dtype for dtype, text in DTYPE_NAMES.items()}
        stored = None if stored_name is None else self.index[stored_name].dtype
        return dtypes.get(stored or "", torch.float32)

    def stored_name(self, name: str) -> str | None:
        """Return the checkpoint's name of a tensor of the model; None if it is not stored."""
        return self._find(name)

    def stored(self, name: str) -> Tensor:
        """Return a stored tensor in the index, as it is."""
        return self._take(name)

    def unused(self) -> tuple[str, ...]:
        return tuple(sorted(self.index.keys() - self._used))

    def numel(self, name: str) -> int:
        """Return the number of elements of a tensor in the index."""
        return math.prod(self.index[name].shape)

    def digest(self, name: str) -> bytes:
        """Return the SHA-256 of a stored tensor in the index."""
        return bytes.fromhex(tensor_digest(self._read(name, None)))

    def identity(self) -> str:
        """Return a text that is equal in two processes only if their weights are equal."""
        return secrets.token_hex(16)  # memory belongs to a single process

    def release(self) -> None:  # noqa: B027  # most have nothing open
        """Close the files, which are reopened on demand."""

    @abstractmethod
    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        """Read a stored tensor in the index, or ranges of it."""

    def _place(self, name: str) -> str:
        return self.where

    def _take(self, name: str, ranges: Ranges | None = None) -> Tensor:
        self._used.add(name)
        tensor = self._read(name, ranges)
        self.read_bytes += tensor.nbytes
        return tensor

    def _find(self, name: str) -> str | None:
        return next((other for other in self._names(name) if other in self.index), None)

    def _names(self, name: str) -> Iterator[str]:
        prefix = f"{self.base_prefix}." if self.base_prefix else ""
        names = [name]
        if prefix:
            names.append(name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)
        yield from names
        for word, other in _OTHER_NAMES:
            yield from (name.replace(word, other) for name in names if word in name)

    def _expert_parts(self, name: str, shape: Shape) -> list[list[str]] | None:
        match = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)", name)
        if match is None or len(shape) not in (3, _OF_GATE_AND_UP):
            return None
        for parts in _EXPERT_PARTS[match[2]]:
            names = [
                [self._find(f"{match[1]}.{expert}.{part}.weight") for part in parts]
                for expert in range(shape[0])
            ]
            of_experts = [[part for part in expert if part is not None] for expert in names]
            if all(len(expert) == len(parts) for expert in of_experts):
                return of_experts
        return None

    def _gate_and_up(self, stored_name: str, shape: Shape, ranges: Ranges | None) -> Tensor:
        """Read experts' concatenated gate and up as [experts, 2, f, in]."""
        if ranges is None:
            return self._take(stored_name).view(shape)
        experts, kinds, (start, stop), columns = ranges
        firsts = [kind * shape[2] for kind in range(*kinds)]
        of_kinds = [(experts, (first + start, first + stop), columns) for first in firsts]
        return torch.stack([self._take(stored_name, of_kind) for of_kind in of_kinds], 1)

    def _fuse(
        self,
        name: str,
        parts: list[list[str]],
        shape: Shape,
        dtype: torch.dtype,
        ranges: Ranges | None,
    ) -> Tensor:
        ranges = tuple((0, size) for size in shape) if ranges is None else ranges
        experts, *kinds, rows, columns = ranges
        fused = torch.empty([stop - start for start, stop in ranges], dtype=dtype)
        for expert, names in zip(fused, parts[slice(*experts)], strict=True):
            chosen = names[slice(*kinds[0])] if kinds else names
            of_parts = expert if kinds else expert.chunk(len(names))
            for into, part in zip(of_parts, chosen, strict=True):
                self._check(name, part, (shape[-2] // (1 if kinds else len(names)), shape[-1]))
                into.copy_(self._take(part, (rows, columns) if kinds or len(names) == 1 else None))
        return fused

    def _check(self, name: str, stored_name: str, shape: Shape) -> None:
        info = self.index[stored_name]
        if info.shape != tuple(shape):
            raise WeightsError(
                f"{stored_name} is {list(info.shape)} in {self._place(stored_name)}; the model "
                f"wants {list(shape)}{'' if stored_name == name else f' for {name}'}"
                + self._suspects(info.shape, tuple(shape))
            )
        if info.dtype not in self.dtypes:
            raise WeightsError(
                f"{stored_name} is {info.dtype} in {self._place(stored_name)}, and the model reads "
                f"{', '.join(self.dtypes)} there; a quantized checkpoint names its format "
                "in quantization_config of config.json, and a base over ranks or replicas that "
                "shards float weights takes none"
            )

    def _suspects(self, stored: Shape, wanted: Shape) -> str:
        """Name the configuration fields that may explain different sizes."""
        sizes = wanted
        if len(stored) == len(wanted):
            sizes = tuple(w for s, w in zip(stored, wanted, strict=True) if s != w)
        ints = ((key, value) for key, value in self.config.items() if type(value) is int)
        fields = [f"{key}={value}" for key, value in ints if value in sizes]
        asked = f" ({', '.join(fields)})" if fields else ""
        return f"; config.json{asked} is not that of these weights"

    def _missing(self, name: str) -> str:
        close = difflib.get_close_matches(name, self.index, n=3)
        tried = ", ".join(list(self._names(name))[1:])
        return (
            f"{name} is not among the {len(self.index)} tensors of {self.where}"
            + (f", nor {tried}" if tried else "")
            + (f"; the closest are {', '.join(close)}" if close else "")
            + "; config.json and the weights are not of one model, or a file of it is missing"
        )


class Checkpoint(Weights):
    """The safetensors files of a model."""

    def __init__(
        self,
        index: Mapping[str, TensorInfo],
        files: Mapping[str, Path],
        base_prefix: str,
        source: ModelSource,
    ) -> None:
        super().__init__(index, base_prefix, source.config, source.name)
        self._files = files
        self._handles: dict[Path, Any] = {}

    @classmethod
    def open(cls, source: ModelSource, base_prefix: str = "") -> Checkpoint:
        """Read the headers. WeightsError: a damaged file, or a tensor in two files."""
        if not source.weight_files:
            raise WeightsError(f"{source.name} has no weights; give a directory with safetensors")
        index: dict[str, TensorInfo] = {}
        files: dict[str, Path] = {}
        for file in source.weight_files:
            for name, info in read_header(file, WeightsError).items():
                if name in files:
                    raise WeightsError(f"{name} is both in {files[name]} and in {file}; keep one")
                index[name], files[name] = info, file
        return cls(index, files, base_prefix, source)

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        file = self._files[name]
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt")
            handle = self._handles[file]
            tensor: Tensor = (
                handle.get_tensor(name)
                if ranges is None
                else handle.get_slice(name)[slices_of(ranges)]
            )
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read at {name}: {error}") from error
        return tensor

    def identity(self) -> str:
        return identity_of(self._files.values())

    def release(self) -> None:
        # A file stays mapped while a tensor is a view of it.
        self._handles.clear()

    def _place(self, name: str) -> str:
        return str(self._files[name])


class RandomWeights:
    """Random weights for measurements, as vLLM's `dummy` load format, by seed and name.

    Matrices are normal with the configuration's `initializer_range`, as in transformers before
    training; vectors are ones, and biases zeros. All ranks and all runs have equal weights.
    """

    def __init__(self, std: float = 0.02, seed: int = 0) -> None:
        self._std = std
        self._seed = seed

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Generate a tensor, or a part of it; see `Weights.load`."""
        if len(shape) < 2:
            whole = torch.zeros(*shape) if name.endswith("bias") else torch.ones(*shape)
        else:
            generator = torch.Generator().manual_seed(crc32(f"{self._seed} {name}".encode()))
            whole = torch.randn(*shape, generator=generator) * self._std
        part = whole if ranges is None else whole[slices_of(ranges)]
        return part.to(device, dtype).contiguous() if out is None else out.copy_(part)

    def shared(self, name: str, *place: object) -> None:
        """Return None: no tensor exists before it is loaded; see `Weights.shared`."""

    def remote(self, name: str, *place: object) -> None:
        """Return None: all tensors are local; see `Weights.remote`."""

    def quantized(
        self, name: str, shape: Sequence[int], format_: Format, transposed: bool = False
    ) -> Parts:
        """Make a matrix and quantize it; see `Weights.quantized`."""
        format_.check(shape, name)
        return format_.quantize(self.load(name, shape, torch.float32))

    def identity(self) -> str:
        """Return the seed and the deviation."""
        return f"seed {self._seed}, deviation {self._std}"

    def release(self) -> None:
        """Do nothing: no file is open; see `Weights.release`."""


def identity_of(files: Iterable[Path]) -> str:
    """Return a text that is equal in two processes only if they read the same files."""
    facts = [_machine()]
    for file in sorted(set(files)):
        status = file.stat()
        facts.append(f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}")
    return ", ".join(facts)


def _machine() -> str:
    """Return a unique text of this machine since boot, equal in its containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _is_gate_and_up(shape: Shape) -> bool:
    """Return whether a parameter is experts' gate and up projections, [experts, 2, f, h]."""
    return len(shape) == _OF_GATE_AND_UP and shape[1] == len(("gate", "up"))


def _stored(shape: Shape) -> Shape:
    if _is_gate_and_up(shape):
        return shape[0], shape[1] * shape[2], shape[3]
    return shape


def slices_of(ranges: Ranges) -> tuple[slice, ...]:
    """Return the indices of a part of a tensor."""
    return tuple(slice(*bounds) for bounds in ranges)


class StateDictCheckpoint(Weights):
    """The weights of a module in memory, shared if dtype, device and layout are equal.

    To join the weights of a product, they are copied once, and the module's parameters then use
    parts of the copy as their memory; values, names and identities stay.

    Args:
        state_dict: the module's own parameters and buffers, not detached copies.
    Raises:
        WeightsError: a tensor has no data.
    """

    def __init__(
        self,
        state_dict: Mapping[str, Tensor],
        base_prefix: str = "",
        config: Mapping[str, Any] | None = None,
        where: str = "the given module",
    ) -> None:
        for name, tensor in state_dict.items():
            if tensor.is_meta:
                raise WeightsError(f"{name} of {where} is on the meta device; load its weights")
        index = {
            name: TensorInfo(DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in state_dict.items()
        }
        super().__init__(index, base_prefix, config or {}, where)
        self._tensors = state_dict

    def load(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
        ranges: Ranges | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a tensor, or a part of it; see `Weights.load`."""
        tensor = super().load(name, shape, dtype, transposed, device, ranges, out)
        stored_name = self._find(name)
        if out is not None and stored_name is not None and not transposed:
            tensor_of_module = self._tensors[stored_name]
            is_like = (
                _is_like(tensor_of_module, out.shape, out.dtype, out.device)
                and not out.is_inference()
            )
            if is_like and _owns_memory(tensor_of_module) and not self._has_alias(tensor_of_module):
                _hand_over(tensor_of_module, out)
        return tensor

    def shared(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        transposed: bool = False,
        device: torch.device | str = "cpu",
    ) -> Tensor | None:
        """Return a tensor of the module if its layout is as requested; see `Weights.shared`."""
        stored_name = self._find(name)
        tensor = None if stored_name is None else self._tensors[stored_name]
        if tensor is None or transposed or not _is_like(tensor, shape, dtype, device):
            return None
        part: Tensor | None = _PARTS.get(tensor)
        if part is not None and part.data_ptr() == tensor.data_ptr():
            return part
        return self.load(name, shape, dtype, device=device)

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        whole = self._tensors[name].detach()
        return whole if ranges is None else whole[slices_of(ranges)]

    def _has_alias(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        others = (other for other in self._tensors.values() if other is not tensor)
        return any(other.data_ptr() == address for other in others)


_PARTS = WeakTensorKeyDictionary()
"""The part of a joined tensor that is the memory of a module's parameter."""


def _hand_over(tensor: Tensor, part: Tensor) -> None:
    """Make a part of a joined tensor with equal values the memory of a module's tensor."""
    start = part.storage_offset() * part.element_size()
    # A storage of the tensor's own size: serializers mishandle shared storages.
    memory = part.untyped_storage()[start : start + part.nbytes]
    tensor.data = part.new_empty(0).set_(memory, 0, part.shape, part.stride())
    _PARTS[tensor] = part


def _is_like(
    tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> bool:
    return (
        tensor.shape == tuple(shape)
        and tensor.dtype is dtype
        and tensor.device == torch.empty(0, device=device).device
        and tensor.is_contiguous()
    )


def _owns_memory(tensor: Tensor) -> bool:
    """Return True if a tensor is plain, and its memory is shared with no tensor or process."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_inference()
        and (tensor.is_cuda or not tensor.is_shared())  # always True on GPUs
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
