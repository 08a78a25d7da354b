"""Linear operators of one input joined with their LoRA, and attention with rotary embedding."""

from __future__ import annotations

import re

import pytest

from pcg.errors import VerifyError
from pcg.ir.analysis.verifier import verify
from pcg.ir.parser import parse_graph
from pcg.passes.registry import run_text

Q_AND_V = """\
graph @g(%x: f32[T, 8]) {
  frozen %wq: f32[6, 8] = "q.weight"
  frozen %wk: f32[4, 8] = "k.weight"
  frozen %wv: f32[4, 8] = "v.weight"
  adapter %aq: f32[r, 8] = "q.lora_A"
  adapter %bq: f32[6, r] = "q.lora_B"
  adapter %av: f32[r, 8] = "v.lora_A"
  adapter %bv: f32[4, r] = "v.lora_B"
  %q: f32[T, 6] = linear(%x, %wq)  @attn.q
  %q_s: f32[T, r] = shrink(%x, %aq)  @attn.q
  %q_z: f32[T, 6] = expand_add(%q, %q_s, %bq)  @attn.q
  %k: f32[T, 4] = linear(%x, %wk)  @attn.k
  %v: f32[T, 4] = linear(%x, %wv)  @attn.v
  %v_s: f32[T, r] = shrink(%x, %av)  @attn.v
  %v_z: f32[T, 4] = expand_add(%v, %v_s, %bv)  @attn.v
  return %q_z, %k, %v_z
}
"""
FUSED = (
    "  %q_z: f32[T, 6], %k: f32[T, 4], %v_z: f32[T, 4] = "
    "lora_linear(%x, %wq, %wk, %wv, %aq, %av, %bq, %bv) "
    "{adapted=(0, 2), bias=False, count=3}  @attn\n"
)


def fused(text: str) -> str:
    return run_text(text, "fuse_linears,fuse_lora")


def body(text: str) -> str:
    return "".join(line for line in text.splitlines(True) if re.match(r"  %", line))


def test_some_outputs_have_lora() -> None:
    assert body(fused(Q_AND_V)) == FUSED


def test_all_outputs_have_lora() -> None:
    both = re.sub(r"  %k: .*\n", "", Q_AND_V).replace("%q_z, %k", "%q_z")
    assert body(fused(both)) == (
        "  %q_z: f32[T, 6], %v_z: f32[T, 4] = lora_linear(%x, %wq, %wv, %aq, %av, %bq, %bv) "
        "{bias=False, count=2}  @attn\n"
    )


def test_lora_that_is_not_the_only_reader_stays_apart() -> None:
    """q is wanted as it is, too, so that it may not be written over."""
    found = body(fused(Q_AND_V.replace("return %q_z", "return %q, %q_z")))
    assert "lora_linear(%x, %wq, %wk, %wv, %av, %bv) {adapted=(2,), bias=False" in found
    assert found.count("shrink") == found.count("expand_add") == 1


def test_lora_whose_s_another_reads_stays_apart() -> None:
    """As of a fused product's parts, some of which are gathered before their LoRA is added."""
    shared = re.sub(r"  %v_s: .*\n", "", Q_AND_V).replace("%v_s", "%q_s")
    apart = shared.replace("linear(%x, %wv)", "linear(%q_s, %wv)")
    found = body(fused(apart.replace("%wv: f32[4, 8]", "%wv: f32[4, r]")))
    assert found.count("shrink") == 1
    assert found.count("expand_add") == 2
    assert "lora_linear(%x, %wq, %wk, %wv, %aq, %aq, %bq, %bv)" in body(fused(shared))


@pytest.mark.parametrize("adapted", ["(0, 3)", "(2, 0)", "(0, 0)", "()", "1"])
def test_outputs_that_cannot_be_adapted(adapted: str) -> None:
    wrong = fused(Q_AND_V).replace("adapted=(0, 2)", f"adapted={adapted}")
    with pytest.raises(VerifyError, match=r"lora_linear (has|takes)"):
        verify(parse_graph(wrong))


ATTENTION = """\
graph @g(%x: f32[T, 4, 8], %k: f32[T, 2, 8], %v: f32[T, 2, 8], %cos: f32[T, 6], %sin: f32[T, 6]) {
  %q_r: f32[T, 4, 8] = rope(%x, %cos, %sin) {rotary_dim=6, style="half"}
  %k_r: f32[T, 2, 8] = rope(%k, %cos, %sin) {rotary_dim=6, style="half"}
  %a: f32[T, 4, 8], %a_lse: f32[T, 4] = attention(%q_r, %k_r, %v) {scale=0.5, softcap=0.0, window=0}
  return %a
}
"""


def test_attention_turns_queries_and_keys() -> None:
    assert body(run_text(ATTENTION, "fuse_rope")) == (
        "  %a: f32[T, 4, 8], %a_lse: f32[T, 4] = attention(%x, %k, %v, %cos, %sin) "
        "{rotary=True, scale=0.5, softcap=0.0, window=0}\n"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return %a", "return %a, %k_r"),
        ('style="half"', 'style="interleaved"'),
        ("rope(%k, %cos, %sin)", "rope(%k, %sin, %cos)"),
        ("attention(%q_r, %k_r", "attention(%x, %k_r"),
        ("attention(%q_r, %k_r, %v)", "attention(%q_r, %k_r, %k_r)"),
    ],
)
def test_rotary_embedding_that_attention_does_not_compute_stays(old: str, new: str) -> None:
    kept = ATTENTION.replace(old, new)
    assert kept != ATTENTION
    assert body(run_text(kept, "fuse_rope")) == body(kept)


def test_rotary_embedding_of_wider_tables_stays() -> None:
    wide = ATTENTION.replace("f32[T", "bf16[T").replace("%a_lse: bf16", "%a_lse: f32")
    assert "rope(" not in run_text(wide, "fuse_rope")
    kept = wide.replace("%cos: bf16", "%cos: f32").replace("%sin: bf16", "%sin: f32")
    assert body(run_text(kept, "fuse_rope")) == body(kept)
