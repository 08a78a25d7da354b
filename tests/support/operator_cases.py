"""Operators with inputs to differentiate them at.

Long because every operator that has a gradient has a case.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pcg.ir.analysis.builder import Builder
from pcg.ir.graph import Attribute, Graph, Parameter, Value
from pcg.ir.operators import Gradient, operator
from pcg.ir.types import TOKENS, TORCH_NAMES, Size, tensor
from pcg.kernels.batch import DroppedPart, Span
from pcg.kernels.torch import ops as torch_ops
from pcg.ranks.group import SINGLE_RANK


class OneStep:
    """A batch that draws the same numbers whenever it is asked, of two prompts among tokens."""

    @property
    def spans(self) -> tuple[Span, Span]:
        return Span(0, 3), Span(3, self.tokens - 3)

    @property
    def input_ids(self) -> Tensor:
        return torch.zeros(self.tokens, dtype=torch.int64)

    @property
    def known(self) -> dict[object, Any]:
        return {}

    @classmethod
    def dropped_parts(cls, key: int) -> list[DroppedPart]:
        return [DroppedPart(0, cls.tokens, 2, 8, torch.Generator().manual_seed(key))]

    ranks = SINGLE_RANK
    tokens = 5
    states = None
    chosen = None
    virtual_rows = torch.tensor([0, 1, 3])
    virtual_places = torch.tensor([0, 1, 0])


STEP = OneStep()
NAMESPACE = {"torch": torch, "F": F, "K": torch_ops, "batch": STEP}
"""What an emitted file imports, and the batch that its functions take."""


T = TOKENS


COUNT = OneStep.tokens


SCALE = 0.75
"""Of the adapter's weights."""


@dataclasses.dataclass(frozen=True)
class AdapterWeight:
    """One adapter's weight, as the kernels take it."""

    weight: Tensor
    scale: float = SCALE
    segments: None = None


@dataclasses.dataclass(frozen=True)
class Operand:
    """An input of the operator.

    Attributes:
        shape: with `T` for the tokens.
        needs: whether its gradient is asked for.
        role: a parameter's; empty for an activation.
        dtype: `float` stands for f64, or the dtype that is tested.
        positive: whether its numbers are.
    """

    shape: tuple[Size, ...]
    needs: bool = True
    role: str = ""
    dtype: str = "float"
    positive: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """An operator applied, and what it means where its source is no oracle."""

    op: str
    operands: tuple[Operand, ...]
    attributes: Mapping[str, Attribute] = dataclasses.field(default_factory=dict)
    reference: Callable[..., Tensor] | None = None

    def __str__(self) -> str:
        shapes = "·".join(str(list(o.shape)) for o in self.operands)
        return f"{self.op}-{shapes}-{dict(self.attributes)}"


def x(*shape: Size, **fields: Any) -> Operand:
    """An activation whose gradient is asked for."""
    return Operand((T, *shape), **fields)


def weight(*shape: Size, role: str = "frozen", **fields: Any) -> Operand:
    return Operand(shape, needs=role == "adapter", role=role, **fields)


def rms_norm_reference(eps: float, offset: float) -> Callable[..., Tensor]:
    def reference(x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None if weight is None else weight + offset, eps)

    return reference


def layer_norm_reference(weight: bool, bias: bool, eps: float) -> Callable[..., Tensor]:
    def reference(x: Tensor, *rest: Tensor) -> Tensor:
        y = F.layer_norm(x, x.shape[-1:], eps=eps)
        if weight:
            y = y * rest[0]
        return y + rest[-1] if bias else y

    return reference


def rope_reference(style: str, rotary_dim: int, backward: bool = False) -> Callable[..., Tensor]:
    """The rotation of transformers; its transpose, by autograd, for the backward operator."""
    if style == "half":
        from transformers.models.llama.modeling_llama import rotate_half
    else:
        from transformers.models.cohere.modeling_cohere import rotate_half

    def forward(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotary, rest = x[..., :rotary_dim], x[..., rotary_dim:]
        rotary = rotary * cos.unsqueeze(1) + rotate_half(rotary) * sin.unsqueeze(1)
        return torch.cat((rotary, rest), -1)

    def transpose(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = torch.zeros_like(dy, requires_grad=True)
        (dx,) = torch.autograd.grad(forward(x, cos, sin), x, dy, create_graph=True)
        return dx

    return transpose if backward else forward


def cross_entropy_reference(logits: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, targets.clamp(min=0), reduction="none")
    return torch.where(targets < 0, 0.0, losses)


def column_norm_reference(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (weight + SCALE * b @ a).norm(dim=1)


def vera_up_reference(whole: Tensor, lambda_b: Tensor, lambda_d: Tensor) -> Tensor:
    return torch.diag(lambda_b) @ whole[:3] @ torch.diag(lambda_d)


def khatri_rao_reference(dim: int) -> Callable[..., Tensor]:
    """The factor of a Hadamard product of two products; scales are of each parameter."""

    def of_rows(p: Tensor, q: Tensor) -> Tensor:
        return torch.stack([SCALE * SCALE * one * other for one in p for other in q])

    return of_rows if dim == -2 else lambda p, q: of_rows(p.t(), q.t()).t()


def virtual_tokens_reference(x: Tensor, prompt: Tensor) -> Tensor:
    rows = [prompt[0], prompt[1], x[2], prompt[0], x[4]]
    return torch.stack([row.to(x.dtype) for row in rows])


def without_virtual_reference(x: Tensor) -> Tensor:
    return x * torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0]).to(x.dtype).unsqueeze(-1)


def dropout_reference(p: float, key: int) -> Callable[..., Tensor]:
    """Dropout as a product with the step's mask."""

    def reference(x: Tensor) -> Tensor:
        (part,) = OneStep.dropped_parts(key)
        drawn = x.new_empty(part.whole, *x.shape[1:]).bernoulli_(1 - p, generator=part.generator)
        kept = drawn[part.skipped : part.skipped + part.count]
        return x.double() * kept / (1 - p) if p < 1 else x * 0.0

    return reference


def unary_cases() -> list[Case]:
    anywhere = ("neg", "exp", "cos", "sin", "tanh", "sigmoid", "silu", "relu")
    cases = [Case(op, (x(*shape),)) for op in anywhere for shape in ((), (4,), (3, 4))]
    cases += [Case(op, (x(4, positive=True),)) for op in ("sqrt", "rsqrt")]
    cases += [Case("gelu", (x(9),), {"approximate": form}) for form in ("none", "tanh")]
    bounds: list[dict[str, Attribute]] = [{"min": -0.5}, {"max": 0.5}, {"max": 1, "min": -1.0}]
    cases += [Case("clamp", (x(9),), bound) for bound in bounds]
    cases += [Case("pow", (x(9),), {"exponent": e}) for e in (0.0, 1.0, 2.0, 3.0, 4.0, -1.0)]
    cases += [Case("pow", (x(9, positive=True),), {"exponent": e}) for e in (0.5, -0.5, 1.7)]
    cases += [Case("cast", (x(4),), {"dtype": dtype}) for dtype in ("f32", "f64", "bf16")]
    cases += [Case("cast", (x(4, dtype=dtype),), {"dtype": "f64"}) for dtype in ("f32", "f16")]
    for target, arguments in (("elu", "{0}, 2.0"), ("softplus", "{0}"), ("atan", "{0}")):
        attributes = {"target": f"aten.{target}.default", "arguments": arguments, "dtype": "float"}
        cases.append(Case("pointwise", (x(4),), attributes))
    for target, operands in (
        ("maximum", (x(2, 4), x(1, 4))),
        ("atan2", (x(4), weight(4))),
        ("addcmul", (x(3, 4), x(1, 4), x(3, 1))),
    ):
        arguments = ", ".join(f"{{{place}}}" for place in range(len(operands)))
        attributes = {"target": f"aten.{target}.default", "arguments": arguments, "dtype": "float"}
        cases.append(Case("pointwise", operands, attributes))
    for target, arguments, features in (
        ("amax.default", "{0}, [-1], True", (3, 1)),
        ("linalg_vector_norm.default", "{0}, 2, [-2]", (4,)),
        ("_log_softmax.default", "{0}, -1, False", (3, 4)),
        ("logsumexp.default", "{0}, [-1, -2]", ()),
        ("flip.default", "{0}, [-2]", (3, 4)),
    ):
        attributes = {"target": f"aten.{target}", "arguments": arguments, "features": features}
        further = {"reads": (3, 4), "dtype": "float"}
        cases.append(Case("rowwise", (x(3, 4),), {**attributes, **further}))
    cases.append(Case("detach", (x(4, needs=False),)))
    return cases


def binary_cases() -> list[Case]:
    cases = []
    pairs: list[tuple[tuple[Size, ...], tuple[Size, ...]]] = [
        ((T, 4), (T, 4)),
        ((T, 3, 4), (T, 1, 4)),
        ((T, 1, 4), (T, 3, 1)),
        ((T,), (T,)),
    ]
    frozen: list[tuple[tuple[Size, ...], tuple[Size, ...]]] = [
        ((T, 4), (4,)),
        ((T, 3, 4), (4,)),
        ((T, 3, 4), (3, 1)),
        ((T, 1), (4,)),
        ((T, 4), ()),
    ]
    for op in ("add", "sub", "mul", "div"):
        for left, right in pairs:
            for needs in ((True, True), (True, False), (False, True)):
                operands = (Operand(left, needs[0]), Operand(right, needs[1], positive=True))
                cases.append(Case(op, operands))
        for left, right in frozen:
            cases.append(Case(op, (Operand(left), weight(*right, positive=True))))
            cases.append(Case(op, (weight(*right), Operand(left, positive=True))))
        scalars: tuple[float, ...] = (2.5, 3, -0.5)
        for scalar, flags in itertools.product(scalars, ({}, {"reversed": True})):
            cases.append(Case(op, (x(4, positive=True),), {"scalar": scalar, **flags}))
        cases.append(Case(op, (x(4), x(4, dtype="f32", positive=True))))
    return cases


def shape_cases() -> list[Case]:
    cases = [
        Case("reshape", (x(6, 2),), {"shape": (-1, 3, 4)}),
        Case("reshape", (x(),), {"shape": (-1, 1)}),
        Case("reshape", (weight(6, role="adapter"),), {"shape": (2, 3)}),
        Case("permute", (x(2, 3, 4),), {"dims": (0, 3, 1, 2)}),
        Case("permute", (weight(2, 3, role="adapter"),), {"dims": (1, 0)}),
        Case("softmax", (x(3, 4),), {"dim": -1}),
        Case("softmax", (x(3, 4),), {"dim": -2}),
        Case("embedding", (weight(7, 4), x(dtype="i64", needs=False))),
        Case("topk", (x(6),), {"k": 2}, reference=lambda values: values.topk(2).values),
        Case("take_along", (x(7), x(3, dtype="i64", needs=False))),
        *(
            Case(
                "expert_linear", (x(*rows, 4), x(2, dtype="i64", needs=False), weight(6, 3, 4), *b)
            )
            for rows in ((), (2,))
            for b in ((), (weight(6, 3, 1),))
        ),
    ]
    expansions: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((1, 4), (3, 4)),
        ((1, 1), (3, 4)),
        ((4,), (4,)),
    ]
    cases += [Case("expand", (x(*have),), {"shape": (-1, *want)}) for have, want in expansions]
    slices = [(-1, 0, 4, 1), (-1, 1, 7, 2), (-2, 0, 3, 2), (-1, 2, 7, 3), (-2, 2, 3, 1)]
    for dim, start, stop, step in slices:
        attributes = {"dim": dim, "start": start, "stop": stop, "step": step}
        cases.append(Case("slice", (x(3, 7),), attributes))
    cases.append(Case("slice", (x(3, 7),), {"dim": -1, "start": 1, "stop": 3}))
    cases += [
        Case("repeat_interleave", (x(2, 3, 4),), {"repeats": 2, "dim": d}) for d in (-1, -2, -3)
    ]
    for op, dim, keepdim in itertools.product(("mean", "sum"), (-1, -2), (True, False)):
        cases.append(Case(op, (x(3, 4),), {"dim": dim, "keepdim": keepdim}))
    return cases


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    parts = []
    for span in STEP.spans:
        padded = F.pad(x[span.tokens].T, (weight.shape[1] - 1, 0))
        parts.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight)).T)
    return torch.cat(parts)


def recurred(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None = None) -> Tensor:
    """The definition of a recurrence, token by token."""
    heads = v.shape[1]
    q, k = (x.repeat_interleave(heads // k.shape[1], 1) for x in (q, k))
    decay = decay.view(*decay.shape[:2], -1, 1)
    outs = []
    for span in STEP.spans:
        state = v.new_zeros(heads, k.shape[2], v.shape[2])
        for t in range(span.start, span.start + span.length):
            state = decay[t].exp() * state
            u = v[t]
            if beta is not None:
                u = beta[t, :, None] * (u - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + torch.einsum("hk,hv->hkv", k[t], u)
            outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outs)


def recurrent_cases() -> list[Case]:
    state: Mapping[str, Attribute] = {"state": 0}
    q, v, of_heads = x(2, 3), x(4, 5), x(4)
    return [
        Case("short_convolution", (x(3), weight(3, 4)), state, convolved),
        Case("short_convolution", (x(3), weight(3, 2), weight(3)), state, convolved),
        Case("recurrence", (q, q, v, of_heads), state, recurred),
        Case("recurrence", (q, q, v, of_heads, of_heads), state, recurred),
        Case("recurrence", (x(4, 3), x(4, 3), v, x(4, 3), of_heads), state, recurred),
    ]


def concat_cases() -> list[Case]:
    parts = (x(2, 4), x(3, 4, needs=False), x(1, 4), x(3, 4, dtype="f32"))
    return [
        Case("concat", parts, {"dim": -2}),
        Case("concat", (x(2), x(3)), {"dim": -1}),
        Case("concat", (x(2, 3),), {"dim": -2}),
    ]


EXPERTS = 6


def expert_matrices(kind: str, matrix: Tensor, indices: Tensor) -> Tensor:
    """The A [r, in] or B [out, r] of each token's experts, of matrices as peft stores them."""
    if kind == "a":
        return matrix.reshape(EXPERTS, -1, matrix.shape[1])[indices]
    return matrix.reshape(matrix.shape[0], -1, EXPERTS).permute(2, 0, 1)[indices]


def lora_of_experts_cases() -> list[Case]:
    def shrink(rows: Tensor, indices: Tensor, a: Tensor) -> Tensor:
        each = rows if rows.dim() == 3 else rows.unsqueeze(1)
        return (expert_matrices("a", a, indices) @ each.unsqueeze(-1)).squeeze(-1)

    def expand(y: Tensor, s: Tensor, indices: Tensor, b: Tensor) -> Tensor:
        product = expert_matrices("b", b, indices) @ s.unsqueeze(-1)
        return y + SCALE * product.squeeze(-1)

    cases = []
    indices, number = x(2, dtype="i64", needs=False), {"experts": EXPERTS}
    a, b = weight(3 * EXPERTS, 4, role="adapter"), weight(5, 3 * EXPERTS, role="adapter")
    for needs in ((True, True), (True, False), (False, True)):
        down, up = (dataclasses.replace(matrix, needs=needs[1]) for matrix in (a, b))
        for rows in ((), (2,)):
            operands = (x(*rows, 4, needs=needs[0]), indices, down)
            cases.append(Case("expert_shrink", operands, number, shrink))
        operands = (x(2, 5), x(2, 3, needs=needs[0]), indices, up)
        cases.append(Case("expert_expand_add", operands, number, expand))
    return cases


def rows_of(ids: Tensor, a: Tensor, padding: int | None = None) -> Tensor:
    return F.embedding(ids, a.T, padding)


def linear_cases() -> list[Case]:
    a, b = weight(2, 4, role="adapter"), weight(3, 2, role="adapter")
    bias, base = weight(4, role="adapter"), weight(4)
    expand_operands = (x(3), x(2), b)
    a_frozen, b_frozen = (dataclasses.replace(operand, needs=False) for operand in (a, b))
    cases = [
        Case("linear", (x(4), weight(3, 4))),
        Case("linear", (x(2, 4), weight(3, 4))),
        Case("linear", (x(4), weight(3, 4), weight(3))),
        Case("bias_add", (x(4), bias, base), {}, lambda y, new, old: y + (new - old)),
        Case("bias_add", (x(4, needs=False), bias, base), {}, lambda y, new, old: y + (new - old)),
    ]
    for needs in itertools.product((True, False), repeat=2):
        if any(needs):
            operands = (x(4, needs=needs[0]), dataclasses.replace(a, needs=needs[1]))
            cases.append(Case("shrink", operands, {}, F.linear))
    for some in itertools.product((True, False), repeat=3):
        if any(some):
            pairs = zip(expand_operands, some, strict=True)
            chosen = tuple(dataclasses.replace(operand, needs=need) for operand, need in pairs)
            cases.append(Case("expand_add", chosen, {}, lambda y, s, b: y + SCALE * s @ b.T))
    for padding in ({}, {"padding": 3}):
        operands = (x(dtype="i64", needs=False), weight(2, 7, role="adapter"))
        look_up = partial(rows_of, **padding)
        cases.append(Case("embedding_shrink", operands, padding, look_up))
        operands = (operands[0], weight(7, 2, role="adapter"))
        look_up = partial(F.embedding, padding_idx=padding.get("padding"))
        cases.append(Case("embedding_shrink", operands, {**padding, "by_row": True}, look_up))
    cases += lora_of_experts_cases()
    vector = weight(4, role="adapter")
    for needs in ((True, True), (False, True), (True, False)):
        operands = (x(4, needs=needs[0]), dataclasses.replace(vector, needs=needs[1]))
        cases.append(Case("scale", operands, {}, lambda y, by: y * by))
        of_heads = x(2, 4, needs=needs[0]), operands[1]
        cases.append(Case("scale", of_heads, {}, lambda y, by: y * by))
        cases.append(Case("scale", (*operands, base), {}, lambda y, by, b: by * (y - b) + b))
        operands = (operands[0], dataclasses.replace(bias, needs=needs[1]))
        cases.append(Case("bias_add", operands, {}, lambda y, by: y + SCALE * by))
    whole = weight(5, 2, role="adapter")
    vectors = (weight(3, role="adapter"), weight(2, role="adapter"))
    frozen_whole = dataclasses.replace(whole, needs=False)
    cases.append(Case("vera_down", (frozen_whole,), {"size": 1}, lambda w: w[:, :1]))
    cases.append(Case("vera_up", (frozen_whole, *vectors), {}, vera_up_reference))
    singular = (weight(3, 4, role="adapter"), weight(3, 1, role="adapter"))
    cases.append(Case("singular_down", singular, {}, lambda a, e: torch.diag(e[:, 0]) @ a))
    factors = (weight(3, 4, role="adapter"), weight(3, 4, role="adapter"))
    cases.extend(
        Case("khatri_rao", factors, {"dim": dim}, khatri_rao_reference(dim)) for dim in (-2, -1)
    )
    attributes: dict[str, Attribute]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": F.gelu,
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "relu": torch.relu,
        "silu": F.silu,
        "tanh": torch.tanh,
    }
    for name, f in functions.items():
        attributes = {"function": name}
        cases.append(Case("activate", (x(4), bias), attributes, lambda s, d, f=f: f(s + SCALE * d)))
    magnitude, norm = weight(4, role="adapter"), weight(4, positive=True)
    cases.append(Case("column_factor", (magnitude, norm), {}, lambda m, n: m / n))
    cases.append(Case("column_norm", (weight(3, 4), a_frozen, b_frozen), {}, column_norm_reference))
    prompt = weight(3, 4, role="adapter")
    for needs in ((True, True), (False, True), (True, False)):
        operands = (x(4, needs=needs[0]), dataclasses.replace(prompt, needs=needs[1]))
        cases.append(Case("virtual_tokens", operands, {}, virtual_tokens_reference))
    cases.append(Case("without_virtual", (x(4),), {}, without_virtual_reference))
    for p in (0.3, 1.0):
        attributes = {"p": p, "key": 3}
        cases.append(Case("dropout", (x(4),), attributes, dropout_reference(p, 3)))
    attributes = {"p": 0.3, "key": 3, "dtype": "f64"}
    cases.append(Case("dropout", (x(4, dtype="f32"),), attributes, dropout_reference(0.3, 3)))
    return cases


def model_cases() -> list[Case]:
    cases = []
    for offset, round_first in itertools.product((0.0, 1.0), (True, False)):
        attributes = {"eps": 1e-5, "offset": offset, "round_first": round_first}
        reference = rms_norm_reference(1e-5, offset)
        for operands in ((x(8), weight(8)), (x(3, 8), weight(8)), (x(8),)):
            cases += [Case("rms_norm", operands, attributes, reference)]
    for has_weight, has_bias in itertools.product((True, False), repeat=2):
        flags = {"eps": 1e-5, "weight": has_weight, "bias": has_bias}
        norm = layer_norm_reference(has_weight, has_bias, 1e-5)
        rest = (weight(8),) * (has_weight + has_bias)
        cases.append(Case("layer_norm", (x(8), *rest), flags, norm))
        cases.append(Case("layer_norm", (x(3, 8), *rest), flags, norm))
    # A weight for each head, as Cohere has it.
    flags = {"eps": 1e-5, "weight": True, "bias": False}
    norm = layer_norm_reference(True, False, 1e-5)
    cases.append(Case("layer_norm", (x(3, 8), weight(3, 8)), flags, norm))
    for style, size, op in itertools.product(
        ("half", "interleaved"), (8, 10), ("rope", "rope_backward")
    ):
        # Random cos and sin: a rule must not count on angles that repeat.
        angles = (x(8, needs=False), x(8, needs=False))
        rotation = rope_reference(style, 8, backward=op == "rope_backward")
        cases.append(Case(op, (x(3, size), *angles), {"rotary_dim": 8, "style": style}, rotation))
    targets = x(dtype="i64", needs=False)
    cases.append(Case("cross_entropy", (x(7), targets), {}, cross_entropy_reference))
    return cases


CASES = [
    *unary_cases(),
    *binary_cases(),
    *shape_cases(),
    *concat_cases(),
    *linear_cases(),
    *recurrent_cases(),
    *model_cases(),
]


def forward_graph(case: Case, dtype: str) -> Graph:
    builder = Builder("forward")
    names = []
    for i, operand in enumerate(case.operands):
        type_ = tensor(dtype if operand.dtype == "float" else operand.dtype, *operand.shape)
        if operand.role:
            names.append(builder.parameter(Parameter(Value(f"p{i}", type_), operand.role, f"p{i}")))
        else:
            names.append(builder.input(f"x{i}", type_))
    attributes = {k: dtype if v == "float" else v for k, v in case.attributes.items()}
    return builder.build(builder.add_many(case.op, names, **attributes))  # type: ignore[arg-type]


def backward_graph(case: Case, forward: Graph) -> tuple[Graph, list[str | None]]:
    """The graph of the rule, and the gradient of each input."""
    (node,) = forward.nodes
    builder = Builder("backward")
    incoming = builder.input("incoming", node.output.type)
    upstream = (incoming, *(None for _ in node.outputs[1:]))
    needs = tuple(operand.needs for operand in case.operands)
    context = Gradient(builder, forward, node, upstream, needs)
    gradients = operator(node.op).gradient(context)
    assert len(gradients) == len(node.inputs)
    return builder.build([name for name in gradients if name is not None]), gradients


def evaluate(graph: Graph, values: Mapping[str, Tensor], *, check_types: bool) -> dict[str, Tensor]:
    """All values of the graph, each node evaluated as it would be emitted."""
    known: dict[str, Any] = dict(values)
    for parameter in graph.parameters:
        if parameter.role == "adapter" and has_kernel_operand(graph, parameter.name):
            known[parameter.name] = AdapterWeight(known[parameter.name])
    for node in graph.nodes:
        names = [f"v{i}" for i in range(len(node.inputs))]
        expression = operator(node.op).source(names, dict(node.attributes))
        # Copies, as an emitted program may write over what it does not need again.
        arguments = {
            name: known[i].clone() if isinstance(known[i], Tensor) else known[i]
            for name, i in zip(names, node.inputs, strict=True)
        }
        result = eval(expression, {**NAMESPACE, **arguments})
        results = result if isinstance(result, tuple) else (result,)
        for output, value in zip(node.outputs, results, strict=True):
            known[output.name] = value
            if check_types:
                declared = getattr(torch, TORCH_NAMES[output.type.dtype])
                shape = tuple(COUNT if size == TOKENS else size for size in output.type.shape)
                assert (value.dtype, tuple(value.shape)) == (declared, shape), f"{node}"
    return {k: v.weight if isinstance(v, AdapterWeight) else v for k, v in known.items()}


def has_kernel_operand(graph: Graph, name: str) -> bool:
    """Whether a bypass network's operator reads the parameter, which then carries its scale."""
    bypass = {
        "activate",
        "bias_add",
        "column_factor",
        "column_norm",
        "embedding_outer",
        "embedding_shrink",
        "expand_add",
        "expand_backward",
        "expert_expand_add",
        "expert_expand_backward",
        "expert_scaled_outer",
        "expert_shrink",
        "expert_shrink_backward",
        "khatri_rao",
        "khatri_rao_backward",
        "scale",
        "scaled_outer",
        "sum_tokens",
        "singular_down",
        "singular_down_backward",
        "vera_down",
        "vera_up",
        "vera_up_backward",
        "virtual_tokens",
        "virtual_tokens_backward",
        "shrink",
        "shrink_backward",
    }
    return any(node.op in bypass for node in graph.consumers.get(name, ()))
