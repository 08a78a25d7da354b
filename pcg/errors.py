"""The tree of pcg's errors. Catch `PcgError` for all errors, or a branch for a part of pcg.

A message has the fault, the numbers, and the fix:
`tp=3 does not divide num_key_value_heads=8; use 1, 2, 4 or 8`.

PcgError
├── UnsupportedError           pcg does not support a well-formed request
├── SourceError                the model's files
│   ├── ModelNotFoundError     no such directory, file, shipped config or hub model
│   ├── ConfigError            config.json is missing, damaged or incomplete
│   └── WeightsError           weights cannot be used
│       ├── MissingShardError  the weight index names a missing file
│       └── PickleWeightsError only pickled weights, which can run code
├── TraceError                 the model cannot be converted to a graph
│   └── LogitsError            the compiled program's logits differ from the module's
├── IrError                    the graph is wrong
│   ├── ParseError             text that is not IR
│   ├── VerifyError            IR that breaks a rule
│   └── TypeCheckError         an operator does not accept the types of its inputs
├── PassError                  a pass failed; carries the graph
│   └── BrokenGraphError       a pass returned a graph that breaks a rule; a VerifyError, too
├── ParallelError              an impossible degree, mesh or strategy
│   ├── CostModelError         no cost is known for an operator or a link
│   └── RankLostError          another rank of the group has ended or diverged
├── CodegenError               the graph cannot be emitted, or the emitted file cannot be loaded
├── ProgramError               a compiled folder is missing, damaged or of another version
├── AdapterError               an adapter cannot be read or attached
│   ├── AdapterNotFoundError   no adapter has the name
│   └── AdapterConflictError   the name is in use, has another version, or is being trained
├── DataError                  finetuning data cannot be used
├── GraderError                a grader does not match the schema of its type
│   └── GradingError           a grader cannot score a sample; `kind` is OpenAI's name of the reason
├── GenerationError            a request cannot be served
│   ├── OutOfMemoryError       the memory pool is too small for the request
│   └── QueueFullError         too many requests wait
├── EngineError                the engine's thread was closed, or ended by an error
│   ├── DeviceMemoryError      the device's memory is too small for the engine
│   └── DrainingError          the engine finishes its work and takes nothing new
├── ServeError                 the server cannot start: its address, keys or options
├── StoreError                 the server's data folder cannot be read or written
│   ├── StoreFullError         there is no room on the disk
│   └── StoreDamagedError      stored data is damaged or missing
├── SplitError                 a base executor and its client cannot work together
│   ├── BaseLostError          the base executor ended and did not return in time
│   └── BaseBusyError          a key has too much waiting at a base executor
├── MemoryBudgetError          the budget is below the minimum of the backward pass
├── RecordError                the record of a run cannot be written or read
├── BenchmarkError             a workload, a trace file or an event log cannot be used
└── FinetuneError              a finetuning job cannot continue
    └── FinetuneInterrupted    a job was interrupted, as by Ctrl-C; the text says how to resume
"""

from pathlib import Path


class PcgError(Exception):
    """Root of all errors that pcg raises on purpose."""


def as_pcg_error(error: Exception, subject: str, kind: type[PcgError]) -> PcgError:
    """Return a PcgError unchanged, or wrap another error in an error of `kind`."""
    if isinstance(error, PcgError):
        return error
    failed = kind(f"{subject} failed by {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class UnsupportedError(PcgError):
    """pcg does not support a well-formed request."""


class SourceError(PcgError):
    """The model's files cannot be used."""


class ModelNotFoundError(SourceError):
    """No directory, file, shipped config or hub model has the name."""


class ConfigError(SourceError):
    """A config.json is missing, damaged or incomplete."""


class WeightsError(SourceError):
    """The model's weights cannot be used."""


class MissingShardError(WeightsError):
    """The weight index names a missing file."""


class PickleWeightsError(WeightsError):
    """The model has only pickled weights; loading a pickle can run any code."""


class TraceError(PcgError):
    """The model cannot be converted to a graph."""


class LogitsError(TraceError):
    """The compiled program's logits differ from the module's."""


class IrError(PcgError):
    """The graph is wrong."""


class ParseError(IrError):
    """The text is not IR."""


class VerifyError(IrError):
    """The graph breaks a rule of the IR."""


class TypeCheckError(IrError):
    """An operator does not accept the types of its inputs."""


class PassError(PcgError):
    """A pass failed; `graph` is the graph as text, or empty."""

    def __init__(self, message: str, graph: str = "") -> None:
        super().__init__(message)
        self.graph = graph


class BrokenGraphError(PassError, VerifyError):
    """A pass returned a graph that breaks a rule of the IR; `graph` is its input."""


class ParallelError(PcgError):
    """An impossible parallel degree, mesh or strategy."""


class CostModelError(ParallelError):
    """No cost is known for an operator or a link."""


class RankLostError(ParallelError):
    """Another rank of the group has ended or diverged."""


class CodegenError(PcgError):
    """The graph cannot be emitted, or the emitted source cannot be loaded."""


class ProgramError(PcgError):
    """A compiled folder is missing, damaged, or of another version."""


class AdapterError(PcgError):
    """An adapter cannot be read or attached."""


class AdapterNotFoundError(AdapterError):
    """No adapter has the name."""


class AdapterConflictError(AdapterError):
    """The name is in use, has another version than expected, or a job trains the adapter."""


class DataError(PcgError):
    """Finetuning data cannot be used."""


class GraderError(PcgError):
    """A grader does not match the schema of its type."""


class GradingError(GraderError):
    """A grader cannot score a sample.

    Args:
        kind: OpenAI's name of the reason, such as `sample_parse_error`.
    """

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class GenerationError(PcgError):
    """A request cannot be served."""


class OutOfMemoryError(GenerationError):
    """The memory pool is too small for the request."""


class QueueFullError(GenerationError):
    """Too many requests wait, of a tenant or of all; a later attempt may succeed."""


class EngineError(PcgError):
    """The engine's thread was closed, or ended by an error, with unfinished work."""


class DeviceMemoryError(EngineError):
    """The device's memory is too small for the engine; the message has the parts and the fix."""


class DrainingError(EngineError):
    """The engine finishes its work and takes nothing new."""


class ServeError(PcgError):
    """The server cannot start: its address, its keys or its options."""


class StoreError(PcgError):
    """The data folder of a server cannot be read or written."""


class StoreFullError(StoreError):
    """There is no room on the disk; stored data stays."""


class StoreDamagedError(StoreError):
    """Stored data is damaged or missing."""


class SplitError(PcgError):
    """A base executor and its client cannot work together: another model, version or key."""


class BaseLostError(SplitError):
    """The base executor ended and did not return in time."""


class BaseBusyError(SplitError):
    """A key has too much waiting at a base executor; a later attempt may succeed."""


class MemoryBudgetError(PcgError):
    """A memory budget is below the minimum of the backward pass."""


class RecordError(PcgError):
    """The record of a run cannot be written or read."""


class BenchmarkError(PcgError):
    """A workload, a trace file or an event log cannot be used."""


class FinetuneError(PcgError):
    """A finetuning job cannot continue."""


class FinetuneInterrupted(FinetuneError):
    """A finetuning job was interrupted between two steps.

    Args:
        message: the text, with the fix.
        step: the last completed step.
        checkpoint: folder to resume from; None without a checkpoint.
    """

    def __init__(self, message: str, step: int, checkpoint: Path | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.checkpoint = checkpoint
