"""Kernels against fp64, rooflines and peers, in the sizes of Llama-3.1-8B.

SGMV, the products of many adapters in one batch, against a torch loop and gather-bmm; paged
attention against SDPA; linear cross-entropy against whole logits and autograd; adapters' products
in training, products by 4-bit weights, sampling and ReLU's signs against PyTorch; and the kernels
that the emitter writes for groups of nodes against torch.compile of the same group. Imports are in
the settings: one whose kernel is not there is a failed row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice
from math import prod
from types import SimpleNamespace
from typing import Any

from gpu_bench import (
    Bench,
    Case,
    Row,
    Setting,
    Work,
    attention_work,
    check_close,
    loss_work,
    ranks_work,
)
from gpu_model import config

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128_256
HEADS, KV_HEADS, HEAD = 32, 8, 128
RANK = 16
BF16 = 2
"""Bytes of an element."""
PAGE_ELEMENTS = 2**20
"""Elements of a page of Llama-3.1-8B's arena in bf16: 16 tokens' keys and values."""
HIGH_RANKS = (8, 16, 64, 256)
"""Ranks of the adapters of a batch, in turn."""
BATCHES = (64, 1, 32, 8, 16, 4, 2)
LAYERS = 32
"""Sites that are run one after the other, so that none finds its adapters in the L2 cache."""
LOSSES = (2048, 8192)
"""Tokens."""
PRODUCTS = (32, 1, 2048)
"""Tokens of products by quantized weights."""
SIGNS = (8192, 16384)
"""Tokens, and OPT-6.7B's features."""
ATTENTION = ((32, 1, 4096), (1, 4096, 4096), (128, 1, 1024), (8, 1024, 1024), (1, 1, 32_768))
"""Sequences, their last tokens that are in the batch, and keys of each."""
DRAWN = (32, 1, 128)
"""Rows of logits."""
BACKWARDS: tuple[tuple[int, ...], ...] = ((4096,), (64,) * 8, (512,) * 4)
"""Tokens of each job that goes back."""
TOKENS = 4096
"""Tokens of a forward of a job, and of a group."""
MOST_GROUPS: int | None = None
LEAST_BYTES = 32 * 2**20
"""The fewest bytes of a group that is measured: less takes as long as its launch."""
TOLERANCE = {"f64": 1e-12, "f32": 1e-4, "bf16": 2e-2, "f16": 4e-3}
"""Tolerance between two ways to round, relative to the largest element."""

# ------------------------------------------------------------------------------------------- SGMV


def slots_of(popularity: str, batch: int) -> list[int]:
    """Return each request's adapter, in Punica's four popularities (figure 8)."""
    from pcg.simulate import distributions as known

    counts = getattr(known, popularity.capitalize())().counts(batch)
    return [adapter for adapter, many in enumerate(counts) for _ in range(many)]


def lora_settings(bench: Bench) -> Iterator[Setting]:
    """One token a request: mixed ranks, and Punica's four popularities at rank 16."""
    for batch in BATCHES:
        for popularity in ("distinct", "identical", "uniform", "skewed"):
            name = f"LoRA, {popularity}, batch {batch}"
            yield name, lambda p=popularity, b=batch: lora(bench, p, b)
            if (popularity, batch) == ("distinct", BATCHES[0]):
                name = f"LoRA, ranks {', '.join(map(str, HIGH_RANKS))}, batch {batch}"
                yield name, lambda b=batch: lora(bench, "distinct", b, HIGH_RANKS)


def lora(bench: Bench, popularity: str, batch: int, ranks: Sequence[int] = (RANK,)) -> Row:
    """Measure LoRA of one token a request. AssertionError: it, or a peer, is not that of fp64."""
    layers = [LoraLayer(bench, popularity, batch, ranks) for _ in range(LAYERS)]
    layers[0].check()
    needed = ranks_work(layers[0].ranks, layers[0].slots, HIDDEN, HIDDEN, BF16)
    peers = {
        "torch loop": lambda: [layer.loop() for layer in layers],
        "gather-bmm": lambda: [layer.gather() for layer in layers],
    }
    ours = lambda: [layer.ours() for layer in layers]  # noqa: E731
    row = bench.row(ours, needed, peers, captured=True, times=LAYERS)
    is_aimed = (popularity, batch, ranks) == ("distinct", BATCHES[0], (RANK,))
    return row.of_ceiling(0.70) if is_aimed else row


def in_pages(matrices: Sequence[Any], seed: int = 0) -> tuple[Any, list[Any]]:
    """Lay rows of matrices out in the shuffled pages of an arena.

    Returns:
        The arena's elements, and the first element of each row of each matrix, int64.
    """
    import torch

    rows_a_page = PAGE_ELEMENTS // HIDDEN
    counts = [len(matrix) for matrix in matrices]
    pages = -(-sum(counts) // rows_a_page)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))
    place = torch.arange(sum(counts))
    firsts = order[place // rows_a_page] * PAGE_ELEMENTS + place % rows_a_page * HIDDEN
    device = matrices[0].device
    arena = torch.zeros(pages * PAGE_ELEMENTS, dtype=matrices[0].dtype, device=device)
    arena.view(-1, HIDDEN)[(firsts // HIDDEN).to(device)] = torch.cat(list(matrices))
    return arena, list(firsts.split(counts))


class LoraLayer:
    """One site's adapters, whose rows lie in pages of an arena, and the step's tokens there.

    Args:
        ranks: those of the adapters, in turn.
    """

    def __init__(
        self, bench: Bench, popularity: str, batch: int, ranks: Sequence[int] = (RANK,)
    ) -> None:
        import torch

        from pcg.kernels.batch import AdapterSlot
        from pcg.kernels.sizes import RANK_STEP
        from pcg.kernels.triton.adapters.rank_rows import rank_rows
        from pcg.kernels.triton.adapters.token_tiles import DECODE_BLOCK, token_tiles

        self.slots = slots_of(popularity, batch)
        distinct, device = max(self.slots) + 1, bench.eager_device
        self.x, self.y = bench.random(batch, HIDDEN), bench.random(batch, HIDDEN)
        self.ranks = [ranks[slot % len(ranks)] for slot in range(distinct)]
        self.a, self.b = (
            [bench.random(rank, HIDDEN, scale=0.02) for rank in self.ranks] for _ in range(2)
        )
        arena, firsts = in_pages([one for pair in zip(self.a, self.b, strict=True) for one in pair])
        counts = torch.tensor([self.ranks], dtype=torch.int32, device=device)
        pad = torch.nn.functional.pad

        def rows(own: Sequence[Any]) -> Any:
            """The rows' first elements, one adapter's behind the other's."""
            table = torch.cat([pad(one, (0, -len(one) % RANK_STEP)) for one in own])
            return rank_rows(arena, table.to(device), 0, counts, [0], [HIDDEN])

        self.rows_a, self.rows_b = rows(firsts[::2]), rows(firsts[1::2])
        widths = [-(-rank // RANK_STEP) * RANK_STEP for rank in self.ranks]
        begins = accumulate(widths[:-1], initial=0)
        columns = enumerate(zip(begins, widths, strict=True))
        slots = [AdapterSlot(number, first, width) for number, (first, width) in columns]
        spans = [(i, 1, slots[slot]) for i, slot in enumerate(self.slots)]
        self.tiles = token_tiles(spans, DECODE_BLOCK).to(self.x.device)
        many = [self.slots.count(slot) for slot in range(distinct)]
        ends = list(accumulate(many))
        self.bounds = [(end - count, end) for end, count in zip(ends, many, strict=True)]
        # For batched products, whose matrices are padded to the largest rank.
        self.chosen = torch.tensor(self.slots, device=device)
        self.stacks = [
            torch.nn.utils.rnn.pad_sequence(own, batch_first=True) for own in (self.a, self.b)
        ]

    def ours(self) -> None:
        from pcg.kernels.triton.adapters.segmented_lora import expand_add, shrink

        expand_add(self.y, shrink(self.x, self.rows_a, self.tiles), self.rows_b, self.tiles)

    def loop(self) -> None:
        """One adapter after the other."""
        for (begin, end), a, b in zip(self.bounds, self.a, self.b, strict=True):
            self.y[begin:end].addmm_(self.x[begin:end] @ a.t(), b)

    def gather(self) -> None:
        """Each token's matrices copied, and two batched products."""
        a, b = self.stacks
        s = self.x[:, None].bmm(a[self.chosen].transpose(1, 2))
        self.y[:, None].baddbmm_(s, b[self.chosen])

    def check(self) -> None:
        """AssertionError: ours or a peer's y is wrong."""
        kept = self.y.clone()
        expected = kept.double()
        for i, slot in enumerate(self.slots):
            a, b = self.a[slot].double(), self.b[slot].double()
            expected[i] += self.x[i].double() @ a.t() @ b
        for run in (self.ours, self.loop, self.gather):
            self.y.copy_(kept)
            run()
            check_close(f"LoRA by {run.__name__}", self.y, expected, 1e-2)


# ------------------------------------------------------------------------------------------- loss


def loss_settings(bench: Bench) -> Iterator[Setting]:
    for tokens in LOSSES:
        yield f"loss, {tokens} tokens", lambda tokens=tokens: loss(bench, tokens)


def loss(bench: Bench, tokens: int) -> Row:
    """Measure linear cross-entropy and the input's gradient, an eighth of the tokens checked."""
    import torch
    import torch.nn.functional as F

    from pcg.kernels.triton.linear_cross_entropy import linear_cross_entropy

    device = bench.eager_device
    x, weight = bench.random(tokens, HIDDEN), bench.random(VOCABULARY, HIDDEN, scale=0.02)
    targets = torch.randint(VOCABULARY, (tokens,), device=device)
    slopes = torch.full((tokens,), 1 / tokens, device=device)
    some = slice(tokens // 8 or 1)
    found, dx = linear_cross_entropy(x[some], weight, targets[some], slopes[some])
    # By hand: the engine of gradients may know no such device.
    logits = x[some].double() @ weight.double().t()
    wanted = F.cross_entropy(logits, targets[some], reduction="none")
    check_close("loss", found, wanted, 2e-2)
    chosen = F.one_hot(targets[some], VOCABULARY)
    check_close("dx", dx, (logits.softmax(-1) - chosen) @ weight.double() / tokens, 2e-2)
    del logits, chosen, found, dx

    def whole() -> object:
        leaf = x.detach().requires_grad_()
        mean = F.cross_entropy((leaf @ weight.t()).float(), targets)
        return torch.autograd.grad(mean, leaf)

    def ours() -> object:
        return linear_cross_entropy(x, weight, targets, slopes)

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    needed = loss_work(tokens, HIDDEN, VOCABULARY, BF16)
    return bench.row(ours, needed, {"F.cross_entropy": whole}, ours_bytes=peak)


# ---------------------------------------------------------------------------- quantized products


def product_settings(bench: Bench) -> Iterator[Setting]:
    for tokens in PRODUCTS:
        for name in ("nf4", "int4_g64", "mxfp4", "int8", "fp8", "fp8_block"):
            yield (
                f"{name} product, {tokens} tokens",
                lambda name=name, tokens=tokens: quantized_product(bench, name, tokens),
            )


def quantized_product(bench: Bench, name: str, tokens: int) -> Row:
    """Measure x W̃ᵀ by stored codes; dy W̃ is checked, too, and int8 against CPUs to the bit."""
    import torch

    from pcg.formats.registry import FORMATS
    from pcg.kernels.torch.quantized import Block, QuantizedWeight
    from pcg.kernels.triton.quantized import TritonProducts

    format_ = FORMATS[name]
    parts = format_.packed(format_.quantize(bench.random(INTERMEDIATE, HIDDEN, scale=0.02)))
    stored = QuantizedWeight((Block(format_, parts, TritonProducts()),))
    weight = format_.whole(parts, torch.bfloat16)
    x, dy = bench.random(tokens, HIDDEN), bench.random(tokens, INTERMEDIATE)
    y = stored.linear(x, ())
    check_close("y", y, x.double() @ weight.double().t(), 2e-2)
    check_close("dx", stored.input_gradient(dy), dy.double() @ weight.double(), 2e-2)
    if name == "int8":
        on_cpu = QuantizedWeight((Block(format_, format_.packed(format_.quantize(weight.cpu()))),))
        given = QuantizedWeight((Block(format_, format_.packed(format_.quantize(weight))),))
        few = x[:4].float()
        if not torch.equal(given.linear(few, ()).cpu(), on_cpu.linear(few.cpu(), ())):
            raise AssertionError("the integers of int8 are not those of a CPU")
    moved = parts.size_bytes + BF16 * tokens * (HIDDEN + INTERMEDIATE)
    peers = {
        "bf16": lambda: torch.mm(x, weight.t()),
        "dequantized": lambda: torch.mm(x, format_.whole(parts, torch.bfloat16).t()),
    }
    needed = Work(moved, 2 * tokens * HIDDEN * INTERMEDIATE)
    return bench.row(lambda: stored.linear(x, ()), needed, peers)


# --------------------------------------------------------------------------------- signs, sampling


def sign_settings(bench: Bench) -> Iterator[Setting]:
    for direction in ("pack", "backward"):
        yield f"signs, {direction}", lambda d=direction: _signs(bench, d == "pack")


def _signs(bench: Bench, packs: bool) -> Row:
    import torch

    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import elementwise

    y, dy = bench.random(*SIGNS), bench.random(*SIGNS)
    signs = elementwise.pack_signs(y)
    if not torch.equal(signs, torch_ops.pack_signs(y)):
        raise AssertionError("our signs are not torch's")
    name, given = ("pack_signs", (y,)) if packs else ("relu_backward_packed", (dy, signs))
    ours, theirs = (getattr(one, name) for one in (elementwise, torch_ops))
    needed = Work((1 if packs else 2) * BF16 * y.numel() + y.numel() // 8)
    row = bench.row(lambda: ours(*given), needed, {"torch": lambda: theirs(*given)})
    return row.of_ceiling(0.85)


def sampling_settings(bench: Bench) -> Iterator[Setting]:
    for rows in DRAWN:
        yield f"sampling, greedy, {rows} rows", lambda rows=rows: _greedy(bench, rows)
        yield f"sampling, draw, {rows} rows", lambda rows=rows: _draw(bench, rows)
        name = f"sampling, draw of top-k, top-p, {rows} rows"
        yield name, lambda rows=rows: _draw(bench, rows, top_k=50, top_p=0.9)


def _greedy(bench: Bench, rows: int) -> Row:
    import torch

    from pcg.kernels.triton.sampling import greedy

    logits = bench.random(rows, VOCABULARY)
    if not torch.equal(greedy(logits), logits.argmax(-1)):
        raise AssertionError("our tokens are not torch's")
    needed, peers = Work(rows * (VOCABULARY * BF16 + 8)), {"argmax": lambda: logits.argmax(-1)}
    return bench.row(lambda: greedy(logits), needed, peers, captured=True)


def _draw(bench: Bench, rows: int, **cut: Any) -> Row:
    import torch

    from pcg.kernels.triton.sampling import draw
    from pcg.runtime.sampling.drawing import PYTORCH, limits_of
    from pcg.runtime.sampling.sampling_params import SamplingParams

    logits = bench.random(rows, VOCABULARY, scale=3, dtype="float32")
    uniform = torch.rand(rows, device=bench.eager_device, dtype=torch.float64)
    params = [SamplingParams(temperature=0.8, **cut)] * rows
    limits = limits_of(params, logits)
    tokens, are_drawn = draw(logits, limits, uniform)
    same = float((tokens == PYTORCH.draw(logits, params, uniform)[0]).double().mean())
    if not are_drawn.all() or same < 0.9:  # a point may lie within rounding of a border
        raise AssertionError(f"{same:.0%} of our tokens are torch's")
    needed = Work(rows * (VOCABULARY * 4 + 8 + 4 + 8 + 1))
    theirs = {"torch": lambda: PYTORCH.draw(logits, params, uniform)[0]}  # it uploads the limits
    ours = lambda: draw(logits, limits, uniform)  # noqa: E731
    return bench.row(ours, needed, theirs, captured=True, peers_captured=False)


# -------------------------------------------------------------------------------------- attention


def attention_settings(bench: Bench) -> Iterator[Setting]:
    for batch, tokens, keys in ATTENTION:
        name = f"attention, {batch} of {tokens} tokens on {keys} keys"
        yield name, lambda sizes=(batch, tokens, keys): attention(bench, *sizes)


def attention(bench: Bench, batch: int, tokens: int, keys: int) -> Row:
    """Measure attention of sequences whose last `tokens` of `keys` are in the batch.

    Raises:
        AssertionError: that of the first sequence is not that of fp64.
    """
    import torch
    import torch.nn.functional as F

    from pcg.kernels.batch import Span
    from pcg.kernels.sizes import PAGE_TOKENS
    from pcg.kernels.torch.attention_math import Scoring
    from pcg.kernels.triton.attention.cache_rows import CacheRows, KvRows
    from pcg.kernels.triton.attention.paged_attention import paged_attention
    from pcg.kernels.triton.attention.work import AttentionWork
    from pcg.runtime.memory.pool import PageTable

    pages, device, scale = keys // PAGE_TOKENS, bench.eager_device, HEAD**-0.5
    q = bench.random(batch * tokens, HEADS, HEAD)
    k, v = (bench.random(KV_HEADS, batch * keys, HEAD) for _ in range(2))
    # Pages of all sequences shuffled, as a pool that has been used gives them out.
    shuffled = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0))
    tables: Sequence[Sequence[int]] = shuffled.view(batch, pages).tolist()
    parts = [
        Span(i * tokens, tokens, keys - tokens, PageTable("benchmark", list(own)))
        for i, own in enumerate(tables)
    ]
    lists = AttentionWork.build(parts, HEADS // KV_HEADS, q.device)
    cache = KvRows(CacheRows.of_layer(k), CacheRows.of_layer(v))

    def ours() -> torch.Tensor:
        return paged_attention(q, cache, lists, Scoring(scale))[0]

    row = torch.tensor(tables, device=device)[:, :, None] * PAGE_TOKENS
    rows = (row + torch.arange(PAGE_TOKENS, device=device)).flatten(1)
    dense_k, dense_v = (x[:, rows].transpose(0, 1).contiguous() for x in (k, v))
    dense_q = q.view(batch, tokens, HEADS, HEAD).transpose(1, 2).contiguous()
    first = ours().view(batch, tokens, HEADS, HEAD)[0].double()
    wanted = _last_in_fp64(dense_q[0], dense_k[0], dense_v[0], scale)
    check_close("paged attention", first.transpose(0, 1)[:, -16:], wanted, 2e-2)
    is_decode = tokens == 1

    def sdpa() -> object:
        given: Any = {"is_causal": not is_decode, "scale": scale, "enable_gqa": True}
        return F.scaled_dot_product_attention(dense_q, dense_k, dense_v, **given)

    needed = attention_work([(tokens, keys - tokens)] * batch, HEADS, KV_HEADS, HEAD, BF16)
    found = bench.row(ours, needed, {"SDPA": sdpa}, captured=is_decode)
    return found.of_ceiling(0.80) if is_decode else found


def _last_in_fp64(q: Any, k: Any, v: Any, scale: float) -> Any:
    """Return attention of the last 16 tokens of a sequence: q [heads, tokens, head]."""
    import torch

    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = q[:, -16:].double() @ k.transpose(1, 2) * scale
    count, keys = scores.shape[1:]
    i = torch.arange(keys - count, keys, device=q.device)[:, None]
    hidden = torch.arange(keys, device=q.device)[None] > i
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v


# --------------------------------------------------------------------------------------- training


def training_settings(bench: Bench) -> Iterator[Setting]:
    """LoRA of a gate projection: forward, and backward beside the base's product, of some jobs."""
    yield f"trained LoRA, {TOKENS} tokens", lambda: _forward(bench)
    for counts in BACKWARDS:
        tokens = f"{len(counts)} of {counts[0]}" if len(counts) > 1 else str(counts[0])
        name = f"trained LoRA, {tokens} tokens backward"
        yield name, lambda counts=counts: _backward(bench, counts)


class _Site:
    """A job's adapter and tokens: bf16 over fp32."""

    def __init__(self, bench: Bench, tokens: int) -> None:
        from pcg.peft.weights import AdapterWeight

        self.x = bench.random(tokens, HIDDEN)
        self.y, self.dz = (bench.random(tokens, INTERMEDIATE) for _ in range(2))
        self.s = bench.random(tokens, RANK, dtype="float32")
        self.a = AdapterWeight(bench.random(RANK, HIDDEN, scale=0.02, dtype="float32"))
        self.b = AdapterWeight(bench.random(INTERMEDIATE, RANK, scale=0.02, dtype="float32"), 2.0)


def _forward(bench: Bench) -> Row:
    """Measure s = x Aᵀ and z = y + scale · s Bᵀ against the peers."""
    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import ops as triton_ops

    site = _Site(bench, TOKENS)

    def run(ops: Any) -> Any:
        return ops.expand_add(site.y, ops.shrink(site.x, site.a), site.b)

    check_close("z", run(triton_ops), run(torch_ops), 1e-2)
    moved = BF16 * TOKENS * (HIDDEN + 2 * INTERMEDIATE) + 4 * RANK * (HIDDEN + INTERMEDIATE)
    needed = Work(moved, 2 * TOKENS * RANK * (HIDDEN + INTERMEDIATE))
    return bench.row(lambda: run(triton_ops), needed, {"torch": lambda: run(torch_ops)})


def _backward(bench: Bench, counts: Sequence[int]) -> Row:
    """Measure ds, dB, dA and dx of some jobs, with the base's product once."""
    import torch

    from pcg.kernels.torch import ops as torch_ops
    from pcg.kernels.triton import ops as triton_ops
    from pcg.runtime.model.merged_execution import run_merged

    sites = [_Site(bench, count) for count in counts]
    weight = bench.random(INTERMEDIATE, HIDDEN, scale=0.02)
    batch = SimpleNamespace(layer=0, is_alone=False)

    def ours() -> list[tuple[Any, ...]]:
        asked = [
            triton_ops.lora_linear_backward(batch, "w", one.dz, weight, one.a, one.b, one.s)
            for one in sites
        ]
        made = zip(run_merged(asked), sites, strict=True)
        return [(db, dx, triton_ops.outer(ds, one.x)) for (ds, db, dx), one in made]

    def theirs() -> list[tuple[Any, ...]]:
        through = torch.cat([one.dz for one in sites]) @ weight
        found = []
        for one, dx in zip(sites, through.split([*counts]), strict=True):
            ds = torch_ops.expand_backward(one.dz, one.b)
            dx = dx + torch_ops.shrink_backward(ds, one.a).to(dx.dtype)
            db = torch_ops.scaled_outer(one.dz, one.s, one.b)
            found.append((db, dx, torch_ops.outer(ds, one.x)))
        return found

    for mine, other in zip(ours(), theirs(), strict=True):
        for name, one, expected in zip(("dB", "dx", "dA"), mine, other, strict=True):
            check_close(name, one, expected, 1e-2)
    # dz and x are read, dx is written; the base's weight, and each job's adapter and gradients.
    tokens, both = sum(counts), HIDDEN + INTERMEDIATE
    moved = (
        BF16 * (tokens * (both + HIDDEN) + HIDDEN * INTERMEDIATE) + 8 * len(counts) * RANK * both
    )
    needed = Work(moved, 2 * tokens * (HIDDEN * INTERMEDIATE + 2 * RANK * both))
    return bench.row(ours, needed, {"torch": theirs})


# ----------------------------------------------------------------------------------------- groups


def group_graphs(model: Any) -> list[Any]:
    """Return the groups of a model's programs, each different one as a graph of its own.

    They are those of LoRA on all linears: a layer served, trained forward and backward, the loss.
    """
    from pcg.codegen.group_kernel import group_kernel
    from pcg.compiler import compile_program
    from pcg.ir.analysis.kernel_group import group_of
    from pcg.ir.graph import Value
    from pcg.passes.fusion.group_kernels import GroupKernels

    program = compile_program(model, "lora", dtype="bfloat16")
    graphs = [("serving", graph) for graph in program.serving.model.graphs]
    for plan in program.training.plans:
        graphs += [("forward", plan.forward), ("backward", plan.backward)]
    graphs.append(("loss", program.training.epilogue))
    found: dict[str, Any] = {}
    for where, graph in [one for one in graphs if one[1] is not None]:
        grouped = GroupKernels().run(graph)
        for kernel in grouped.kernels:
            group = group_of(grouped, kernel)
            operators = " ".join(dict.fromkeys(node.op for node in group.nodes))
            alone = graph.replace(
                name=f"{where}: {operators}",
                inputs=tuple(Value(name, graph.types[name]) for name in group.inputs),
                parameters=(), nodes=group.nodes, outputs=group.outputs,
            )  # fmt: skip
            found.setdefault(group_kernel(group, "fused").source, alone)
    names, numbered = Counter[str](), []
    for graph in found.values():
        names[graph.name] += 1
        number = f" ({names[graph.name]})" if names[graph.name] > 1 else ""
        numbered.append(graph.replace(name=f"{graph.name}{number}"))
    return numbered


def emitted(graph: Any, backend: str) -> Callable[..., Any]:
    """Return a graph's function, of its inputs."""
    from pcg.codegen.emit import emit_module
    from pcg.codegen.program_functions import Function
    from pcg.ir.program.program import python_name
    from pcg.passes.fusion.group_kernels import GroupKernels, OrderKernels
    from pcg.runtime.model.runner import load_functions

    if backend == "triton":
        graph = OrderKernels().run(GroupKernels().run(graph))
    source = emit_module("One group.", "", [Function(graph, "group", "A group.")], backend)
    function = load_functions(source, f"{python_name(backend)}_group")["group"]
    return lambda *inputs: function(None, None, None, *inputs)


def made_input(type_: Any, tokens: int, device: str) -> Any:
    import torch

    from pcg.ir.types import TORCH_NAMES

    shape = [tokens] * type_.is_token_wise + list(type_.features)
    dtype = getattr(torch, TORCH_NAMES[type_.dtype])
    if type_.is_float:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(0, 100, shape, device=device).to(dtype)


def group_work(graph: Any, tokens: int) -> Work:
    """Return the bytes of a graph's inputs and outputs."""
    from pcg.ir.types import DTYPE_BYTES

    types = [*(value.type for value in graph.inputs), *(graph.types[n] for n in graph.outputs)]
    return Work(
        sum(
            (tokens if one.is_token_wise else 1) * prod(one.features) * DTYPE_BYTES[one.dtype]
            for one in types
        )
    )


def group_settings(bench: Bench) -> Iterator[Setting]:
    """The groups that move much, those of most bytes first."""
    graphs = [(group_work(graph, TOKENS).bytes, graph) for graph in group_graphs(config())]
    graphs.sort(key=lambda pair: -pair[0])
    for _, graph in [pair for pair in graphs if pair[0] >= LEAST_BYTES][:MOST_GROUPS]:
        yield graph.name, lambda graph=graph: _group(bench, graph)


def _group(bench: Bench, graph: Any) -> Row:
    import torch

    inputs = [made_input(value.type, TOKENS, bench.eager_device) for value in graph.inputs]
    ours, eager = emitted(graph, "triton"), emitted(graph, "torch")
    found = [x if isinstance(x, tuple) else (x,) for x in (ours(*inputs), eager(*inputs))]
    for name, one, other in zip(graph.outputs, *found, strict=True):
        allowed = TOLERANCE.get(graph.types[name].dtype, 0.0)
        check_close(f"{name} of {graph.name}", one, other, allowed)
    compiled = torch.compile(eager)
    peers = {"torch": lambda: eager(*inputs), "torch.compile": lambda: compiled(*inputs)}
    return bench.row(lambda: ours(*inputs), group_work(graph, TOKENS), peers).of_ceiling(0.85)


# ------------------------------------------------------------------------------------------ cases

FIRST = (
    (lora_settings, 3), (attention_settings, 2), (loss_settings, 1), (training_settings, 3),
    (sampling_settings, 3), (sign_settings, 2), (product_settings, 3),
)  # fmt: skip
"""The settings of each kernel, and the number of those that come before all other cases."""


def kernel_settings(bench: Bench) -> Iterable[Setting]:
    """The first settings of each kernel."""
    return chain.from_iterable(islice(settings(bench), count) for settings, count in FIRST)


def further_settings(bench: Bench) -> Iterable[Setting]:
    """The other sizes."""
    return chain.from_iterable(islice(settings(bench), count, None) for settings, count in FIRST)


KERNELS = Case("kernels", 90, kernel_settings)
FURTHER = Case("further kernels", 60, further_settings)
GROUPS = Case("groups", 60, group_settings)
