"""The options of a server; `pcg serve` is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pcg.errors import ServeError
from pcg.options import PolicyName

if TYPE_CHECKING:
    from pcg.runtime.engine.options import EngineArguments

_MOST = 1e6
"""Above every memory in GiB and every time in seconds that is meant."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server; those that vLLM has, have its names.

    Attributes:
        host: the address to listen at. Only this machine reaches 127.0.0.1; 0.0.0.0 and :: are all
            addresses.
        port: the port to listen at; 0 takes a free one.
        split_port: a second port, for split execution (docs/split.md): processes that have adapters
            of their own multiply by these weights, with the same keys.
        split_curve_key: a CURVE certificate, NAME.key_secret, which encrypts the second port.
        split_curve_clients: a folder of the certificates, *.key, of clients that may connect to it.
        split_plaintext: let connections of other machines to it go unencrypted.
        api_key: a key that clients may use for everything. Repeatable. Without any, and without
            `api_keys`, one is made and printed.
        api_keys: a JSON file of keys with scopes and tenants (docs/serving.md).
        ssl_certfile: a certificate in PEM format, to serve https.
        ssl_keyfile: its private key.
        served_model_name: a name of the base in requests; by default the model's. Repeatable, and
            replies have the first.
        lora_modules: an adapter that everyone may use, as NAME=PATH or as JSON. Repeatable.
        lora_roots: a folder of adapters, each in a folder of its own. One is loaded when somebody
            names it, and those loaded over HTTP come from there. Repeatable.
        max_lora_rank: the greatest rank of an adapter; one of a greater rank is refused.
        max_cpu_loras: the most adapters in the host's memory at once.
        data_dir: a folder for what is kept beyond the server's end, as files; it is made if need
            be. Without one, what needs it is refused.
        max_model_len: the most tokens of a prompt and its output; the model's positions by default.
        max_num_seqs: the most sequences at once.
        max_num_batched_tokens: the most tokens of a step.
        prompt_stretch: how many times as long as a step that only decodes prompts may make it where
            no `tpot_slo_ms` is promised: a stream's gap beside somebody's long prompt; inf for no
            bound.
        max_logprobs: the most likeliest tokens that a request may ask for in each place.
        logprobs_mode: the distribution that logprobs of outputs are of: the model's own, or the one
            that the token was drawn from, behind temperature, penalties, masks and filters.
        generation_config: where the defaults of sampling come from: `auto`, the model's
            generation_config.json; `vllm`, none; or a folder with such a file.
        gpu_memory_utilization: the share of a GPU's memory for this server, from above 0 to 1; the
            KV cache and the adapters in it get what else it needs leaves of it.
        kv_cache_gib: memory of the KV cache and the adapters in it, GiB, in place of what
            `gpu_memory_utilization` leaves; 4 by default where there is no GPU.
        enable_prefix_caching: share the KV blocks of a tenant's prompts that begin alike.
        warm_up: on a GPU, record steps as CUDA graphs and compile their kernels before the first
            request.
        warm_jobs: a finetuning job that may come, whose windows `warm_up` records: JSON with the
            `batch` and `seq` of its steps and with `peft`, its adapter_config.json's fields; by
            default those of a job that gives none. Repeatable.
        policy: the order in which waiting requests are admitted (docs/engine.md).
        ttft_slo_ms: SLO of the time to the first token, ms.
        tpot_slo_ms: SLO of each gap between two output tokens, ms.
        finetuning_floor: the least share of the time for jobs beside requests without
            `tpot_slo_ms`, from 0 to below 1; they have all the time that requests leave.
        serving_share: the least share of the time for requests with `tpot_slo_ms` while jobs run
            beside them, from 0 to below 1.
        tenant_seqs: the most sequences of one tenant at once; by default half of `max_num_seqs`
            where keys are of several tenants, else all.
        tenant_queue: the most requests of one tenant that wait; further ones are refused. By
            default a quarter of `max_queue` where keys are of several tenants, else all.
        max_queue: the most requests of all tenants that wait.
        key_requests: the most requests that a key may have in the server at once.
        metrics_without_key: let everyone who reaches the server read /metrics, which has names of
            all tenants and adapters.
        chat_template: a file with a chat template in place of the model's.
        tool_call_parser: the format of the model's tool calls; by default the one that its chat
            template shows.
        trust_request_chat_template: take chat templates from requests. A template is a program, in
            a sandbox that bounds neither its time nor its memory.
        access_log: where a JSON line of every request goes: `stderr`, a file, or `none`. It has no
            texts of requests.
        otlp_traces_endpoint: an OpenTelemetry collector's address for traces by HTTP, as
            http://127.0.0.1:4318/v1/traces; none are made by default.
        max_body_mib: the most bytes of a request, MiB. The elements of a body are bounded, too
            (docs/serving.md).
        stream_timeout_s: time after which a stream that its client does not read is ended, s.
        restart: where several ranks serve a model and one of them ends, start all again and go on
            with jobs by their checkpoints; requests that run then fail.
        shutdown_timeout_s: time that running requests have to end after SIGTERM, s.
        max_file_mib: the most bytes of a file that is kept, MiB.
        tenant_files: the most files that a tenant keeps, with its uploads that are under way.
        tenant_files_gib: the most bytes of them, GiB.
        max_jobs: the most finetuning jobs that run at once; others are queued, and those of tenants
            take turns.
        keep_jobs_days: time after which jobs and uploads that are over are forgotten, with their
            events; the models that they made stay.
        python_graders: run python graders of tenants, in a sandbox (docs/serving.md).
        tinker_session_s: time after which a session of Tinker's protocol ends whose client says
            nothing, s.
        keep_tinker_days: time after which a session of it that has ended is forgotten, with its
            models and requests; checkpoints stay, and the models that they are of.
        tinker_tokenizer: what those clients load their tokenizer by, a model of the Hub or a folder
            of theirs; by default the name of the model.
        tenant_trainers: the most models of one tenant that are trained by that protocol at once.
    Raises:
        ServeError: a value is out of range.
    """

    title: ClassVar[str] = "Server"

    host: str = "127.0.0.1"
    port: int = 8000
    split_port: int | None = None
    split_curve_key: Path | None = None
    split_curve_clients: Path | None = None
    split_plaintext: bool = False
    api_key: Sequence[str] = ()
    api_keys: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    served_model_name: Sequence[str] = ()
    lora_modules: Sequence[str] = ()
    lora_roots: Sequence[str] = ()
    max_lora_rank: int = 256
    max_cpu_loras: int = 256
    data_dir: Path | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    prompt_stretch: float = 10.0
    max_logprobs: int = 20
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    generation_config: str = "auto"
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    enable_prefix_caching: bool = True
    warm_up: bool = True
    warm_jobs: Sequence[str] = ()
    policy: PolicyName = "fair-share"
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    finetuning_floor: float = 0.1
    serving_share: float = 0.0
    tenant_seqs: int | None = None
    tenant_queue: int | None = None
    max_queue: int = 4096
    key_requests: int = 2048
    metrics_without_key: bool = False
    chat_template: Path | None = None
    tool_call_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    trust_request_chat_template: bool = False
    access_log: str = "stderr"
    otlp_traces_endpoint: str | None = None
    max_body_mib: float = 4.0
    stream_timeout_s: float = 60.0
    restart: bool = True
    shutdown_timeout_s: float = 30.0
    max_file_mib: float = 512.0
    tenant_files: int = 1000
    tenant_files_gib: float = 16.0
    max_jobs: int = 4
    keep_jobs_days: float = 90.0
    python_graders: bool = False
    tinker_session_s: float = 600.0
    keep_tinker_days: float = 90.0
    tinker_tokenizer: str | None = None
    tenant_trainers: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ServeError(f"port={self.port}; use 0 to 65535")
        if self.split_port is not None and not 0 <= self.split_port < 2**16:
            raise ServeError(f"split_port={self.split_port}; use 0 to 65535")
        if self.split_port is None and (
            self.split_curve_key or self.split_curve_clients or self.split_plaintext
        ):
            raise ServeError(
                "split_curve_key, split_curve_clients and split_plaintext are of a second port; "
                "give split_port, too"
            )
        if self.split_port and self.split_port == self.port:
            raise ServeError(f"port and split_port are both {self.port}; use two")
        self._check_numbers()
        if self.tenant_seqs is not None and self.policy != "fair-share":
            raise ServeError(
                f"tenant_seqs={self.tenant_seqs} is a bound of policy='fair-share', which bounds "
                f"tenants; policy='{self.policy}' does not; leave one of them out"
            )
        if self.warm_jobs and not self.warm_up:
            raise ServeError("warm_jobs are recorded by warm_up; leave them out, or record")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ServeError("ssl_keyfile needs its certificate; give ssl_certfile, too")

    def _check_numbers(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "tenant_seqs",
            "tenant_queue",
            "max_queue",
            "max_lora_rank",
            "max_cpu_loras",
            "key_requests",
            "tenant_files",
            "max_jobs",
            "tenant_trainers",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ServeError(f"{name}={value}; use at least 1")
        for name in (
            "kv_cache_gib",
            "max_body_mib",
            "stream_timeout_s",
            "shutdown_timeout_s",
            "ttft_slo_ms",
            "tpot_slo_ms",
            "max_file_mib",
            "tenant_files_gib",
            "keep_jobs_days",
            "tinker_session_s",
            "keep_tinker_days",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < _MOST:
                raise ServeError(f"{name}={value}; use a number above 0")
        if not self.prompt_stretch > 1:
            raise ServeError(f"prompt_stretch={self.prompt_stretch}; use a number above 1, or inf")
        for name in ("finetuning_floor", "serving_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ServeError(f"{name}={getattr(self, name)}; use a share from 0 to below 1")
        if self.max_logprobs < 0:
            raise ServeError(f"max_logprobs={self.max_logprobs}; use at least 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            share = self.gpu_memory_utilization
            raise ServeError(f"gpu_memory_utilization={share}; use a share above 0, up to 1")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)

    @property
    def max_file_bytes(self) -> int:
        return int(self.max_file_mib * 2**20)

    @property
    def tenant_files_bytes(self) -> int:
        return int(self.tenant_files_gib * 2**30)

    @property
    def kv_cache_bytes(self) -> int | None:
        return None if self.kv_cache_gib is None else int(self.kv_cache_gib * 2**30)

    def queue_of(self, tenants: int) -> int:
        """The most requests of one tenant that wait, where there are so many tenants."""
        return self.tenant_queue or (self.max_queue if tenants == 1 else -(-self.max_queue // 4))

    def engine(self, tenants: int) -> EngineArguments:
        """The engine's arguments for so many tenants.

        The engine is imported here, so that help is there at once.
        """
        from pcg.runtime.admission.backlog import QueueLimits
        from pcg.runtime.admission.fair_share import FairShare
        from pcg.runtime.admission.limits import Limits
        from pcg.runtime.admission.policies import POLICIES
        from pcg.runtime.engine.options import EngineArguments
        from pcg.serve.engine.warm_jobs import parse_warm_jobs

        policy = POLICIES[self.policy]
        if self.policy == "fair-share":
            running = self.tenant_seqs or (None if tenants == 1 else -(-self.max_num_seqs // 2))
            policy = partial(FairShare, tenant_running=running)
        return EngineArguments(
            Limits(
                running=self.max_num_seqs,
                tokens=self.max_num_batched_tokens,
                prompt_stretch=self.prompt_stretch,
                logprobs=self.max_logprobs,
                lora_rank=self.max_lora_rank,
                ttft_slo_s=_seconds(self.ttft_slo_ms),
                tpot_slo_s=_seconds(self.tpot_slo_ms),
                finetuning_floor=self.finetuning_floor,
                serving_share=self.serving_share,
            ),
            policy=policy(),
            queue=QueueLimits(requests=self.max_queue, tenant_requests=self.queue_of(tenants)),
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            prefix_caching=self.enable_prefix_caching,
            warm_up=self.warm_up,
            warm_jobs=parse_warm_jobs(self.warm_jobs),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
