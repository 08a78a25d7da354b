"""The header of a safetensors file: which tensors it holds, and whether it is whole.

A file is a header length (u64, little-endian), the header in JSON (tensor name -> dtype, shape,
data_offsets), and the data. So a truncated file is known before a byte of data is mapped, and
reading the index costs no data. Source: github.com/huggingface/safetensors, README, "Format".
"""

import os
from dataclasses import dataclass
from pathlib import Path

from pcg.errors import PcgError
from pcg.files import check_no_lfs_pointer, json_value, shown_path

HEADER_LIMIT_BYTES = 100_000_000  # MAX_HEADER_SIZE in safetensors/src/tensor.rs


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header's entry of a tensor; the dtype as safetensors writes it, such as BF16."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path, error_type: type[PcgError]) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, in the header's order.

    Raises:
        error_type: the file cannot be read, is no safetensors file, or is not whole.
    """
    try:
        with path.open("rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= HEADER_LIMIT_BYTES:
                check_no_lfs_pointer(path, error_type)
                raise error_type(
                    f"{path} is not a safetensors file, or damaged: {size_bytes} bytes, starting "
                    f"with {start.hex() or 'nothing'}; copy or download it again"
                )
            if 8 + length > size_bytes:
                raise error_type(
                    f"{path} is damaged: its header alone is {8 + length} bytes, the file "
                    f"{size_bytes}; copy or download it again"
                )
            content = stream.read(length)
    except OSError as error:
        raise error_type(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise error_type(f"{shown_path(path)} cannot be read: it is no name of a file") from error
    header = json_value(content, f"{path}'s header", error_type, "; copy or download it again")
    try:
        header.pop("__metadata__", None)
        tensors = {
            name: TensorInfo(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
        }
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise error_type(f"{path} is damaged: its header is not that of tensors") from error
    expected_bytes = 8 + length + end
    if expected_bytes != size_bytes:
        what = "truncated" if size_bytes < expected_bytes else "damaged"
        raise error_type(
            f"{path} is {what}: its header describes {expected_bytes} bytes, the file has "
            f"{size_bytes}; copy or download it again"
        )
    return tensors
