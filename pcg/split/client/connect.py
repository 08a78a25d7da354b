"""Connecting to a base executor: an executor with products that run there.

Which pieces of its layers the base runs is searched for by the time that the link takes. A client
can load a saved program instead of compiling it, in less memory.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from pcg.compiler import compile_program, make_executor
from pcg.errors import CostModelError, SplitError
from pcg.ir.program.folder import load_program, save_program
from pcg.ir.program.program import Program
from pcg.kernels.triton.backend import machine_device
from pcg.keys import VARIABLE
from pcg.keywords import takes
from pcg.options import SplitLink, dtype_name
from pcg.parallel.costs.catalog import own_sheet
from pcg.parallel.costs.own_rates import OwnRates, own_rates, rated_model
from pcg.passes.place import CallPieces, LayerCut
from pcg.passes.placement.split_problem import SplitCosts
from pcg.peft.adapter_files import is_recipe
from pcg.runtime.executor import Executor
from pcg.runtime.model.base_weights import WeightStore, weight_digests
from pcg.runtime.model.gguf_weights import open_weights
from pcg.source import ModelSource, resolve
from pcg.split.client.base_weights import CalledBase
from pcg.split.client.caller import Caller, LayeredCaller
from pcg.split.client.noise import (
    BASE,
    DOWNLOAD,
    Effects,
    EffectsAtBase,
    EffectsHere,
    Noise,
    Place,
    Privacy,
    privacy_of,
)
from pcg.split.curve import ClientCurve, is_loopback
from pcg.split.messages import (
    DTYPES,
    TOKENIZER_FILES,
    BaseFacts,
    config_difference,
    weights_difference,
)
from pcg.split.transport import Transport
from pcg.split.zeromq import address_of, transport_to

SERVED_TOKENS, TRAINED_TOKENS = 1, 1024
"""Tokens of the steps that cuts are searched for: a step that decodes, and one that trains. In the
first a round trip counts most, so that its cut has the fewest; of these it moves the least."""
_PROBES = 5
_PROBE_BYTES = 2**20


@dataclass
class CutReport:
    """The cut that a client runs.

    Attributes:
        link: the link to the base, as given or measured.
        reason: why each product is a call; empty if the cut was searched.
        layers: the cuts of the compiled programs, the latest last.
    """

    link: SplitLink | None
    reason: str = ""
    layers: list[LayerCut] = field(default_factory=list)

    def __str__(self) -> str:
        if self.link is None:
            return f"linear cut: {self.reason}"
        lines = [
            f"searched cut, link {self.link.name}: {self.link.latency_s * 1e3:.3g} ms a round "
            f"trip, {self.link.bytes_per_s * 8 / 1e9:.3g} Gbit/s"
        ]
        for layer in self.layers:
            step = "training" if layer.trains else "serving"
            if layer.cut is None:
                lines.append(f"  {step} {layer.name}: linear cut, as {layer.reason}")
                continue
            costs = layer.cut.costs
            lines.append(
                f"  {step} {layer.name}: {costs.round_trips} round trips a layer, "
                f"each product a call {layer.cut.fixed.round_trips}"
            )
        return "\n".join(lines)


def measured_link(caller: Caller) -> SplitLink:
    """Measure the link to a base: the fastest of a few round trips, small and large."""
    latency_s = min(_echo_s(caller, 1) for _ in range(_PROBES))
    long_s = min(_echo_s(caller, _PROBE_BYTES) for _ in range(2))
    bytes_per_s = 2 * _PROBE_BYTES / max(long_s - latency_s, 1e-6)
    return SplitLink("measured", latency_s, bytes_per_s)


def _echo_s(caller: Caller, size_bytes: int) -> float:
    tensor = torch.zeros(max(size_bytes // 4, 1), dtype=torch.float32)
    began_s = time.perf_counter()
    caller.call("echo", (tensor,))
    return time.perf_counter() - began_s


def searched_cut(
    link: SplitLink,
    base_sheet: str,
    client: torch.device,
    rates: tuple[OwnRates | None, OwnRates | None] = (None, None),
) -> tuple[CallPieces, CutReport]:
    """Return the pass that searches a client's cut, and the report that it writes.

    Args:
        base_sheet: the name of the data sheet of the base's device.
        client: the device of the client.
        rates: those that were measured of the base and the client.
    """
    try:
        client_sheet = own_sheet(client)
    except CostModelError:
        client_sheet = "H100"  # a GPU without a sheet
    models = rated_model(base_sheet, rates[0]), rated_model(client_sheet, rates[1])
    serving = SplitCosts(*models, link, SERVED_TOKENS, TRAINED_TOKENS)
    training = SplitCosts(*models, link, TRAINED_TOKENS, TRAINED_TOKENS)
    report = CutReport(link)
    return CallPieces(serving, training, report.layers.append), report


# ------------------------------------------------------------------------------------ saved program


def load_for(folder: str | os.PathLike[str], facts: BaseFacts, *, linear_only: bool) -> Program:
    """Load a program that runs by a base.

    Args:
        facts: the base's.
        linear_only: each product has to be a call: the client's noise hides nothing else, or the
            base runs nothing else.
    Raises:
        ProgramError: the folder is missing, damaged or edited.
        SplitError: the program is of another model or dtype, or has other pieces than the base
            runs.
    """
    program = load_program(folder)
    again = f"save one by a client of this base: pcg compile split://… -o {folder}"
    difference = config_difference(program.config, facts.config)
    if difference:
        raise SplitError(
            f"the program in {folder} is of another model than the base's {facts.name} "
            f"({difference}); {again}"
        )
    if program.options.dtype != facts.dtype:
        raise SplitError(
            f"the program in {folder} runs in {program.options.dtype}, and the base "
            f"{facts.name} in {facts.dtype}; {again}"
        )
    if program.options.backend != "torch" or program.options.tp != 1:
        raise SplitError(
            f"the program in {folder} is for {program.options.backend} on {program.options.tp} "
            f"rank(s), and a client runs PyTorch on one; {again}"
        )
    if linear_only and has_pieces(program):
        raise SplitError(
            f"the program in {folder} calls the base for parts of layers, and here each product "
            f"has to be a call; connect with cut='linear' and save its program"
        )
    return program


def has_pieces(program: Program) -> bool:
    """Return whether a program calls a base for more than products."""
    graphs = [*program.serving.model.graphs]
    for plan in program.training.plans if program.training is not None else ():
        graphs += [plan.forward, *([] if plan.backward is None else [plan.backward])]
    return any(node.op == "base_piece" for graph in graphs for node in graph.nodes)


def check_given(peft: object, model: object, memory_budget: object, default: object) -> None:
    """Raise a SplitError for an argument that a program fixes, by its name."""
    if model is not None:
        raise SplitError("model=… and program=… are both given; a program has its model")
    if peft is not None and (not isinstance(peft, Mapping) or is_recipe(peft)):
        raise SplitError(
            "program=… has its recipes; give peft={name: recipe or folder} to add adapters"
        )
    if memory_budget != default:
        raise SplitError("program=… has its memory budget; leave memory_budget out")


# ------------------------------------------------------------------------------------------ connect


@dataclass(frozen=True)
class ConnectArguments:
    """Arguments of `connect`.

    Attributes:
        where: the base executor's address, as host:port, or a transport to it; several of either,
            texts also with commas, where bases hold some layers each.
        model: a directory, a hub id or a config that the base must be of; its tokenizer is used;
            by default the base's.
        peft: None, a word such as "lora", a recipe, a configuration of peft's, or {name: one of
            these, or the directory of an adapter}; named adapters are added to the executor.
        api_key: a key of the base; by default that of the environment, PCG_API_KEY.
        transport: tcp, shared-memory (on the base's machine), or auto, the second where the base
            is at a loopback address.
        dtype: the dtype that the base must have: float32, bfloat16, float16 or float64.
        device: the device of adapters, attention and KV cache; the GPU of a machine that has one,
            else the CPU.
        memory_budget: the memory that finetuning may save for backward, as in `CompileOptions`.
        program: the folder of a program that `SplitExecutor.save_program` has written, to run
            instead of compiling it: it starts sooner, and takes 100 MiB less.
        privacy: hide all that is sent by noise: who computes its effects, as a word or an address,
            or `Privacy`; None sends it as it is.
        cut: which parts of a layer the base runs: searched takes the pieces that take the least
            time over this link, and linear each product by itself. Noise hides linear operators
            alone, so that `privacy` is always linear.
        link: the link that the cut is searched for: shared, lan, wan, or a round trip's
            milliseconds and a bandwidth in Gbit/s, as 5,2.5, with devices as fast as their data
            sheets say. By default the link is measured, and so are CPUs.
        curve_server: the base's CURVE key, or a file with it, to encrypt the connection.
        curve_key: this client's CURVE certificate, NAME.key_secret, for a base that admits certain
            clients; by default a new pair of keys.
        plaintext: let keys and tensors go unencrypted to another machine.
        connect_s: how long to wait for the base at first, s.
        lost_s: how long to look for a base that is gone, or says nothing, before a call of it
            fails, s; a busy base is waited for.
    """

    where: Place
    model: Any = None
    peft: object = None
    api_key: str | None = field(default=None, kw_only=True)
    transport: Literal["auto", "tcp", "shared-memory"] = field(default="auto", kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    device: str | torch.device | None = field(default=None, kw_only=True)
    memory_budget: float | str = field(default=1.0, kw_only=True)
    program: str | Path | None = field(default=None, kw_only=True)
    privacy: str | Privacy | None = field(default=None, kw_only=True)
    cut: Literal["searched", "linear"] = field(default="searched", kw_only=True)
    link: str | None = field(default=None, kw_only=True)
    curve_server: str | Path | None = field(default=None, kw_only=True)
    curve_key: str | Path | None = field(default=None, kw_only=True)
    plaintext: bool = field(default=False, kw_only=True)
    connect_s: float = field(default=20.0, kw_only=True)
    lost_s: float = field(default=30.0, kw_only=True)


class SplitExecutor(Executor):
    """An executor with a base at a base executor.

    It serves and finetunes as any executor does: adapters, attention, KV cache, gradients and
    optimizer are in this process. As a context manager it closes its connection.

    Attributes:
        caller: the connection, with counts of its traffic.
        noise: hides the sent rows; None without `privacy`.
        cut: the base's part; as text, with the round trips of a layer.
    """

    caller: Caller
    cut: CutReport
    noise: Noise | None

    def __enter__(self) -> SplitExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save_program(self, folder: str | Path) -> None:
        """Write the program that this client runs, which other clients of the base may load.

        It has the adapters' recipes of `connect`, and neither weights nor adapters.

        Raises:
            ProgramError: it cannot be written.
        """
        save_program(self.program, folder)

    def close(self) -> None:
        """Say goodbye to the base; nothing runs after that."""
        self.caller.close()
        if self.noise is not None:
            self.noise.close()


@takes(ConnectArguments, SplitError)
def connect(arguments: ConnectArguments) -> SplitExecutor:
    """Connect to a base executor: an executor that generates and finetunes by its weights.

    Raises:
        SplitError: the base is of another model, dtype or version, or refuses the key.
        BaseLostError: no base answers there.
        PcgError: names the part that cannot be read, traced or attached.
    """
    privacy = privacy_of(arguments.privacy)
    if arguments.cut not in ("searched", "linear"):
        raise SplitError(f"cut={arguments.cut!r}; use searched or linear")
    if arguments.link is not None:
        SplitLink.parse(arguments.link)  # refuses one that is none before anything is opened
    if arguments.program is not None:
        check_given(
            arguments.peft, arguments.model, arguments.memory_budget, ConnectArguments.memory_budget
        )
    model = None if arguments.model is None else resolve(arguments.model)
    hello = {
        "key": arguments.api_key or os.environ.get(VARIABLE),
        "config": None if model is None else model.config,
        "dtype": dtype_name(arguments.dtype),
        "client": f"process {os.getpid()}",
    }
    caller = _caller(arguments.where, arguments.curve_server, arguments, hello)
    noise = None
    try:
        if privacy is not None:
            noise = Noise(privacy, _effects(privacy, caller, arguments, hello))
        return _split_executor(caller, arguments, model, noise)
    except BaseException:
        caller.close()
        if noise is not None:
            noise.close()
        raise


def _caller(
    where: Place, server: str | Path | None, arguments: ConnectArguments, hello: Mapping[str, Any]
) -> Caller:
    """Connect to a base, or to several that together hold all layers."""
    where = where.split(",") if isinstance(where, str) else where
    places = [where] if isinstance(where, Transport) else where
    callers: list[Caller] = []
    try:
        for place in places:
            transport = (
                place
                if isinstance(place, Transport)
                else _transport(place.strip(), arguments, server)
            )
            times = {"connect_s": arguments.connect_s, "lost_s": arguments.lost_s}
            callers.append(Caller(transport, hello, **times))
        caller = callers[0] if len(callers) == 1 else LayeredCaller(callers)
        absent = caller.facts.absent
        if absent:
            raise SplitError(
                f"no base executor at {caller.where} holds {absent[0]}, and {len(absent) - 1} "
                "others; name all that hold layers, as host:port,host:port"
            )
        return caller
    except BaseException:
        for caller in callers:
            caller.close()
        raise


def _transport(where: str, arguments: ConnectArguments, server: str | Path | None) -> Transport:
    """Return a transport. SplitError: it would send keys and tensors in clear."""
    curve = None
    if server is not None:
        certificate = None if arguments.curve_key is None else Path(arguments.curve_key)
        curve = ClientCurve.read(server, certificate)
    elif arguments.curve_key is not None:
        raise SplitError(
            f"curve_key is for encrypted connections; give the CURVE key of {where}, too"
        )
    host, _ = address_of(where)
    if not (is_loopback(host) or curve is not None or arguments.plaintext):
        raise SplitError(
            f"{where} is another machine, and keys and tensors would be sent to it in clear; give "
            "its CURVE key by curve_server=…, or plaintext=True to let them"
        )
    return transport_to(where, arguments.transport, curve)


def _effects(
    privacy: Privacy, caller: Caller, arguments: ConnectArguments, hello: Mapping[str, Any]
) -> Effects:
    """Return the computation of noise's effects. SplitError: it does not fit the base."""
    at = privacy.effects
    if at == BASE:
        return EffectsAtBase(caller, is_own=False)
    if at == DOWNLOAD:
        if not caller.facts.rows:
            raise SplitError(
                "privacy: this base does not let its weights be downloaded; start it with "
                "--downloads, or use a second base for effects"
            )
        return EffectsHere(caller)
    asked = {**hello, "digest": caller.facts.digest}
    asked["key"] = privacy.effects_api_key or hello["key"]
    second = _caller(at, privacy.effects_curve_server, arguments, asked)
    if not set(_instances(second)).isdisjoint(_instances(caller)):
        where = second.where
        second.close()
        raise SplitError(
            f"privacy: the base at {where} is the one that noise is to hide from; name another "
            "process, of somebody who does not tell this one what it sees"
        )
    return EffectsAtBase(second, is_own=True)


def _instances(caller: Caller) -> list[str]:
    callers = caller.callers if isinstance(caller, LayeredCaller) else [caller]
    return [connection.facts.instance for connection in callers]


def _split_executor(
    caller: Caller, arguments: ConnectArguments, model: ModelSource | None, noise: Noise | None
) -> SplitExecutor:
    facts = caller.facts
    place, cut = _cut(caller, arguments)
    if arguments.program is not None:
        program = load_for(arguments.program, facts, linear_only=place is None)
    else:
        program = compile_program(
            dict(facts.config),
            arguments.peft,
            backend="torch",
            dtype=facts.dtype,
            memory_budget=arguments.memory_budget,
            place=place,
        )
    if model is not None and model.weight_files:
        _check_weights(program, model, facts)
    weights = CalledBase(caller, program.base_prefix, noise)
    with tempfile.TemporaryDirectory() as folder:
        source = model or ModelSource(facts.name, dict(facts.config), location=facts.name)
        if source.directory is None:
            source = replace(source, directory=_write_files(facts.files, Path(folder)))
        executor = make_executor(
            program, weights, arguments.peft, source, arguments.device, place=place
        )
    executor.__class__ = SplitExecutor
    assert isinstance(executor, SplitExecutor)
    executor.caller = caller
    executor.cut = cut
    executor.noise = noise
    return executor


def _cut(caller: Caller, arguments: ConnectArguments) -> tuple[CallPieces | None, CutReport]:
    """Return the pass that cuts the layers, None if each product is a call, and its report."""
    if arguments.privacy is not None:
        return None, CutReport(None, "noise hides linear operators alone")
    if arguments.cut == "linear":
        return None, CutReport(None, "it was asked for")
    if not caller.facts.graphs:
        return None, CutReport(None, "several ranks or bases hold the weights")
    device, sheet = machine_device(arguments.device), str(caller.facts.device)
    if arguments.link is not None:
        return searched_cut(SplitLink.parse(arguments.link), sheet, device)
    known = caller.facts.rates
    rates = (
        None if known is None else OwnRates(known.product_flops_per_s, known.memory_bytes_per_s),
        own_rates(device, DTYPES[caller.facts.dtype]),
    )
    return searched_cut(measured_link(caller), sheet, device, rates)


def _check_weights(program: Program, model: ModelSource, facts: BaseFacts) -> None:
    """Compare the client's files with the base's weights. SplitError: they differ."""
    checkpoint = open_weights(model, program)
    store = WeightStore(program, checkpoint, torch.device("cpu"))
    difference = weights_difference(weight_digests(store), facts.digests)
    checkpoint.release()
    if difference:
        raise SplitError(
            f"the weights of {model.name} are not those of the base {facts.name}: they differ "
            f"in {difference}; connect with the base's files, or with no model to take what it has"
        )


def _write_files(files: object, folder: Path) -> Path:
    if isinstance(files, Mapping):
        for name in TOKENIZER_FILES:
            if isinstance(files.get(name), str):
                (folder / name).write_text(files[name], encoding="utf-8")
    return folder
