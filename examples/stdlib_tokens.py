"""The tokenizer of `examples/checkpoint/`, and the token stream that it is pretrained on.

Byte-level BPE, so every text round-trips exactly. Documents stand between <|endoftext|> tokens; the
tokenizer itself adds none.
"""

import numpy as np
from stdlib_corpus import SourceFile
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|endoftext|>", "<|pad|>"
VOCAB_SIZE = 3072
MAX_LENGTH = 1024

# A newline run keeps the whole indent after it, so "\n        return" is two tokens; a word keeps
# one sign before it ("(self", ".append", "_name"); digits go by at most three.
SPLIT_PATTERN = (
    r"(?:\r?\n)+[ \t]*|[^\s\p{L}\p{N}]?\p{L}+| ?\p{L}+| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+|[ \t]+(?=[ \t])|\s"
)

# Plain comment lines and no new special tokens: the base model has seen nothing else.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '# ' + message['role'] + ':\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant:\\n' }}{% endif %}"
)

# Share of the tokens " word" that training sees as " " and "word": a prompt that ends in a space
# ("def ") splits there, and would otherwise be a context that the model never met.
SPACE_SPLIT_SHARE = 0.02


def train_tokenizer(files: list[SourceFile]) -> PreTrainedTokenizerFast:
    """Train the byte-level BPE tokenizer; every text round-trips exactly."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((file.text for file in files), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def pack(files: list[SourceFile], tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """Join the files, each between <|endoftext|> tokens. Returns ids: [tokens], int32."""
    ids = [tokenizer.eos_token_id]
    for file in files:
        ids += tokenizer(file.text, add_special_tokens=False, verbose=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return np.array(ids, dtype=np.int32)


def split_some_spaces(
    ids: np.ndarray, tokenizer: PreTrainedTokenizerFast, rng: np.random.Generator
) -> np.ndarray:
    """Replace SPACE_SPLIT_SHARE of the tokens " word" by " ", "word". ids: [tokens], int32."""
    vocab = tokenizer.get_vocab()
    space = vocab["Ġ"]  # byte-level BPE writes a space as Ġ
    rest = np.full(len(vocab), -1, dtype=np.int32)
    for token, index in vocab.items():
        if token[0] == "Ġ" and token[1:2].isalpha() and token[1:] in vocab:
            rest[index] = vocab[token[1:]]
    chosen = (rest[ids] >= 0) & (rng.random(len(ids)) < SPACE_SPLIT_SHARE)
    where = np.flatnonzero(chosen)
    out = ids.copy()
    out[where] = rest[ids[where]]
    return np.insert(out, where, space)
