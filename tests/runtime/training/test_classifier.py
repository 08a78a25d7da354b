"""Sequence classifiers, against transformers' and peft's."""

import math
import operator

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Gemma3Config

import pcg
from pcg.errors import AdapterError, DataError, GenerationError, UnsupportedError
from pcg.evaluation import evaluate
from pcg.merged_checkpoint import merge
from pcg.runtime.data.dataset import load_examples
from pcg.train.preference.dpo import dpo
from pcg.train.preference.options import DpoArguments
from tests.support import oracle, tiny_llama
from tests.support.families import BY_NAME
from tests.support.peft_cases import trained_gradients, wrap
from tests.support.prompts import prompts

LABELS = ("ham", "spam", "unsure")
ROWS = [
    {"text": "win a prize now", "label": "spam"},
    {"text": "lunch at noon?", "label": 0},
    {"text": "the report, as promised yesterday", "label": "ham", "weight": 2.0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama.save(tmp_path_factory.mktemp("models") / "causal")


@pytest.fixture(scope="module")
def executor(folder):
    return pcg.compile(folder, labels=LABELS, device="cpu")


@torch.no_grad()
def probabilities(model, ids):
    """transformers' probability of each label."""
    return model(torch.tensor([ids])).logits[0].softmax(-1)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "gemma2"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "gpt_oss",
                "qwen3_next",
                "deepseek_v3",
                "minicpm3",
                "mixtral",
                "phi3",
                "gptj",
            )
        ),
    ],
)
def test_probabilities_are_those_of_transformers(family, tmp_path):
    fields = dict(BY_NAME[family].config(2))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, num_labels=3)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    sequences = prompts((9, 1, 4))
    oracle.save_model(model, tmp_path)
    for given in (model, tmp_path):
        found = pcg.compile(given, device="cpu").classify(sequences)
        for labels, ids in zip(found, sequences, strict=True):
            assert list(labels) == ["LABEL_0", "LABEL_1", "LABEL_2"]
            torch.testing.assert_close(
                torch.tensor([*labels.values()]), probabilities(model, ids), atol=1e-6, rtol=1e-5
            )


def test_a_checkpoint_of_a_causal_lm_becomes_a_classifier(folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    (labels,) = pcg.compile(model, device="cpu").classify([[5, 9, 2]])
    found = torch.tensor([*labels.values()])
    torch.testing.assert_close(found, probabilities(model, [5, 9, 2]), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("saves", [False, True], ids=["LoRA of the head", "the whole head"])
def test_gradients_are_those_of_peft(folder, executor, tmp_path, saves):
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    # Both draw a head, as the checkpoint has none.
    model.score.weight.data.copy_(executor.state.weight_store.linear()["score"])
    recipe = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj", "score"])
    if saves:  # for this task, peft adds the head to modules_to_save
        recipe = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS")
    wrapped = wrap(model, recipe)
    wrapped.save_pretrained(tmp_path)
    executor.add_adapter("theirs", tmp_path, replace=True)
    runner = executor.training_runner("theirs")
    numbers = [LABELS.index(row["label"]) if row["label"] else 0 for row in ROWS]
    ids = [executor.tokenizer.encode(row["text"]) for row in ROWS]
    examples = load_examples(ROWS, executor.tokenizer, labels=LABELS).examples
    expected = sum(
        row.get("weight", 1.0) * wrapped(torch.tensor([x]), labels=torch.tensor([k])).loss
        for row, x, k in zip(ROWS, ids, numbers, strict=True)
    )
    (expected / 3).backward()
    loss = runner.forward_backward(examples, 3)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    theirs = trained_gradients(wrapped)
    assert runner.parameters.keys() == theirs.keys()
    for path, parameter in runner.parameters.items():
        torch.testing.assert_close(parameter.grad, theirs[path], atol=1e-7, rtol=1e-4)


def test_peft_opens_what_is_learned(folder, executor, tmp_path):
    """A new adapter brings its own head, over a base of another one."""
    executor.finetune(ROWS, "mine", peft="lora", max_steps=2, learning_rate=1e-2)
    executor.save_adapter("mine", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    opened = peft.PeftModel.from_pretrained(model, tmp_path).eval()
    assert opened.active_peft_config.task_type == "SEQ_CLS"
    texts = [row["text"] for row in ROWS]
    for text, labels in zip(texts, executor.classify(texts, "mine"), strict=True):
        theirs = probabilities(opened, executor.tokenizer.encode(text))
        torch.testing.assert_close(torch.tensor([*labels.values()]), theirs, atol=1e-6, rtol=1e-5)
    merge(folder, tmp_path, tmp_path / "merged", labels=LABELS)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.id2label == dict(enumerate(LABELS))
    theirs = probabilities(opened, [5, 9, 2])
    torch.testing.assert_close(probabilities(merged, [5, 9, 2]), theirs, atol=1e-6, rtol=1e-5)
    (labels,) = pcg.compile(tmp_path / "merged", device="cpu").classify([[5, 9, 2]])
    assert labels == pytest.approx(dict(zip(LABELS, theirs.tolist(), strict=True)), rel=1e-5)


def test_a_text_may_take_every_position(folder, executor):
    """The label after a text takes none; a longer text is cut or refused."""
    most = executor.state.max_positions
    ids = [7] * (most + 1)
    text = executor.tokenizer.decode(ids)
    assert executor.tokenizer.encode(text) == ids
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3).eval()
    model.score.weight.data.copy_(executor.state.weight_store.linear()["score"])
    theirs = probabilities(model, ids[:most])
    (labels,) = executor.classify([ids[:most]])
    torch.testing.assert_close(torch.tensor([*labels.values()]), theirs, atol=1e-6, rtol=1e-5)
    with pytest.raises(GenerationError, match=f"{most + 1} tokens"):
        executor.classify([ids])
    rows = [{"text": text, "label": "spam"}]
    with pytest.raises(DataError, match=f"{most + 1} tokens"):
        executor.finetune(rows, peft="lora", max_steps=1)
    with pytest.raises(DataError, match=f"{most + 1} tokens"):
        evaluate(executor, rows, adapters=[None])
    (loss,) = executor.finetune(rows, "whole", peft="lora", max_steps=1, max_length=most).losses
    read = load_examples(rows, executor.tokenizer, max_length=most, labels=LABELS)
    assert executor.finetune(read, "read", peft="lora", max_steps=1, max_length=most).losses == (
        loss,
    )
    (scores,) = evaluate(executor, rows, adapters=[None], max_length=most)
    assert scores.loss == pytest.approx(loss) == pytest.approx(-theirs[1].log().item(), rel=1e-5)


def test_labels_of_a_composite_checkpoint(tmp_path):
    """They are fields of the composite's config.json, not of its language model's."""
    text = dict(BY_NAME["gemma3"].config(1))
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=tower, id2label=dict(enumerate(LABELS)))
    model = AutoModelForSequenceClassification.from_config(config).eval()
    oracle.save_model(model, tmp_path)
    executor = pcg.compile(tmp_path, device="cpu")
    recipe = {"peft_type": "LORA", "target_modules": ["down_proj"]}
    recipe["modules_to_save"] = ["language_model.norm"]
    adapter = executor.add_adapter("a", recipe)
    for tensor in (*adapter.replaced.values(), *(w.b for w in adapter.weights.values())):
        tensor.normal_(std=0.1)
    executor.save_adapter("a", tmp_path / "a")
    executor.add_adapter("a", tmp_path / "a", replace=True)
    expected = {None: probabilities(model, [5, 9, 3])}
    opened = peft.PeftModel.from_pretrained(model, tmp_path / "a").eval()
    for name, theirs in {**expected, "a": probabilities(opened, [5, 9, 3])}.items():
        (labels,) = executor.classify([[5, 9, 3]], name)
        assert labels == pytest.approx(dict(zip(LABELS, theirs.tolist(), strict=True)), rel=1e-4)


def test_adapters_of_other_tasks(folder, executor, tmp_path):
    executor.add_adapter("head", "lora")
    executor.save_adapter("head", tmp_path)
    with pytest.raises(UnsupportedError, match="on a sequence classifier"):
        executor.add_adapter("other", "ia3")
    causal = pcg.compile(folder, device="cpu")
    with pytest.raises(AdapterError, match="is of a sequence classifier"):
        causal.add_adapter("mine", tmp_path)
    with pytest.raises(AdapterError, match="is of a sequence classifier"):
        merge(folder, tmp_path, tmp_path / "merged")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "x"}], "learns rows of 'text' and 'label'"),
        ([{"text": "x", "label": "eggs"}], "the classifier's are ham, spam, unsure, or 0 to 2"),
        ([{"text": "x", "label": 3}], "or 0 to 2"),
        ([{"text": "x", "label": True}], "label True"),
        ([{"text": "", "label": 1}], "'text' is empty"),
        ([{"text": 5, "label": 1}], "'text'"),
        (["x"], "has a string"),
    ],
)
def test_wrong_rows(executor, rows, message):
    with pytest.raises(DataError, match=message):
        executor.finetune(rows, peft="lora", max_steps=1)


def test_empty_texts_are_dropped(executor):
    rows = [{"text": "", "label": 0}, *ROWS]
    read = load_examples(rows, executor.tokenizer, labels=LABELS, empty="drop")
    assert (len(read), read.dropped) == (len(ROWS), 1)


def test_a_single_text_is_no_list_of_characters(executor):
    assert executor.classify("win") == executor.classify(["win"])


def test_evaluation(executor):
    (base,) = evaluate(executor, ROWS, adapters=[None])
    found = [[*labels.values()] for labels in executor.classify([row["text"] for row in ROWS])]
    chosen = zip(found, (1, 0, 0), strict=True)
    assert base.loss == pytest.approx(-sum(math.log(each[k]) for each, k in chosen) / 3, rel=1e-5)
    right = [each.index(max(each)) for each in found]
    assert base.accuracy == sum(map(operator.eq, right, (1, 0, 0))) / 3


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 2},
        {"max_new_tokens": 0, "prompt_logprobs": 1},
        {"max_new_tokens": 1, "repetition_penalty": 1.5},
        {"max_new_tokens": 1, "guided_regex": "a"},
    ],
)
def test_a_classifier_generates_no_text(executor, options):
    with pytest.raises(GenerationError, match="generates no text"):
        executor.generate("x", **options)


def test_a_trainer_learns_labels(executor):
    with executor.trainer("tk", peft="lora") as trainer:
        with pytest.raises(DataError, match="vocabulary of 3 does not; a sequence classifier's"):
            trainer.forward_backward([pcg.Datum([5, 6, 7], targets=[-100, -100, 3])])
        scored = trainer.forward_backward([pcg.Datum([5, 6, 7], targets=[-100, -100, 2])])
    (labels,) = executor.classify([[5, 6, 7]])
    assert scored.loss == pytest.approx(-math.log(labels["unsure"]), rel=1e-5)


def test_refusals(executor, folder):
    with pytest.raises(DataError, match="preferences of a sequence classifier"):
        dpo(executor, DpoArguments([{"prompt": "a", "chosen": "b", "rejected": "c"}]))
    with pytest.raises(DataError, match="a chat template has no effect"):
        executor.finetune(ROWS, peft="lora", max_steps=1, chat_template="{{ messages }}")
    with pytest.raises(DataError, match="a chat template has no effect"):
        evaluate(executor, ROWS, chat_template_kwargs={"enable_thinking": False})
    for labels in (["one"], ["one", "one"], "one", ["one", ""]):
        with pytest.raises(UnsupportedError, match="names of two or more classes"):
            pcg.compile(folder, labels=labels)
    config = AutoConfig.from_pretrained(folder, num_labels=3).to_dict()
    config = {**config, "architectures": ["LlamaForSequenceClassification"]}
    with pytest.raises(UnsupportedError, match=r"names 2 classes, and the checkpoint's head has 3"):
        pcg.explain(config, labels=["a", "b"])
    with pytest.raises(UnsupportedError, match="names two labels alike"):
        pcg.explain({**config, "id2label": {0: "a", 1: "a", 2: "b"}})
