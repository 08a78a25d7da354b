"""Small tokenizers of the two families in use, built on the spot: byte-level and byte-fallback."""

import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "Hello, how are you today? I am fine, thank you very much.",
    "The quick brown fox jumps over the lazy dog; the dog does not mind.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "Ein schöner Tag für Äpfel. 中文 text, emoji 😀, and naïve café.",
    "user assistant system think answer question: what is it?",
] * 4

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# The same text, with what the assistant says marked.
CHATML_MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Drops the reasoning of all turns but the last, and gives the last one an empty one, as Qwen3's.
REWRITING = (
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}{% set reasoning = '' %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}"
    "{{ content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA2 = (
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)

# Llama 3's first one, before it took add_generation_prompt, with ChatML's tokens.
ALWAYS_PROMPTED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)

BYTE_LEVEL_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level(add_bos: bool = False, trim_offsets: bool = False) -> Tokenizer:
    """GPT-2's kind: bytes as letters, merges on top."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=BYTE_LEVEL_SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if add_bos:
        bos = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
        steps.append(processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[bos]))
    tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Llama-2's kind: words begin with a mark, an unknown character becomes byte tokens."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = _metaspace()
    words = [text for text in CORPUS if text.isascii()]
    trainer = trainers.BpeTrainer(vocab_size=200, show_progress=False)
    trained.train_from_iterator(words, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in model["vocab"] if token not in tokens]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = _metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _metaspace() -> normalizers.Normalizer:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def save(
    directory: Path,
    tokenizer: Tokenizer,
    config: dict[str, object],
    generation: dict[str, object] | None = None,
    model: dict[str, object] | None = None,
    template_file: str | None = None,
) -> Path:
    """Write a model directory's tokenizer files."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in (("generation_config.json", generation), ("config.json", model)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    if template_file is not None:
        (directory / "chat_template.jinja").write_text(template_file)
    return directory


def save_chatml(directory: Path, template: str = CHATML, trim_offsets: bool = False) -> Path:
    """A ChatML model: byte-level, ends turns with <|im_end|>."""
    return save(
        directory,
        byte_level(trim_offsets=trim_offsets),
        {
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": template,
        },
    )


def save_llama2(directory: Path, template: str | None = LLAMA2) -> Path:
    """A Llama-2 model: byte-fallback, with a bos."""
    config: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if template is not None:
        config["chat_template"] = template
    return save(directory, byte_fallback(), config)
