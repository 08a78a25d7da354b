"""Every error of pcg, as one tree. Catch `PcgError` for all, a branch for one part.

A message says what is wrong, the numbers, and the fix:
`tp=3 does not divide num_key_value_heads=8; use 1, 2, 4 or 8`.

PcgError
├── UnsupportedError           what was asked is well-formed, and pcg does not do it
├── SourceError                the model's files
│   ├── ModelNotFoundError     no such directory, file, shipped config or hub model
│   ├── ConfigError            config.json is missing, damaged or incomplete
│   └── WeightsError           weights cannot be used
│       ├── MissingShardError  the index names a file that is not there
│       └── PickleWeightsError only pickled weights, which can run code
├── TraceError                 the model cannot be turned into a graph
│   └── LogitsError            a compiled module's logits are not its own
├── IrError                    the graph
│   ├── ParseError             text that is not IR
│   ├── VerifyError            IR that breaks a rule
│   └── TypeCheckError         an operator applied to types it does not take
├── PassError                  a pass failed; carries the graph it failed on
│   └── BrokenGraphError       a pass made a graph that breaks a rule; a VerifyError, too
├── ParallelError              a degree, mesh or strategy that cannot be
│   ├── CostModelError         no cost is known for an operator or a link
│   └── RankLostError          another rank of the group is gone
├── CodegenError               the graph cannot be emitted, or the emitted file not be loaded
├── ProgramError               a compiled folder is missing, damaged or of another version
├── AdapterError               an adapter cannot be read or attached
│   ├── AdapterNotFoundError   there is none of that name
│   └── AdapterConflictError   another one of the name, another version or a job is in the way
├── DataError                  finetuning data
├── GraderError                a grader is not as its type has it
│   └── GradingError           a grader cannot score a sample; `kind` is OpenAI's name of the reason
├── GenerationError            a request that cannot be served
│   ├── OutOfMemoryError       the memory pool is too small for it
│   └── QueueFullError         too much waits already
├── EngineError                the engine's thread was closed, or ended by an error
│   ├── DeviceMemoryError      the device's memory does not hold what an engine needs
│   └── DrainingError          the engine ends its work, and takes nothing new
├── ServeError                 the server cannot start: its address, keys or options
├── StoreError                 what a server keeps cannot be read or written
│   ├── StoreFullError         there is no room for it on the disk
│   └── StoreDamagedError      it is not what was kept
├── SplitError                 a base executor and its client cannot work together
│   ├── BaseLostError          the base executor is gone, and did not come back in time
│   └── BaseBusyError          a key has as much waiting at a base executor as it may
├── MemoryBudgetError          less than what backward needs at least
├── RecordError                the record of a run cannot be written or read
├── BenchmarkError             a workload, a trace file or an event log that cannot be used
└── FinetuneError              a finetuning job that cannot go on
    └── FinetuneInterrupted    Ctrl-C; says how to resume
"""

from pathlib import Path


class PcgError(Exception):
    """Root of all errors that pcg raises on purpose."""


def as_pcg_error(error: Exception, subject: str, kind: type[PcgError]) -> PcgError:
    """Return a PcgError, or wrap another error in one of `kind` as its cause."""
    if isinstance(error, PcgError):
        return error
    failed = kind(f"{subject} failed by {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class UnsupportedError(PcgError):
    """The request is well-formed, but pcg does not do it."""


class SourceError(PcgError):
    """The model's files cannot be used."""


class ModelNotFoundError(SourceError):
    """No directory, file, shipped config or hub model of that name."""


class ConfigError(SourceError):
    """A config.json is missing, damaged or incomplete."""


class WeightsError(SourceError):
    """The model's weights cannot be used."""


class MissingShardError(WeightsError):
    """The weight index names a file that is not there."""


class PickleWeightsError(WeightsError):
    """The weights come as pickles only; loading a pickle can run any code."""


class TraceError(PcgError):
    """The model cannot be turned into a graph."""


class LogitsError(TraceError):
    """A compiled module's logits are not the module's own."""


class IrError(PcgError):
    """The graph is wrong."""


class ParseError(IrError):
    """The text is not IR."""


class VerifyError(IrError):
    """The graph breaks a rule of the IR."""


class TypeCheckError(IrError):
    """An operator is applied to types it does not take."""


class PassError(PcgError):
    """A pass failed on a graph, which it carries as text; empty when there is none."""

    def __init__(self, message: str, graph: str = "") -> None:
        super().__init__(message)
        self.graph = graph


class BrokenGraphError(PassError, VerifyError):
    """A pass made a graph that breaks a rule of the IR; it carries the graph before the pass."""


class ParallelError(PcgError):
    """A parallel degree, mesh or strategy that cannot be."""


class CostModelError(ParallelError):
    """No cost is known for an operator or a link."""


class RankLostError(ParallelError):
    """Another rank of the group is gone, or does something else."""


class CodegenError(PcgError):
    """The graph cannot be emitted, or the emitted source not be loaded."""


class ProgramError(PcgError):
    """A compiled folder is missing, damaged, or of another version."""


class AdapterError(PcgError):
    """An adapter cannot be read or attached."""


class AdapterNotFoundError(AdapterError):
    """There is no adapter of that name."""


class AdapterConflictError(AdapterError):
    """There is another adapter of the name, another version of it, or a job that trains it."""


class DataError(PcgError):
    """Finetuning data cannot be used."""


class GraderError(PcgError):
    """A grader is not as its type has it."""


class GradingError(GraderError):
    """A grader cannot score a sample.

    Args:
        kind: OpenAI's name of the reason, as `sample_parse_error`.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class GenerationError(PcgError):
    """A request cannot be served."""


class OutOfMemoryError(GenerationError):
    """The memory pool is too small for the request."""


class QueueFullError(GenerationError):
    """Too much waits already, for one tenant or for all; the request may be taken later."""


class EngineError(PcgError):
    """The engine's thread was closed, or ended by an error, with work left."""


class DeviceMemoryError(EngineError):
    """The device's memory does not hold what an engine needs; says the parts, and the fix."""


class DrainingError(EngineError):
    """The engine ends what it has, and takes nothing new."""


class ServeError(PcgError):
    """The server cannot start: its address, its keys or its options."""


class StoreError(PcgError):
    """The data folder of a server cannot be read or written."""


class StoreFullError(StoreError):
    """There is no room on the disk; what was there stays."""


class StoreDamagedError(StoreError):
    """A content on the disk is not what was kept, or is gone."""


class SplitError(PcgError):
    """A base executor and its client cannot work together: another model, version or key."""


class BaseLostError(SplitError):
    """The base executor is gone, and did not come back in time."""


class BaseBusyError(SplitError):
    """A key has as much waiting at a base executor as it may; the call can be made again."""


class MemoryBudgetError(PcgError):
    """A memory budget is less than what backward needs at least."""


class RecordError(PcgError):
    """The record of a run cannot be written or read."""


class BenchmarkError(PcgError):
    """A workload, a trace file or an event log cannot be used."""


class FinetuneError(PcgError):
    """A finetuning job cannot go on."""


class FinetuneInterrupted(FinetuneError):
    """A finetuning job was interrupted between two steps.

    Args:
        message: the text, with the fix.
        step: the last step that was done.
        checkpoint: directory to resume from; None where none was written.
    """

    def __init__(self, message: str, step: int, checkpoint: Path | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.checkpoint = checkpoint
