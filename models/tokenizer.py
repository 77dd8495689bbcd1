"""Tokenizers: from a Hugging Face directory, or built from the metadata of a GGUF file. No model code is imported."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from models.gguf_file import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LLAMA3, _QWEN2, _SMOLLM = "llama-bpe", "qwen2", "smollm"
_PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": _SMOLLM,
}
"""`tokenizer.ggml.pre` -> the pre-tokenizer it stands for."""
_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`: special tokens, and added ones that are text."""


def from_directory(path: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a Hugging Face directory, chat template included."""
    with _without_framework_notice():
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    # tokenizer.json says all. AutoTokenizer would rather rebuild it by the class that the checkpoint names, and the class is
    # wrong for some: DeepSeek's distillations name Llama's, which would replace their byte-level pre-tokenizer.
    loader = PreTrainedTokenizerFast if (path / "tokenizer.json").exists() else AutoTokenizer
    return loader.from_pretrained(path, local_files_only=True)


def from_gguf(file: GgufFile) -> "PreTrainedTokenizerBase":
    """A byte-level BPE tokenizer from a GGUF file's metadata, with its special tokens and chat template.

    Raises:
        ValueError: a kind of tokenizer or pre-tokenizer that we do not know, by name.
    """
    with _without_framework_notice():
        from transformers import PreTrainedTokenizerFast
    if (kind := file.metadata("tokenizer.ggml.model")) != "gpt2":
        raise ValueError(f"{file.path}: tokenizer {kind!r} is not supported; only 'gpt2' (byte-level BPE) is")
    pre = file.metadata("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ValueError(f"{file.path}: pre-tokenizer {pre!r} is unknown; known: {', '.join(_PRE_TOKENIZERS)}")
    style = _PRE_TOKENIZERS[pre]
    texts = file.metadata("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in file.metadata("tokenizer.ggml.merges")]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=style == _LLAMA3))
    tokenizer.normalizer = normalizers.NFC() if style == _QWEN2 else None
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    types = file.metadata("tokenizer.ggml.token_type")
    for text, token_type in zip(texts, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(text, special=token_type == _CONTROL, normalized=False)])
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (index := file.metadata(f"tokenizer.ggml.{key}_token_id")) is not None:
            special[f"{role}_token"] = texts[index]
    if file.metadata("tokenizer.ggml.add_bos_token", style == _LLAMA3):
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=file.metadata("tokenizer.chat_template"),
        model_max_length=file.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        **special,
    )


def _pre_tokenizer(style: str) -> pre_tokenizers.PreTokenizer:
    if style == _SMOLLM:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    digits = r"\p{N}{1,3}" if style == _LLAMA3 else r"\p{N}"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])


@contextlib.contextmanager
def _without_framework_notice() -> Iterator[None]:
    """Keeps transformers from announcing at import that torch is absent: we want its tokenizers only."""
    logger = logging.getLogger("transformers")

    def wanted(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
