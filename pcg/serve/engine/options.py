"""The options of a server and of `pcg serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pcg.errors import ServeError

if TYPE_CHECKING:
    from pcg.runtime.engine.options import EngineArguments

_MOST = 1e6
"""Upper bound of every option in GiB, MiB, days, seconds or milliseconds."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Options of a server; options that vLLM also has have vLLM's names.

    Attributes:
        host: the address to listen at. 127.0.0.1 accepts connections from this machine only;
            0.0.0.0 and :: listen at all addresses.
        port: the port to listen at; 0 takes a free port.
        split_port: a second port, for split execution (docs/split.md): processes with their own
            adapters use these weights, with the same keys.
        split_curve_key: a CURVE certificate, NAME.key_secret, which encrypts the second port.
        split_curve_clients: a folder with the certificates, *.key, of the clients that may connect
            to the second port.
        split_plaintext: allow unencrypted connections from other machines to the second port.
        api_key: a key with all scopes. Repeatable. Without `api_key` and `api_keys`, the server
            generates a key and prints it.
        api_keys: a JSON file of keys with scopes and tenants (docs/serving.md).
        ssl_certfile: a certificate in PEM format, to serve https.
        ssl_keyfile: the private key of the certificate.
        served_model_name: a name of the base in requests; by default the model's name. Repeatable;
            replies use the first name.
        lora_modules: an adapter for all tenants, as NAME=PATH or as JSON. Repeatable.
        lora_roots: a folder with a subfolder per adapter. An adapter is loaded when a request names
            it; loads over HTTP use these folders, too. Repeatable.
        max_lora_rank: the greatest rank of an adapter; adapters of greater rank are refused.
        max_cpu_loras: the maximum number of adapters in host memory.
        data_dir: a folder for files, jobs, models and other data that outlive the server; created
            if missing. Without it, requests that store data are refused.
        max_model_len: the maximum number of tokens of a prompt and its output; by default the
            model's positions.
        max_num_seqs: the maximum number of running sequences.
        max_num_batched_tokens: the maximum number of tokens of a step.
        prompt_stretch: without `tpot_slo_ms`, the longest step with prompts as a multiple of a step
            that only decodes; it bounds the gaps of other streams. inf for no bound.
        max_logprobs: the maximum number of top log-probabilities per token that a request may get.
        logprobs_mode: the distribution of the logprobs of outputs: the model's (raw), or the
            distribution that tokens are drawn from, after temperature, penalties, masks and filters
            (processed).
        generation_config: source of the default sampling parameters: `auto`, the model's
            generation_config.json; `vllm`, none; or a folder with such a file.
        gpu_memory_utilization: the share of a GPU's memory for this server, above 0 and up to 1;
            the KV cache and the adapters get the memory that the other parts do not need.
        kv_cache_gib: memory of the KV cache and its adapters, GiB, in place of the rest of
            `gpu_memory_utilization`; 4 by default without a GPU.
        enable_prefix_caching: share the KV blocks of common prefixes of a tenant's prompts.
        adapter_self_test: refuse an adapter with weights that have no effect on the logits.
        warm_up: on a GPU, record steps as CUDA graphs and compile their kernels before the first
            request.
        warm_jobs: an expected finetuning job; `warm_up` records its windows. JSON with the `batch`
            and `seq` of its steps and, as `peft`, the fields of its adapter_config.json; by default
            the recipe of a job without a recipe. Repeatable.
        policy: the order in which waiting requests are admitted (docs/engine.md): fair-share, fcfs,
            adapter-clustering, early-abort, or MODULE:CLASS of another policy.
        ttft_slo_ms: SLO of the time to the first token, ms.
        tpot_slo_ms: SLO of each gap between two output tokens, ms.
        finetuning_floor: the minimum share of the time for jobs while requests without
            `tpot_slo_ms` run, from 0 to below 1; jobs also use all idle time.
        serving_share: the minimum share of the time for requests with `tpot_slo_ms` while jobs run,
            from 0 to below 1.
        tenant_seqs: the maximum number of running sequences of a tenant; by default half of
            `max_num_seqs` if keys belong to several tenants, else all.
        tenant_queue: the maximum number of waiting requests of a tenant. By default a quarter of
            `max_queue` if keys belong to several tenants, else all; further requests are refused.
        max_queue: the maximum number of waiting requests of all tenants.
        key_requests: the maximum number of concurrent HTTP requests of a key.
        metrics_without_key: serve /metrics without a key; it shows the names of all tenants and
            adapters.
        chat_template: a file with a chat template that replaces the model's.
        tool_call_parser: the format of the model's tool calls; by default the format that its chat
            template shows.
        trust_request_chat_template: accept chat templates in requests. A template is a program in a
            sandbox that limits neither its time nor its memory.
        access_log: the target of a JSON line per request: `stderr`, a file, or `none`. Lines
            contain no texts of requests.
        otlp_traces_endpoint: the address of an OpenTelemetry collector for traces over HTTP, such
            as http://127.0.0.1:4318/v1/traces; by default no traces are sent.
        max_body_mib: the maximum size of a request body, MiB. docs/serving.md has further limits.
        stream_timeout_s: time after which the server ends a stream that is not read, s.
        restart: if a rank of a multi-rank model ends, restart all ranks and resume the jobs from
            their checkpoints; running requests fail.
        shutdown_timeout_s: time for running requests to end after SIGTERM, s.
        max_file_mib: the maximum size of a stored file, MiB.
        tenant_files: the maximum number of stored files of a tenant, including unfinished uploads.
        tenant_files_gib: the maximum total size of the files of a tenant, GiB.
        max_jobs: the maximum number of running finetuning jobs; further jobs are queued, and
            tenants take turns.
        keep_jobs_days: time after which ended jobs and uploads are deleted, with their events; the
            trained models stay.
        python_graders: run python graders of tenants, in a sandbox (docs/serving.md).
        tinker_session_s: time without a message after which a Tinker session ends, s.
        keep_tinker_days: time after which an ended Tinker session is deleted, with its models and
            requests; checkpoints and their models stay.
        tinker_tokenizer: the tokenizer that Tinker clients load, a model of the Hub or a folder of
            the client; by default the name of the model.
        tenant_trainers: the maximum number of models that a tenant trains concurrently over Tinker.
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
    adapter_self_test: bool = True
    warm_up: bool = True
    warm_jobs: Sequence[str] = ()
    policy: str = "fair-share"
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
                "split_curve_key, split_curve_clients and split_plaintext configure a second port; "
                "give split_port, too"
            )
        if self.split_port and self.split_port == self.port:
            raise ServeError(f"port and split_port are both {self.port}; use two")
        self._check_numbers()
        if self.tenant_seqs is not None and self.policy != "fair-share":
            raise ServeError(
                f"tenant_seqs={self.tenant_seqs} needs policy='fair-share'; "
                f"policy='{self.policy}' does not limit tenants; leave out tenant_seqs or policy"
            )
        if self.policy != "fair-share":
            from pcg.runtime.admission.policies import policy_named

            policy_named(self.policy)
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
        """Return the maximum number of waiting requests of a tenant, by the number of tenants."""
        return self.tenant_queue or (self.max_queue if tenants == 1 else -(-self.max_queue // 4))

    def engine(self, tenants: int) -> EngineArguments:
        """Return the engine's arguments for a number of tenants.

        The engine's modules are imported in this function, so that `--help` prints quickly.
        """
        from pcg.runtime.admission.backlog import QueueLimits
        from pcg.runtime.admission.fair_share import FairShare
        from pcg.runtime.admission.limits import Limits
        from pcg.runtime.admission.policies import policy_named
        from pcg.runtime.engine.options import EngineArguments
        from pcg.serve.engine.warm_jobs import parse_warm_jobs

        policy = policy_named(self.policy)
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
            adapter_self_test=self.adapter_self_test,
            warm_up=self.warm_up,
            warm_jobs=parse_warm_jobs(self.warm_jobs),
        )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
