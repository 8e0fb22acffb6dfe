"""Tokenizers: bytes built in, any tokenizer.json through the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lf_format._errors import FormatError, InputError
from lf_format._schema import TokenizerInfo

_BYTES_TEXT = '{"lf_tokenizer":"bytes"}'


class Tokenizer(Protocol):
    """What preprocess, training and inference need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0..vocab_size-1."""
        ...

    @property
    def info(self) -> TokenizerInfo:
        """Name and content hash, as stored in every file."""
        ...

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of `text`, int64[n]; InputError when the text is not encodable."""
        ...

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of integer ids, shape [n]; undecodable bytes become U+FFFD."""
        ...

    def dumps(self) -> str:
        """JSON text from which `loads_tokenizer` rebuilds this tokenizer."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: id = byte, vocabulary 256."""

    vocab_size = 256

    @property
    def info(self) -> TokenizerInfo:
        """Name "bytes" and a constant hash."""
        return TokenizerInfo("bytes", _digest(json.loads(_BYTES_TEXT)))

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The UTF-8 bytes of `text`, int64[n]; InputError for lone surrogates."""
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of the bytes `ids`; invalid UTF-8 becomes U+FFFD. FormatError for ids above 255."""
        values = np.asarray(ids, np.int64)
        if values.size and not 0 <= int(values.min()) <= int(values.max()) <= 255:
            raise FormatError("byte ids", expected="0..255", found=f"{values.min()}..{values.max()}")
        return values.astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def dumps(self) -> str:
        """A JSON marker."""
        return _BYTES_TEXT


class JsonTokenizer:
    """A tokenizer.json. Truncation and padding that it may ask for are switched off: they would lose or add tokens.

    Args:
        text: content of a tokenizer.json.
        path: for error messages.

    Raises:
        FormatError: when the text is not a tokenizer.json, or the library is missing.
    """

    def __init__(self, text: str, path: object = None) -> None:
        library = _library(path)
        try:
            self._tokenizer = library.Tokenizer.from_str(text)
            content = json.loads(text)
        except Exception as error:  # the library raises plain Exception
            raise FormatError(f"not a tokenizer.json: {error}", path=path) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._text = text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have holes, so the largest id decides, not their number.
        self._vocab_size = max(vocabulary.values(), default=0) + 1
        self._info = TokenizerInfo(f"{content['model']['type']}-{self._vocab_size}", _digest(content))

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, added tokens included."""
        return self._vocab_size

    @property
    def info(self) -> TokenizerInfo:
        """Model type with vocabulary size, and the hash of the canonical JSON."""
        return self._info

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of `text` without automatic special tokens, int64[n]; InputError for lone surrogates."""
        _utf8(text)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of `ids`, special tokens included."""
        return str(self._tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False))

    def dumps(self) -> str:
        """The tokenizer.json it was made from."""
        return self._text


def _library(path: object) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise FormatError(
            "a tokenizer.json needs the tokenizers library: pip install 'lf-format[tokenizers]'", path=path
        ) from None
    return tokenizers


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = repr(text[error.start])
        raise InputError("text is not encodable as UTF-8", position=error.start, found=found) from None


def _digest(content: object) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    # surrogatepass: JSON may escape lone surrogates in a vocabulary
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def loads_tokenizer(text: str, path: object = None) -> Tokenizer:
    """Tokenizer from what `dumps` wrote, or from the text of a tokenizer.json; FormatError otherwise."""
    return ByteTokenizer() if text.strip() == _BYTES_TEXT else JsonTokenizer(text, path)


def load_tokenizer(spec: str | os.PathLike[str]) -> Tokenizer:
    """Tokenizer named by `spec`: "bytes", or a path of a tokenizer.json or of a file with `dumps` text.

    Raises:
        FormatError: neither, or the `tokenizers` extra is missing.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        if path.exists() and not path.is_file():  # a FIFO would wait for a writer, a device need not end
            raise FormatError("no regular file", path=path, expected="a tokenizer.json")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FormatError("no such tokenizer", path=path, expected='"bytes" or a tokenizer.json') from None
    except UnicodeDecodeError as error:
        raise FormatError("tokenizer.json is not UTF-8", path=path, offset=error.start) from None
    return loads_tokenizer(text, path)
