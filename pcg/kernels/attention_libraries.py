"""Libraries of kernels that programs for Triton may call, and the models that they know.

    flashinfer    prompts: tokens of sequences whose keys and values lie in pages
    flash_attn    training on whole sequences, forward and backward
    flash_attn_3  the same, by kernels for Hopper
    fla           recurrences of several tokens: prompts and training
    causal_conv1d short convolutions of several tokens: prompts and training

Decoding, windows of finetuning, chunks, sinks, ALiBi, soft caps and recorded steps are for pcg's
kernels (`kernels/triton/attention`). No library is imported in this module.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pcg.errors import UnsupportedError
from pcg.ir.graph import Graph, Node
from pcg.ir.types import TensorType
from pcg.kernels.sizes import LEAST_CAPABILITY

OWN = "own"
"""The word for none of them."""


@dataclass(frozen=True)
class AttentionLibrary:
    """A library of attention kernels.

    Attributes:
        use: "prompts" or "training" of attention, "recurrences" or "convolutions".
        sizes: its head sizes, which hold for both keys and values; of recurrences, for keys; of
            convolutions, the widths.
        source: how to install it.
        module: the module that Python imports; the library's name by default.
        capability: the GPUs that it is for; None for all from `LEAST_CAPABILITY` on.
    """

    name: str
    use: str
    sizes: tuple[int, ...]
    source: str
    module: str = ""
    capability: tuple[int, int] | None = None

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module or self.name) is not None

    def is_for(self, device: torch.device) -> bool:
        """Return whether the library runs on a device; without a GPU, it may be compiled for."""
        if self.capability is None or device.type != "cuda":
            return True
        return torch.cuda.get_device_capability(device) == self.capability

    def knows(self, graph: Graph, node: Node) -> bool:
        if node.op in RECURRENCES:
            return self.use == "recurrences" and self._knows_recurrence(graph, node)
        if node.op in CONVOLUTIONS:
            return self.use == "convolutions" and self._knows_convolution(graph, node)
        if node.op not in ATTENTIONS or self.use in ("recurrences", "convolutions"):
            return False
        q, k, v = attention_types(graph, node)
        attributes = dict(node.attributes)
        others = ("softcap", "alibi", "sinks", "chunk")
        return (
            q.dtype in ("bf16", "f16")
            and k.dtype == v.dtype == q.dtype
            and q.features[-1] == v.features[-1]
            and q.features[-1] in self.sizes
            and not any(attributes.get(name) for name in others)
        )

    def _knows_recurrence(self, graph: Graph, node: Node) -> bool:
        """Return whether the model is in bfloat16, as models compute its recurrences in fp32.

        A decay of each channel is that of Kimi's delta rule, which has beta.
        """
        first = 0 if node.op == "recurrence" else 1
        q, _, _, decay, *beta = (graph.types[name] for name in node.inputs[first:])
        dtypes = {p.type.dtype for p in graph.parameters if p.role == "frozen"}
        has_function = bool(beta) or len(decay.dims) == 2
        return "bf16" in dtypes and q.features[-1] in self.sizes and has_function

    def _knows_convolution(self, graph: Graph, node: Node) -> bool:
        """Return whether the kernel for rows of channels takes the types.

        Source: csrc/causal_conv1d.cpp of causal-conv1d 1.7, its checks.
        """
        x, weight, *bias = (graph.types[name] for name in node.inputs)
        channels, width = map(int, weight.shape)
        has_dtypes = {x.dtype, weight.dtype} <= {"bf16", "f16", "f32"}
        has_bias = all(type_.dtype == weight.dtype for type_ in bias)
        return has_dtypes and has_bias and channels % 8 == 0 and width in self.sizes


ATTENTIONS = ("attention", "attention_backward")
RECURRENCES = ("recurrence", "recurrence_backward")
CONVOLUTIONS = ("short_convolution", "short_convolution_backward")


def attention_types(graph: Graph, node: Node) -> list[TensorType]:
    """Return the types of q, k and v of a node of attention or its backward."""
    first = 3 if node.op == "attention_backward" else 0
    return [graph.types[name] for name in node.inputs[first : first + 3]]


LIBRARIES = (
    AttentionLibrary("flashinfer", "prompts", (64, 128, 256), "pip install 'pcg[flashinfer]'"),
    AttentionLibrary(
        "flash_attn_3",
        "training",
        (64, 96, 128),
        "build flash-attention's folder hopper",
        module="flash_attn_interface",
        capability=(9, 0),
    ),
    AttentionLibrary(
        "flash_attn",
        "training",
        (16, 32, 64, 80, 96, 128, 192, 256),
        "pip install 'pcg[flash-attn]'",
    ),
    AttentionLibrary("fla", "recurrences", (32, 64, 128, 256), "pip install 'pcg[fla]'"),
    AttentionLibrary(
        "causal_conv1d", "convolutions", (2, 3, 4), "pip install 'pcg[causal-conv1d]'"
    ),
)
"""All of them; heads are those that both the library and pcg's own kernels know. Of two for one use
the first comes first."""
_COMPILED = "flashinfer_jit_cache"
"""The package with flashinfer's kernels; without it a kernel is compiled when it is first called,
for minutes and in a request's way."""


def libraries_of(asked: str) -> tuple[AttentionLibrary, ...]:
    """Return the libraries of a program's `attention`: "own", or names with commas.

    Raises:
        UnsupportedError: an unknown name.
    """
    by_name = {library.name: library for library in LIBRARIES}
    if asked == OWN:
        return ()
    names = asked.split(",")
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise UnsupportedError(
            f"attention={asked!r}; use auto, {OWN}, or some of {', '.join(by_name)} with commas"
        )
    return tuple(library for library in LIBRARIES if library.name in names)


def choose_libraries(asked: str, backend: str, device: torch.device) -> str:
    """Return the libraries of a program, as `libraries_of` takes them.

    Args:
        asked: "auto" for the installed libraries, or names separated by commas.
        backend: the program's backend; PyTorch has its own attention.
    Raises:
        UnsupportedError: a library is unknown, not installed, or not for the backend or device.
    """
    if asked != "auto":
        check_libraries(asked, device)
        if libraries_of(asked) and backend != "triton":
            raise UnsupportedError(
                f"attention={asked!r} is for backend='triton', and the backend is {backend!r}"
            )
        return asked
    if backend != "triton" or device.type != "cuda":
        return OWN
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return OWN
    names = (library.name for library in LIBRARIES if library.is_for(device) and is_ready(library))
    return ",".join(names) or OWN


def is_ready(library: AttentionLibrary) -> bool:
    """Return whether `auto` takes a library: it is installed with its kernels."""
    has_kernels = library.name != "flashinfer" or importlib.util.find_spec(_COMPILED) is not None
    return library.is_installed and has_kernels


def check_libraries(asked: str, device: torch.device) -> None:
    """Raise an UnsupportedError if a library is not installed or not for the device."""
    for library in libraries_of(asked):
        if not library.is_installed:
            raise UnsupportedError(
                f"attention={asked!r} needs the package {library.module or library.name}, which is "
                f"not installed: {library.source}, or compile with attention='{OWN}'"
            )
        if not library.is_for(device):
            capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
            raise UnsupportedError(
                f"attention={asked!r}: {library.name} is for GPUs of capability 9.0, and {device} "
                f"is one of {capability}; leave it out"
            )


def choice_text(asked: str, graphs: Iterable[Graph]) -> str:
    """Describe the libraries that a program calls, and for how many nodes."""
    if asked == OWN:
        return f"{OWN} kernels"
    named = [dict(node.attributes).get("library") for graph in graphs for node in graph.nodes]
    choices = [
        f"{library.name} for {library.use} ({named.count(library.name)} nodes)"
        for library in libraries_of(asked)
        if library.name in named
    ]
    if not choices:
        return f"{OWN} kernels: {asked} know none of the heads, dtypes or scores"
    return f"{', '.join(choices)}; else {OWN} kernels"
