"""Other people's metrics of random texts, as JSON: rapidfuzz, sacrebleu, nltk and rouge-score."""

from __future__ import annotations

import json
import os
import random

import rapidfuzz
import sacrebleu
from nltk.stem.porter import PorterStemmer
from nltk.translate.gleu_score import sentence_gleu
from nltk.translate.meteor_score import single_meteor_score
from rouge_score.rouge_scorer import RougeScorer

TEXT = """
the cat cats sat sitting on mats, mat. relational running runs Ran
3.14 1,000 U.S. e-mail it's generalization happily hopping 'quoted' (paren) &amp; über
naïve x-1 42 A/B controll agreed plastered motoring sky happy electricity formalize
ponies caresses feed adoption
"""
WORDS = TEXT.split()
PAIRS = [
    ("", ""),
    ("", "a"),
    ("a", ""),
    ("the cat sat on the mat", "the cat sat on the mat"),
    ("the cat sat on the mat", "on the mat sat the cat"),
    ("a b c", "x y z"),
    ("He's 3.5% off, isn't he?", "He is 3.5 % off , is n't he ?"),
    ("日本語のテキスト", "日本語テスト"),
]


class NoWordnet:
    """Synonyms of nobody."""

    def synsets(self, word: str) -> list[str]:
        return []


ROUGE = RougeScorer([*(f"rouge{n}" for n in range(1, 6)), "rougeL"], use_stemmer=False)
STEMMER = PorterStemmer(mode=PorterStemmer.ORIGINAL_ALGORITHM)


def metrics(text: str, reference: str) -> dict[str, float]:
    found = ROUGE.score(reference, text)
    one, other = text.split(), reference.split()
    return {
        "fuzzy_match": rapidfuzz.fuzz.ratio(text, reference) / 100,
        "bleu": sacrebleu.sentence_bleu(text, [reference]).score / 100,
        "gleu": sentence_gleu([other], one),
        "meteor": single_meteor_score(other, one, stemmer=STEMMER, wordnet=NoWordnet()),
        **{f"rouge_{n}": found[f"rouge{n}"].fmeasure for n in range(1, 6)},
        "rouge_l": found["rougeL"].fmeasure,
    }


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts, and others that are theirs with changes."""
    draw = random.Random(seed)
    found = list(PAIRS)
    for _ in range(count):
        one = draw.choices(WORDS, k=draw.randint(1, 14))
        other = list(one) if draw.random() < 0.7 else draw.choices(WORDS, k=draw.randint(1, 14))
        for _ in range(draw.randint(0, 4)):
            place = draw.randrange(len(other))
            other[place : place + 1] = draw.choice([[draw.choice(WORDS)], other[place:][:1] * 2])
        if draw.random() < 0.3:
            draw.shuffle(other)
        found.append((" ".join(one), draw.choice((" ", "  ", "\n")).join(other)))
    return found


if __name__ == "__main__":
    asked = pairs(int(os.environ.get("PCG_PAIRS", "24")), int(os.environ.get("PCG_SEED", "0")))
    rows = [{"text": one, "reference": other, **metrics(one, other)} for one, other in asked]
    print(json.dumps(rows))
