"""Tokens -> text as it is generated: a detokeniser that never shows half a character, and stop strings across token borders.

Both work in amortised constant time a token and give the same text however it is cut into tokens. No jax, no models.
"""

import codecs
import functools
import json
import re
from typing import Any


class Detokenizer:
    """Text of a growing list of tokens. The pieces that `push` and `flush` return add up to the decoding of the whole list.

    "Decoding" is that of the tokenizer (Hugging Face's fast ones, or a bare `tokenizers.Tokenizer`) without clean-up of spaces.
    Bytes that are no UTF-8 come out as U+FFFD once it is certain that no character will come of them.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self._pieces = _pieces(tokenizer, skip_special_tokens)
        self._state = self._pieces.start()

    def push(self, token: int) -> str:
        """Text that is certain now that `token` is known; "" while a character is incomplete."""
        return self._state.push(token)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an incomplete character."""
        return self._state.flush()


class StopMatcher:
    """Holds text back while it may be the beginning of a stop string, and ends at the first stop string that is completed.

    Of several that end at the same character the longest counts. `include` keeps the stop string in the text.
    """

    def __init__(self, stop_strings: tuple[str, ...], include: bool = False):
        if "" in stop_strings:
            raise ValueError("an empty stop string stops before the first character; leave it out")
        self._stops, self._include = stop_strings, include
        self._longest = max(map(len, stop_strings), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """(text to show, stop string that it completed or None). After a stop nothing is shown any more.

        What is completed while it may not stop is text like any other.
        """
        if self._stopped:
            return "", None
        held, text = len(self._held), self._held + text
        found = ((text.find(stop, max(0, held + 1 - len(stop))), stop) for stop in self._stops)
        ends = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if ends and may_stop:
            end, start, stop = min(ends)
            self._held, self._stopped = "", True
            return text[: end if self._include else start], stop
        keep = len(text) - self._num_held(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back: at the end of generation it is text after all."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for num in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-num:]
            if any(stop.startswith(end) for stop in self._stops):
                return num
        return 0


@functools.lru_cache(maxsize=8)
def _pieces(tokenizer: Any, skip_special_tokens: bool) -> "_BytePieces | _TextPieces":
    """What a tokenizer's tokens stand for; shared by all requests."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    added = backend.get_added_tokens_decoder()
    skipped = frozenset(i for i, token in added.items() if token.special) if skip_special_tokens else frozenset()
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    kinds = [part["type"] for part in decoder.get("decoders", [decoder]) if part]
    return (_BytePieces if kinds == ["ByteLevel"] else _TextPieces)(backend, skipped)


class _BytePieces:
    """Tokens of a byte-level tokenizer (Llama 3, Qwen, SmolLM): each is a string of bytes, the text their UTF-8 decoding."""

    def __init__(self, backend: Any, skipped: frozenset[int]):
        self._backend = backend
        self._known: dict[int, bytes] = dict.fromkeys(skipped, b"")

    def start(self) -> "_ByteState":
        return _ByteState(self)

    def __getitem__(self, token: int) -> bytes:
        piece = self._known.get(token)
        if piece is None:
            # Padding of the vocabulary has no text.
            piece = self._known[token] = _as_bytes(self._backend.id_to_token(token) or "")
        return piece


class _ByteState:
    def __init__(self, pieces: _BytePieces):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._pieces[token])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _as_bytes(piece: str) -> bytes:
    """Bytes of a token of a byte-level vocabulary, which writes each byte as one printable character; else its UTF-8."""
    table = _byte_table()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode()


@functools.cache
def _byte_table() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, every other byte for a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class _TextPieces:
    """Tokens of any other tokenizer: text that depends on its neighbour to the left (the space before the first word).

    Runs of byte tokens (`<0xE2>`) are decoded as one, so they are held until they end.
    """

    def __init__(self, backend: Any, skipped: frozenset[int]):
        self._backend, self._skipped = backend, skipped

    def start(self) -> "_TextState":
        return _TextState(self)

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)

    def is_silent(self, token: int) -> bool:
        return token in self._skipped or self._backend.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        return re.fullmatch(r"<0x[0-9A-F]{2}>", self._backend.id_to_token(token)) is not None


class _TextState:
    def __init__(self, pieces: _TextPieces):
        self._pieces = pieces
        self._context: list[int] = []
        self._new: list[int] = []

    def push(self, token: int) -> str:
        if self._pieces.is_silent(token):
            return ""
        self._new.append(token)
        return "" if self._pieces.is_byte(token) else self.flush()

    def flush(self) -> str:
        shown = self._pieces.decode(self._context)
        text = self._pieces.decode(self._context + self._new)[len(shown) :]
        if self._new:
            self._context, self._new = self._new, []
        return text
