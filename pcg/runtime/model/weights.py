"""The base model's weights by tensor, from safetensors files or a module.

Opening reads only headers; a tensor is mapped when it is loaded, and copied only if it is cast,
transposed, fused, moved, or joined with others. A checkpoint may use other names than the model:

- without or with the base prefix: `h.0.ln_1.weight` for `transformer.h.0.ln_1.weight`, in old
  checkpoints that were saved without their head;
- other words for parts of the name, which the program's `renamings` replace; a replacement such as
  `q_proj[0:64],k_proj[64:96]` is of a tensor with the rows of several;
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
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pcg.errors import WeightsError
from pcg.formats.format import Format, Parts, StoredMatrix
from pcg.formats.registry import EXPERT_PARTS, FORMATS, stored_format
from pcg.ranks.agreement import tensor_digest
from pcg.ranks.shards import Ranges
from pcg.source import ModelSource
from pcg.tensor_file import TensorInfo, read_header

Shape = tuple[int, ...]
Rows = tuple[int, int] | None

_JOINED = {".conv1d.weight": (".q_conv1d.weight", ".k_conv1d.weight", ".v_conv1d.weight")}
"""Ends of names of tensors that checkpoints may store in parts, a range of rows each."""
_QUANTIZED = (
    ".SCB", ".qweight", ".weight.absmax", ".weight_packed", ".weight_scale", ".weight_scale_inv",
    "_blocks",
)  # fmt: skip
"""Suffixes of a module's tensors that belong to a quantized matrix."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPE_NAMES = dict(zip(_FLOATS, ("F64", "F32", "F16", "BF16"), strict=True))


class Weights(ABC):
    """Named tensors of a base model.

    Attributes:
        dtypes: dtypes in the index that `load` reads.
        decodes: True to dequantize matrices that are stored in a format.
        drawn: the name of a tensor that is drawn, as transformers does, if the checkpoint has none.
        read_bytes: bytes of all tensors and parts of tensors read so far.
    """

    dtypes: Collection[str] = tuple(DTYPE_NAMES.values())
    decodes = False
    drawn: str | None = None

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
        if (stored_part := self._quantized_part(name)) is not None:
            decoded = self._decoded(name, stored_part, shape, dtype, transposed)
            part = decoded[slices_of(ranges)] if ranges else decoded
            return part.to(device) if out is None else out.copy_(part)
        stored_name = self._find(name)
        if stored_name is not None:
            # Biases of experts are [E, out], and [E, out, 1] in graphs.
            stored = self.index[stored_name].shape
            is_bias = len(shape) > len(stored) and shape[-1] == 1
            as_stored = partial(_as_stored, transposed=transposed, is_bias=is_bias)
            if _is_joined(stored, as_stored(shape)):
                self._check(name, stored_name, stored)
                tensor = self._take(stored_name).view(as_stored(shape))
                tensor = tensor[slices_of(as_stored(ranges))] if ranges else tensor
            else:
                self._check(name, stored_name, as_stored(shape))
                tensor = self._take(stored_name, as_stored(ranges) if ranges else None)
            if transposed:
                tensor = tensor.mT
            if is_bias:
                tensor = tensor.unsqueeze(-1)
            if out is None:
                return tensor.to(device=device, dtype=dtype).contiguous()
            return out.copy_(tensor)
        parts = self._expert_parts(name, shape)
        if parts is not None:
            fused = self._fuse(name, parts, shape, dtype, ranges)
        else:
            fused = self._join(name, shape, ranges).to(dtype)
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
        self,
        name: str,
        shape: Sequence[int],
        format_: Format,
        transposed: bool = False,
        experts: range | None = None,
    ) -> tuple[Parts, ...]:
        """Read a matrix as it is stored in a format, or quantize a float matrix.

        Experts have a matrix each, or as many as the checkpoint has for each, in order of rows.

        Args:
            name, shape, transposed: as for `load`.
            experts: the experts to read, of a shape [experts, out, in]; all by default.
        Raises:
            WeightsError: the checkpoint should have the matrix in this format, and has not.
        """
        *count, rows, columns = shape
        if count and experts is None:
            experts = range(*count)
        format_.check(shape, name)
        if not self.config.get("quantization_config"):
            dtype = self.float_dtype(name)
            places: list[Ranges | None] = [None]
            if experts is not None:
                places = [((e, e + 1), (0, rows), (0, columns)) for e in experts]
            weights = (self.load(name, shape, dtype, transposed, ranges=at) for at in places)
            return tuple(format_.quantize(weight.view(rows, columns)) for weight in weights)
        if transposed and experts is None and format_.library != "bitsandbytes":
            raise WeightsError(
                f"{name} belongs to a Conv1D, whose order {self.where} may store as [in, out] in "
                f"{format_.name}; use a checkpoint of bitsandbytes, or float weights with "
                "quantization=FORMAT"
            )
        # bitsandbytes stores the matrix of a Conv1D as [out, in], like that of a Linear.
        for candidate in self._names(name):
            if experts is not None:
                every = self._stored_experts(candidate, (rows, columns), format_, experts)
            else:
                module = candidate.removesuffix(".weight")
                every = [self._stored_matrix(module, rows, columns, format_)]
            known = tuple(parts for parts in every if parts is not None)
            if known and len(known) == len(every):
                return known
        stored_name = self._find(name)
        kind = "is missing" if stored_name is None else f"is in {self.index[stored_name].dtype}"
        raise WeightsError(
            f"{name} of {self.where} should be stored as {format_.name}, as its "
            f"quantization_config says, and {kind} without the tensors of this format; name it "
            "among the skipped modules (ignore, modules_to_not_convert, llm_int8_skip_modules), or "
            "use the files of this checkpoint"
        )

    def _decoded(
        self, name: str, part: str, shape: Shape, dtype: torch.dtype, transposed: bool
    ) -> Tensor:
        """Dequantize a matrix or the experts' matrices, of which `part` is stored."""
        stored = stored_format(self.config)
        if stored is None or not self.decodes:
            raise WeightsError(
                f"{name} of {self.where} is stored quantized ({part}), and its "
                "quantization_config skips it, as bitsandbytes' does experts; remove it from the "
                "skipped modules (ignore, modules_to_not_convert, llm_int8_skip_modules), or use "
                "the float checkpoint"
            )
        format_ = FORMATS[stored.name]
        every = self.quantized(name, shape, format_, transposed)
        return torch.cat([format_.whole(parts, dtype) for parts in every]).view(shape)

    def _stored_experts(
        self, name: str, shape: Shape, format_: Format, experts: range
    ) -> list[Parts | None]:
        """Read experts' matrices of a single tensor, or those of modules of their own."""
        rows, columns = shape
        module, _, fused = name.rpartition(".")
        for parts in EXPERT_PARTS.get(fused, ()):
            paths = [f"{module}.{expert}.{part}" for expert in experts for part in parts]
            size = rows // len(parts)
            every = [self._stored_matrix(path, size, columns, format_) for path in paths]
            if any(every):
                return every
        return [self._stored_matrix(name, rows, columns, format_, expert) for expert in experts]

    def _stored_matrix(
        self, module: str, rows: int, columns: int, format_: Format, expert: int | None = None
    ) -> Parts | None:
        """Read a matrix of a module, or an expert's of a parameter; None if it is not stored."""

        def named(suffix: str) -> str:
            return f"{module}.{suffix}" if expert is None else module + suffix[len("weight") :]

        def take(suffix: str) -> Tensor:
            name = named(suffix)
            if expert is None:
                return self._take(name)
            sizes = self.index[name].shape[1:]
            return self._take(name, ((expert, expert + 1), *((0, n) for n in sizes)))[0]

        def has(suffix: str) -> bool:
            return named(suffix) in self.index

        settings = self.config["quantization_config"]
        try:
            parts = format_.read(StoredMatrix(module, rows, columns, has, take, settings))
        except RuntimeError as error:  # torch's, of a view with other sizes
            raise WeightsError(f"{module} of {self.where}, in {format_.name}: {error}") from error
        layout = format_.tensors(rows, columns).items() if parts else ()
        for part, (wanted, _) in layout:
            if parts is not None and parts[part].shape != wanted:
                raise WeightsError(
                    f"{module} of {self.where} has {part} {list(parts[part].shape)}; the model "
                    f"wants {list(wanted)} for [{rows}, {columns}] in {format_.name}; config.json "
                    "is not that of these weights"
                )
        return parts

    def _quantized_part(self, name: str) -> str | None:
        """Return a tensor that is stored of a quantized matrix; None for a float matrix."""
        for candidate in self._names(name) if self.config.get("quantization_config") else ():
            path, _, fused = candidate.removesuffix(".weight").rpartition(".")
            experts = (f"{path}.0.{parts[0]}" for parts in EXPERT_PARTS.get(fused, ()))
            for module in (f"{path}.{fused}", *experts):
                for suffix in _QUANTIZED:
                    if module + suffix in self.index:
                        return module + suffix
        return None

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

    def stored_names(self, name: str, shape: Shape) -> tuple[str, ...]:
        """Return the checkpoint's names of a tensor, or of its parts in the order of experts.

        Raises:
            WeightsError: there is none.
        """
        stored_name, parts = self._find(name), self._expert_parts(name, shape)
        if stored_name is None and parts is None:
            raise WeightsError(self._missing(name))
        every = [part for expert in parts or () for part in expert]
        return tuple(every) if stored_name is None else (stored_name,)

    def quantized_suffixes(self, name: str) -> dict[str, str]:
        """Return what follows a module's path in each name that `quantized` reads, by the name."""
        for candidate in self._names(name):
            start = candidate.removesuffix("weight")
            names = [n for n in self.index if n.startswith(start) and n != f"{start}bias"]
            if names:
                return {each: each.removeprefix(start) for each in names}
        return {}

    def as_stored(
        self, name: str, tensor: Tensor, transposed: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stored tensors, by name in the index, of a tensor as `load` returns it."""
        stored_name = self._find(name)
        if stored_name is not None:
            tensor = tensor.mT if transposed else tensor
            yield stored_name, tensor.reshape(self.index[stored_name].shape)
            return
        experts = self._expert_parts(name, tuple(tensor.shape)) or ()
        for expert, parts in zip(tensor, experts, strict=True):
            yield from zip(parts, expert.chunk(len(parts)), strict=True)

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
        yield name
        if prefix:
            yield name.removeprefix(prefix) if name.startswith(prefix) else prefix + name

    def _expert_parts(self, name: str, shape: Shape) -> list[list[str]] | None:
        match = re.fullmatch(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)", name)
        if match is None or len(shape) != 3:
            return None
        for parts in EXPERT_PARTS[match[2]]:
            names = [
                [self._find(f"{match[1]}.{expert}.{part}.weight") for part in parts]
                for expert in range(shape[0])
            ]
            of_experts = [[part for part in expert if part is not None] for expert in names]
            if all(len(expert) == len(parts) for expert in of_experts):
                return of_experts
        return None

    def _join(self, name: str, shape: Shape, ranges: Ranges | None) -> Tensor:
        """Return a tensor from its parts, ranges of rows in order; one without is `drawn`."""
        end = next((end for end in _JOINED if name.endswith(end)), "")
        names = [self._find(name.removesuffix(end) + part) for part in _JOINED.get(end, ())]
        parts = [self._take(part) for part in names if part is not None]
        if name == self.drawn:
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
            parts = [noise * self.config.get("initializer_range", 0.02)]
        elif not parts or len(parts) < len(names) or any(p.shape[1:] != shape[1:] for p in parts):
            raise WeightsError(self._missing(name))
        joined = torch.cat(parts)
        if joined.shape != shape:
            raise WeightsError(f"the parts of {name} are {list(joined.shape)}, not {list(shape)}")
        return joined if ranges is None else joined[slices_of(ranges)]

    def _fuse(
        self,
        name: str,
        parts: list[list[str]],
        shape: Shape,
        dtype: torch.dtype,
        ranges: Ranges | None,
    ) -> Tensor:
        """Join experts' separate matrices to [experts, out, in], or to a part of it."""
        ranges = tuple((0, size) for size in shape) if ranges is None else ranges
        experts, (first, end), columns = ranges
        fused = torch.empty([stop - start for start, stop in ranges], dtype=dtype)
        size = shape[1] // len(parts[0])
        for expert, names in zip(fused, parts[slice(*experts)], strict=True):
            for place, part in enumerate(names):
                self._check(name, part, (size, shape[2]))
                start, stop = max(first, place * size), min(end, (place + 1) * size)
                if start < stop:
                    rows = (start - place * size, stop - place * size)
                    expert[start - first : stop - first].copy_(self._take(part, (rows, columns)))
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
    """The safetensors files of a model, by the model's names.

    Args:
        stored: each tensor's file, name in it, and rows of that tensor; None for all.
    """

    def __init__(
        self,
        index: Mapping[str, TensorInfo],
        stored: Mapping[str, tuple[Path, str, Rows]],
        base_prefix: str,
        source: ModelSource,
    ) -> None:
        super().__init__(index, base_prefix, source.config, source.name)
        self._stored = stored
        self._handles: dict[Path, Any] = {}

    @classmethod
    def open(
        cls, source: ModelSource, base_prefix: str = "", renamings: Sequence[Sequence[str]] = ()
    ) -> Checkpoint:
        """Read the headers. WeightsError: a damaged file, or a tensor in two files."""
        if not source.weight_files:
            raise WeightsError(f"{source.name} has no weights; give a directory with safetensors")
        index: dict[str, TensorInfo] = {}
        stored: dict[str, tuple[Path, str, Rows]] = {}
        for file in source.weight_files:
            for stored_name, info in read_header(file, WeightsError).items():
                for name, rows in _renamed(stored_name, renamings):
                    if name in stored:
                        other = stored[name][0]
                        raise WeightsError(f"{name} is both in {other} and in {file}; keep one")
                    index[name], stored[name] = info, (file, stored_name, rows)
                    if rows is not None:
                        size = min(rows[1], info.shape[0]) - rows[0]
                        index[name] = TensorInfo(info.dtype, (size, *info.shape[1:]))
        return cls(index, stored, base_prefix, source)

    def _read(self, name: str, ranges: Ranges | None) -> Tensor:
        file, stored_name, rows = self._stored[name]
        if rows is not None:
            (start, stop), *others = ranges or [(0, size) for size in self.index[name].shape]
            ranges = ((rows[0] + start, rows[0] + stop), *others)
        try:
            if file not in self._handles:
                self._handles[file] = safe_open(file, framework="pt")
            handle = self._handles[file]
            tensor: Tensor = (
                handle.get_tensor(stored_name)
                if ranges is None
                else handle.get_slice(stored_name)[slices_of(ranges)]
            )
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{file} cannot be read at {stored_name}: {error}") from error
        return tensor

    @property
    def places(self) -> Mapping[str, tuple[Path, str, Rows]]:
        """The file of each tensor in the index, its name there, and its rows of that tensor."""
        return self._stored

    def identity(self) -> str:
        return identity_of(file for file, *_ in self._stored.values())

    def release(self) -> None:
        # A file stays mapped while a tensor is a view of it.
        self._handles.clear()

    def _place(self, name: str) -> str:
        return str(self._stored[name][0])


_SPLIT = re.compile(r"(.*?)(\w+\[\d+:\d+\](?:,\w+\[\d+:\d+\])+)(.*)")


def _renamed(name: str, renamings: Sequence[Sequence[str]]) -> Iterator[tuple[str, Rows]]:
    """Yield the model's names of a checkpoint's tensor, and the rows of each."""
    for pattern, replacement in renamings:
        name = re.sub(pattern, replacement, name, count=1)
    split = _SPLIT.fullmatch(name)
    if split is None:
        yield name, None
        return
    before, parts, behind = split.groups()
    for part in parts.split(","):
        module, first, end = re.split(r"[\[:]", part.removesuffix("]"))
        yield before + module + behind, (int(first), int(end))


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


def _is_joined(stored: Shape, shape: Shape) -> bool:
    """Return whether experts [E, n, m] are stored with their rows as one dim, [E n, …]: DBRX's."""
    if len(shape) != 3 or len(stored) < 2 or stored == shape:
        return False
    return stored[0] == shape[0] * shape[1] and math.prod(stored[1:]) == shape[2]


_Sizes = TypeVar("_Sizes", Shape, Ranges)


def _as_stored(sizes: _Sizes, *, transposed: bool, is_bias: bool) -> _Sizes:
    """Return sizes or ranges of a tensor's dims as the checkpoint has them."""
    if transposed:
        return (*sizes[:-2], sizes[-1], sizes[-2])
    return sizes[:-1] if is_bias else sizes


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
