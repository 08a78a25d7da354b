"""Formulas in the degree, the rank and the length: exact bytes, few pieces, layers that differ."""

import pytest
import sympy

import pcg
from pcg.errors import MemoryBudgetError, ParallelError
from pcg.explain import explain as explaining
from pcg.explain import plan_validity
from pcg.explain.formulas import DEGREE, AtDegree, in_degree, in_rank, lengths_of_pieces
from pcg.ir.analysis.storages import SEQUENCES, TOKENS_OF_BATCH
from pcg.ir.types import CONTEXT, RANK
from pcg.source import resolve
from tests.support.families import BY_NAME
from tests.support.peft_cases import ALL

# ------------------------------------------------------------------------------- of a whole model


@pytest.fixture
def memory_alone(monkeypatch):
    """Sites, and where plans stay the best, take most of the time, and are no matter here."""
    rows = {"base": [], "bypass": []}
    monkeypatch.setattr(explaining, "parallel_rows", lambda *_: dict(rows))
    monkeypatch.setattr(explaining, "parallel_regions", lambda *_: {})
    monkeypatch.setattr(plan_validity, "valid_range", lambda _, here, most: (here, here))


def check(config, asked, degrees, **options):
    """All formulas are exact at all degrees: they give what the report of each says."""
    options = {"seq": 64, **options}
    report = pcg.explain(config, tp=asked, find_region=True, **options)
    assert set(report.formula_degrees) == set(report.formulas) == set(report.memory_bytes)
    assert set(report.formula_degrees.values()) == {degrees}
    values = {"B": 1, "S": options["seq"], "r": 16}
    symbols = {n: sympy.Symbol(n, integer=True, positive=True) for n in (*values, "tp")}
    for degree in degrees:
        found = pcg.explain(config, tp=degree, **options).memory_bytes
        at = {symbols[name]: value for name, value in {**values, "tp": degree}.items()}
        for name, text in report.formulas.items():
            assert sympy.sympify(text, locals=symbols).subs(at) == found[name], (name, degree)


@pytest.mark.slow
@pytest.mark.usefixtures("memory_alone")
@pytest.mark.parametrize(("heads", "degrees"), [(8, (2, 4, 8)), (16, (2, 4, 8, 16))])
@pytest.mark.parametrize("parts", [False, True])
def test_the_bytes_of_each_degree(heads, degrees, parts):
    """Of two KV heads: fewer than ranks."""
    config = {**BY_NAME["llama3"].config(2), "num_attention_heads": heads}
    check(config, 4, degrees, sequence_parallel=parts)


@pytest.mark.slow
@pytest.mark.usefixtures("memory_alone")
@pytest.mark.parametrize(
    ("name", "asked", "degrees"),
    [("falcon-7b", 2, (2, 4)), ("gpt2", 4, (2, 4)), ("llama3", 4, (2, 4)), ("opt", 2, (2, 4))],
)
@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.5}, {"peft": "ia3"}], ids=str)
def test_the_bytes_of_each_degree_of_every_family(name, asked, degrees, options):
    check(BY_NAME[name].config(2), asked, degrees, **options)


@pytest.mark.usefixtures("memory_alone")
def test_formulas_of_llama():
    config = {**resolve("meta-llama/Llama-3.1-8B").config, "num_hidden_layers": 2}
    report = pcg.explain(config, "ia3", tp=4, seq=64, serve_tokens=10, find_region=True)
    assert report.formula_degrees["total"] == (2, 4, 8, 16, 32)
    # Eight KV heads of 128 numbers in bf16, and keys and values, in two layers.
    assert report.formulas["kv_cache"] == "Piecewise((81920/tp, tp <= 8), (10240, True))"
    weights = sympy.sympify(report.formulas["weights"])
    (few, _), (many, _) = weights.args
    norms = 5 * 4096 * 2 + 64 * 4  # and the frequencies of positions
    head = 2 * 2 * 128 * 4096 * 2  # K and V of one, which each rank then holds, in two layers
    whole, parted = (formula.as_coefficients_dict() for formula in (few, many))
    assert whole[sympy.S.One] == norms
    assert parted[sympy.S.One] == norms + head
    text = report.to_text(formulas=True)
    assert "  KV cache    = 81920/tp  up to tp = 8\n" in text
    assert "              = 10240  above\n" in text
    assert "Exact at tp = 2, 4, 8, 16, 32: weights, adapters, " in text


# ----------------------------------------------------------------------------------------- pieces


def formulas(values, held=None, fullest=None, asked=2):
    """Of activations and a workspace by degree; checks that they are exact at each."""

    def at(degree):
        if degree not in values:
            error = MemoryBudgetError if degree == 64 else ParallelError
            raise error(f"none at {degree}")
        kinds = dict(zip(("activations", "workspace"), values[degree], strict=True))
        found = {name: sympy.sympify(formula) for name, formula in kinds.items()}
        alike, moment = (held or {}).get(degree, ""), (fullest or {}).get(degree, "")
        return AtDegree({**found, "total": sympy.Add(*found.values())}, alike, moment)

    made, exact = in_degree(at, asked)
    assert set(exact.values()) == {tuple(values)}
    for degree, (activations, workspace) in values.items():
        for name, value in (("activations", activations), ("workspace", workspace)):
            assert sympy.expand(made[name].subs(DEGREE, degree) - value) == 0
        total = made["total"].subs(DEGREE, degree)
        assert sympy.expand(total - activations - workspace) == 0
    return made


B = SEQUENCES


def test_a_line_through_all_degrees():
    found = formulas({d: (3 * B + sympy.Rational(16, d) * B, 5) for d in (2, 4, 8, 16)})
    assert found["activations"] == 3 * B + 16 * B / DEGREE
    assert found["total"] == 3 * B + 16 * B / DEGREE + 5


def test_degrees_that_are_held_otherwise_have_a_piece_of_their_own():
    values = {2: (8, 1), 4: (4, 1), 8: (3, 1), 16: (2, 1)}
    found = formulas(values, held={2: "few", 4: "few", 8: "many", 16: "many"})
    many = 1 + 16 / DEGREE
    assert found["activations"] == sympy.Piecewise((16 / DEGREE, DEGREE <= 4), (many, True))
    assert found["workspace"] == 1


def test_what_is_held_otherwise_but_as_large_is_one_piece():
    values = {2: (8, 1), 4: (4, 1), 8: (2, 1)}
    found = formulas(values, held={2: "a", 4: "b", 8: "b"})
    assert found["activations"] == 16 / DEGREE


def test_two_degrees_that_are_not_alike_give_no_line():
    found = formulas({2: (8, 1), 4: (5, 1)}, held={2: "a", 4: "b"})
    assert found["activations"] == sympy.Piecewise((8, DEGREE <= 2), (5, True))


def test_a_workspace_is_of_its_moment():
    values = {2: (4, 9), 4: (4, 4), 8: (4, 2)}
    found = formulas(values, fullest={2: "loss", 4: "backward", 8: "backward"})
    assert found["workspace"] == sympy.Piecewise((9, DEGREE <= 2), (16 / DEGREE, True))
    assert found["activations"] == 4


def test_what_is_no_line_has_a_piece_for_each_degree():
    found = formulas({2: (9, 1), 4: (5, 1), 8: (3, 1), 16: (7, 1), 32: (1, 1)})
    line = 1 + 16 / DEGREE
    pieces = (line, DEGREE <= 8), (sympy.Integer(7), DEGREE <= 16), (sympy.Integer(1), True)
    assert found["activations"] == sympy.Piecewise(*pieces)
    assert found["workspace"] == 1
    found = formulas({2: (7, 1), 4: (5, 1), 8: (6, 1)})
    assert [formula for formula, _ in found["activations"].args] == [7, 5, 6]


def test_parts_of_tokens():
    values = {d: (4 * sympy.ceiling(TOKENS_OF_BATCH / d), 0) for d in (2, 4, 8)}
    found = formulas(values)
    assert found["activations"] == 4 * sympy.ceiling(TOKENS_OF_BATCH / DEGREE)


def test_what_was_asked_for_is_not_left_out():
    with pytest.raises(ParallelError, match="none at 4"):
        formulas({2: (1, 1)}, asked=4)
    with pytest.raises(MemoryBudgetError, match="none at 64"):
        formulas({2: (1, 1)}, asked=64)


# ----------------------------------------------------------------------------------- in the rank


def test_lines():
    def at(rank):
        return {
            "weights": 5 * TOKENS_OF_BATCH,
            "adapters": 3 * rank * TOKENS_OF_BATCH,
            "total": (5 + 3 * rank) * TOKENS_OF_BATCH,
        }

    expected = {
        "weights": 5 * TOKENS_OF_BATCH,
        "adapters": 3 * RANK * TOKENS_OF_BATCH,
        "total": 5 * TOKENS_OF_BATCH + 3 * RANK * TOKENS_OF_BATCH,
    }
    assert in_rank(at, 16) == expected


def test_the_total_is_the_sum_where_one_is_no_line():
    workspace = {16: 616 * TOKENS_OF_BATCH, 17: 620 * TOKENS_OF_BATCH, 18: 552 * TOKENS_OF_BATCH}

    def at(rank):
        kinds = {"adapters": 3 * rank * TOKENS_OF_BATCH, "workspace": workspace[rank]}
        return {**kinds, "total": sympy.expand(sum(kinds.values()))}

    found = in_rank(at, 16)
    assert found["workspace"] == 616 * TOKENS_OF_BATCH
    assert found["total"] == 3 * RANK * TOKENS_OF_BATCH + 616 * TOKENS_OF_BATCH
    assert found["total"].subs(RANK, 16) == at(16)["total"]


def test_without_a_plan_at_other_ranks_formulas_have_no_rank():
    only = {"adapters": sympy.Integer(48), "total": sympy.Integer(48)}
    assert in_rank(lambda rank: only if rank == 16 else None, 16) == only


S = CONTEXT


def check_corners(config, report, *more):
    """Formulas give what the report of each length says, at the ends of all pieces."""
    symbols = {str(symbol): symbol for symbol in (B, S, RANK)}
    formulas = {name: sympy.sympify(t, locals=symbols) for name, t in report.formulas.items()}
    assert report.region is not None
    low, high = report.region
    whens = [when for _, when in formulas["workspace"].args[:-1]]
    assert whens, "one moment alone is the fullest"
    ends = {int(when.rhs) for when in whens}
    for seq in sorted({low, high, *more, *ends, *(end + 1 for end in ends)}):
        found = pcg.explain(config, batch=report.batch, seq=seq).memory_bytes
        at = {B: report.batch, S: seq, RANK: 16}
        for name, formula in formulas.items():
            assert formula.subs(at) == found[name], (name, seq)


@pytest.mark.slow
def test_formulas_of_gemma_are_exact_at_the_corners_of_their_region():
    config = {**resolve("google/gemma-2-27b").config, "num_hidden_layers": 2}
    report = pcg.explain(config, seq=4096, find_region=True)
    assert report.region[0] <= 64 <= 4096 <= report.region[1]
    assert "  up to S = " in report.to_text(formulas=True)
    check_corners(config, report, 64, 4096)


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        ((3 * B * S,), [(1, 1000)]),
        ((3 * B * S, B * S**2), [(1, 3), (4, 1000)]),
        ((100 + B * S, 3 * B * S, B * S**2 / 10 + B * S), [(1, 31), (32, 1000)]),
        ((100 + B * S, 9 * B * S, B * S**2 / 10), [(1, 12), (13, 90), (91, 1000)]),
        ((B * S**2, 20000 + 400 * B * S), [(1, 444), (445, 1000)]),
    ],
)
def test_pieces_are_the_upper_envelope(moments, expected):
    def fullest(seq):
        return max(moments, key=lambda formula: formula.subs({B: 1, S: seq}))

    runs = lengths_of_pieces(fullest, 1, 1000, 1)
    assert runs == expected
    for low, high in runs:
        middle = fullest((low + high) // 2)
        for seq in range(low, high + 1):
            at = {B: 1, S: seq}
            assert middle.subs(at) == fullest(seq).subs(at)


CONFIG = BY_NAME["llama3"].config(6)
LAST = pcg.LoraConfig(r=4, target_modules=tuple(ALL), layers_to_transform=(5,))
MIDDLE = pcg.LoraConfig(r=4, target_modules=("q_proj", "up_proj"), layers_to_transform=(2,))
RANKS = pcg.LoraConfig(
    r=4, target_modules=("q_proj", "v_proj"), rank_pattern={r"layers\.[01]\..*": 2}
)


def test_groups_of_layers_and_their_totals():
    report = pcg.explain(CONFIG, MIDDLE, seq=64)
    groups = report.layer_groups
    assert [group.layers for group in groups] == [(0, 1), (2,), (3, 4, 5)]
    assert [group.has_backward for group in groups] == [False, True, True]
    trained = 4 * (64 + 64) + 4 * (64 + 96)
    assert [group.trained for group in groups] == [0, trained, 0]
    assert report.parameters["trainable"] == trained
    outside = sum(
        row.bytes for row in report.saved if row.tensor.startswith(("prologue.", "epilogue."))
    )
    layers = sum(len(group.layers) * group.bytes for group in groups)
    assert layers + outside == report.memory_bytes["activations"]
    for group in groups:
        rows = [row for row in report.saved if row.tensor.startswith(f"{group.name}.")]
        assert {row.layers for row in rows} == {len(group.layers)}
        assert any(row.decision == "save" for row in rows) == group.has_backward
        assert bool(group.bytes) == group.has_backward
    assert "nothing is trained in the layer or below it" in report.to_text(tensors=True)


def test_the_text_shows_groups_where_layers_differ():
    report = pcg.explain(CONFIG, LAST, seq=64)
    assert "  0-4                            -         no backward\n" in report.to_text()
    # The graph is of the layer that is trained, though most are not.
    assert any(node.decision == "save" for node in report.graph)
    assert "trained a layer" not in pcg.explain(CONFIG, "lora", seq=64).to_text()
    assert report.to_json()["layer_groups"][0]["layers"] == [0, 1, 2, 3, 4]


def test_the_timeline_goes_back_to_the_lowest_trained_layer():
    labels = [moment.label for moment in pcg.explain(CONFIG, MIDDLE, seq=64).timeline]
    forward = [f"forward {layer}" for layer in range(6)]
    assert labels == [*forward, "loss", *(f"backward {layer}" for layer in (5, 4, 3, 2))]


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(LAST, marks=pytest.mark.slow), MIDDLE, RANKS],
    ids=["last", "middle", "ranks"],
)
def test_formulas_give_the_bytes_of_other_steps(recipe):
    report = pcg.explain(CONFIG, recipe, batch=2, seq=64, find_region=True)
    assert report.region is not None
    other = {"batch": 3, "seq": 72}
    rank = None if recipe.rank_pattern else 5
    found = pcg.explain(CONFIG, recipe if rank is None else recipe.with_rank(rank), **other)
    values = {"B": 3, "S": 72, "r": rank}
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in values}
    for name, text in report.formulas.items():
        formula = sympy.sympify(text, locals=symbols)
        at = {symbols[key]: value for key, value in values.items() if value is not None}
        assert formula.subs(at) == found.memory_bytes[name], name


def test_one_trained_layer_of_llama_costs_one_layer():
    config = resolve("meta-llama/Llama-3.1-8B").config
    recipe = pcg.LoraConfig(r=16, target_modules=tuple(ALL), layers_to_transform=(31,))
    report = pcg.explain(config, recipe)
    every = pcg.explain(config, "lora")
    ours, eager, whole = report.stage("compressed"), report.stage("eager"), every.stage("eager")
    assert whole is not None
    # 101 MiB of eager's 790; on every layer 2,971.
    assert ours.bytes < 0.13 * eager.bytes
    assert [group.layers for group in report.layer_groups] == [tuple(range(31)), (31,)]
