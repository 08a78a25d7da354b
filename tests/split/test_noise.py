"""Noise hides what a client sends, and changes no result beyond a stated rounding."""

import os
import random

import pytest
import torch

import pcg
import pcg.compiler as compiler
from pcg.errors import SplitError
from pcg.split.client.noise import Effects, Noise, Privacy
from pcg.split.messages import Piece
from tests.support import oracle
from tests.support import split_attacks as attacks
from tests.support.families import BY_NAME
from tests.support.split_base import KEY, results, running_base, undivided

METHODS = {
    "lora": pcg.LoraConfig(r=4, target_modules="all-linear"),
    "dora": pcg.LoraConfig(r=4, target_modules="all-linear", use_dora=True),
}
JOB = {"max_steps": 3, "batch_size": 2, "learning_rate": 1e-3}
PIECE = Piece("linear", ("w",))


@pytest.fixture(scope="module")
def whole():
    return undivided("llama3", 2)


def watched(base):
    """Return a list of what the base is given from now on."""
    seen = []
    run = base.loop.base.run

    def watching(piece, inputs):
        seen.append((piece, inputs[0].clone()))
        return run(piece, inputs)

    base.loop.base.run = watching
    return seen


@pytest.mark.parametrize(
    ("dtype", "precision", "scale", "bound"),
    [
        ("float32", "float64", 2.0**20, 1e-5),
        pytest.param("float32", "float32", 16.0, 1e-2, marks=pytest.mark.slow),
        pytest.param("bfloat16", "float64", 2.0**20, 4e-2, marks=pytest.mark.slow),
        pytest.param("bfloat16", "float32", 16.0, 4e-2, marks=pytest.mark.slow),
    ],
)
def test_the_error_is_within_the_bound_of_the_docs(dtype, precision, scale, bound):
    """In bf16 any product that is rounded the other way moves the result by some 1e-2."""
    model = oracle.random_model(BY_NAME["llama3"].config(2))
    whole = compiler.compile(model, verify=False, dtype=dtype)
    _, numbers = results(whole, METHODS["lora"], JOB)
    with (
        running_base(whole) as base,
        base.connect(privacy=Privacy("base", scale, pool=8, uses=4, precision=precision)) as split,
    ):
        _, own = results(split, METHODS["lora"], JOB)
        for name, expected in numbers.items():
            assert oracle.relative_error(own[name], expected) < bound, name


def test_a_base_sees_noise_and_a_second_base_nothing_else(whole):
    """The rows that the base is given are as large as the noise, and not near any that it hides."""
    with running_base(whole) as base, running_base(whole) as second:
        plain = watched(base)
        with base.connect(cut="linear") as split:
            results(split, METHODS["dora"], JOB)
        sent = list(plain)
        plain.clear()
        other = watched(second)
        options = Privacy(second.endpoint.transport(), effects_api_key=KEY)
        with base.connect(privacy=options) as split:
            results(split, METHODS["dora"], JOB)
    assert [piece for piece, _ in plain] == [piece for piece, _ in sent]
    assert {piece for piece, _ in other} == {piece for piece, _ in sent}
    for (piece, hidden), (_, bare) in zip(plain, sent, strict=True):
        size, own = (float(one.double().square().mean().sqrt()) for one in (hidden, bare))
        assert size > 500 * own, piece
        assert len(torch.unique(hidden, dim=0)) == len(hidden)
    for _, noise in other:  # unit noise: nothing of what it hides, not even its size
        assert abs(float(noise.square().mean()) - 1) < 0.2


class _Products(Effects):
    """Effects by a matrix that is here."""

    def __init__(self, weight):
        self.weight = weight
        self.asked = []

    def of(self, piece, noise):
        self.asked.append(len(noise))
        return noise @ self.weight.t()


def hidden_rows(noise, rows, weight):
    """Send zeros, so that what is sent is noise alone; returns all of it."""
    sent = []

    def ask(x):
        sent.append(x)
        return x @ weight.t()

    for count in rows:
        found = noise.run(PIECE, torch.zeros(count, weight.shape[1]), ask)
        assert float(found.abs().max()) < 1e-9
    return torch.cat(sent)


def test_rows_have_noise_of_their_own_and_pools_are_drawn_anew():
    weight = torch.randn(5, 40, dtype=torch.float64)
    effects = _Products(weight)
    noise = Noise(Privacy("base", 1024, pool=8, uses=3), effects)
    rows = hidden_rows(noise, [1, 5, 20, 24], weight)
    assert effects.asked == [8, 8, 8]
    first = rows[:24]
    assert torch.linalg.matrix_rank(first) == 8  # the space that is found by who has 24 rows
    assert torch.linalg.matrix_rank(rows) == 8 + 8 + 2
    scaled = first / first.square().mean().sqrt()
    apart = torch.cdist(scaled, scaled) + 99 * torch.eye(24)
    assert float(apart.min()) > 1
    # Within a round, rows are as independent as fresh noise.
    for begin in (0, 8, 16):
        assert torch.linalg.matrix_rank(rows[begin : begin + 8]) == 8
    assert noise.size_bytes == 8 * (40 + 5) * 8


def test_noise_that_is_used_once_is_drawn_for_all_rows_of_a_request():
    weight = torch.randn(5, 40, dtype=torch.float64)
    effects = _Products(weight)
    noise = Noise(Privacy("base", 1024, pool=4), effects)
    rows = hidden_rows(noise, [3, 30, 2], weight)
    assert effects.asked == [4, 29, 4]
    assert torch.linalg.matrix_rank(rows) == 35
    assert noise.drawn == 37


def test_the_size_of_noise_tells_the_largest_row_alone():
    weight = torch.eye(4, dtype=torch.float64)
    sent = []
    noise = Noise(Privacy("base", 1024, pool=4), _Products(weight))
    x = torch.tensor([[1e-9] * 4, [3.0] * 4, [0.0] * 4])
    found = noise.run(PIECE, x, lambda rows: sent.append(rows) or rows @ weight.t())
    assert torch.allclose(found, x, atol=1e-9)
    assert float(sent[0].abs().max(1).values.min()) > 100  # the zero row is hidden, too
    with pytest.raises(SplitError, match="not finite"):
        noise.run(PIECE, torch.tensor([[torch.nan] * 4]), lambda rows: rows)


@pytest.fixture
def seeded(monkeypatch):
    """Rows and noise of a seed, so that what an attack finds is the same in each run."""
    monkeypatch.setattr(os, "urandom", random.Random(5).randbytes)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        yield


def sent_rows(x, privacy):
    """What a base is sent of rows."""
    weight = torch.randn(3, x.shape[1], dtype=privacy.dtype)
    sent = []
    noise = Noise(privacy, _Products(weight))
    noise.run(PIECE, x, lambda rows: sent.append(rows) or rows @ weight.t())
    return sent[0]


SETTINGS = [("float32", 16.0), ("float64", 2.0**10), ("float64", 2.0**20)]


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("precision", "scale"), SETTINGS)
def test_digits_of_what_is_sent_tell_no_row(dtype, precision, scale):
    """The attacker knows the 64 rows that may have been sent, to the last bit."""
    known = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    sent = sent_rows(known, Privacy("base", scale, precision=precision))
    size = float(attacks.sizes_of(sent.double(), len(sent))[0])
    for name, scores in attacks.digit_scores(sent, known, size).items():
        found = int((scores.argmax(1) == torch.arange(len(known))).sum())
        assert found <= 6, name  # 1 by chance


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(("precision", "scale"), SETTINGS)
def test_every_multiple_of_the_step_is_sent_and_nothing_between(precision, scale):
    privacy = Privacy("base", scale, precision=precision)
    sent = sent_rows(torch.randn(256, 128), privacy).double()
    size = float(attacks.sizes_of(sent, len(sent))[0])
    multiples = sent / (size * privacy.step)
    assert torch.equal(multiples, multiples.round())
    for bit in range(8):  # 5 deviations
        share = float((multiples.long() >> bit & 1).double().mean())
        assert abs(share - 0.5) < 0.014, bit
    for begin in (0.0, 2.0, 3.0):  # where a uniform number of few bits would leave gaps
        far = multiples[(sent / size).abs() > begin].long()
        assert abs(float((far & 1).double().mean()) - 0.5) < 2.5 / len(far) ** 0.5


@pytest.mark.usefixtures("seeded")
def test_noise_has_the_normal_distribution():
    numbers = sent_rows(torch.zeros(256, 512), Privacy("base", 1.0)).reshape(-1).sort().values
    expected = torch.special.ndtr(numbers)
    steps = torch.arange(len(numbers), dtype=torch.float64) / len(numbers)
    distance = float((expected - steps).abs().max())
    assert distance < 1.63 / len(numbers) ** 0.5  # Kolmogorov and Smirnov, 1 in 100
    for bound in (3.0, 4.0):
        count = float((numbers.abs() > bound).sum())
        mean = 2 * float(torch.special.ndtr(torch.tensor(-bound))) * len(numbers)
        assert abs(count - mean) < 3 * mean**0.5


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("times", [1, 16])
def test_attacks_find_as_much_as_the_bound_says_and_no_more(times):
    """The likelihood ratio reaches the bound, and the nearest row stays below it."""
    generator = torch.Generator().manual_seed(1)
    known = torch.nn.functional.normalize(torch.randn(64, 64, generator=generator)) * 8
    ids = torch.arange(64).repeat(32)
    privacy = Privacy("base", 32, precision="float32")
    sent = sent_rows(known[ids].repeat(times, 1), privacy).double()
    size = float(attacks.sizes_of(sent, len(sent))[0])
    mean = sent.view(times, len(ids), -1).mean(0)
    right, wrong = known[ids], known[ids.roll(1)]
    chosen = attacks.told_apart(mean, right, wrong)
    bound = attacks.choice_bound((right - wrong).norm(dim=1) * times**0.5 / size)
    assert abs(chosen - bound) < 0.035  # 3 deviations of 2,048 choices
    found = float((attacks.nearest(mean, known) == ids).double().mean())
    most = attacks.guess_bound(1 / 64, 8 * times**0.5 / size)
    assert 0.5 * most < found < most + 3 * (most / len(ids)) ** 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"effects": "elsewhere"}, "host:port of a second"),
        ({"effects": "base", "scale": 0}, "more than 0"),
        ({"effects": "base", "scale": 1e5, "precision": "float32"}, "no digits"),
        ({"effects": "base", "precision": "float32"}, "1024 at most"),
        ({"effects": "base", "precision": "bfloat16"}, "use float32 or float64"),
        ({"effects": "base", "pool": 0}, "pool=0"),
        ({"effects": "base", "uses": True}, "uses=True"),
    ],
)
def test_options_that_hide_nothing_are_refused(options, message):
    with pytest.raises(SplitError, match=message):
        Privacy(**options)


def test_what_computes_effects_has_to_be_able_to(whole):
    with running_base(whole) as base:
        with pytest.raises(SplitError, match="--downloads"):
            base.connect(privacy="download")
        with pytest.raises(SplitError, match="the one that noise is to hide from"):
            base.connect(privacy=Privacy(base.endpoint.transport()))
        with base.connect() as split:
            name = next(iter(split.caller.facts.pieces))
            with pytest.raises(SplitError, match="--downloads"):
                split.caller.call("rows", name=name, begin=1, end=2)
