"""Store JSON as text in a field of an API server's object, compressed if it is long. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from typing import Any

from holdfast.fileio import strict_json

MAX_BYTES = 4 << 20  # the largest text after decompression; a larger one is rejected
_COMPRESSED = "zlib:"


class UnreadableText(ValueError):
    """The text cannot be read. The exception's message says why."""


def pack(value: Any, plain_bytes: int) -> str:
    """Return `value` as JSON, compressed if it is longer than `plain_bytes`."""
    text = json.dumps(value, separators=(",", ":"))
    if len(text) <= plain_bytes:
        return text
    return _COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def unpack(text: str) -> Any:
    """Return the value in `text`, which comes from an untrusted writer. Raises `UnreadableText`."""
    try:
        if text.startswith(_COMPRESSED):
            packed = base64.b64decode(text.removeprefix(_COMPRESSED), validate=True)
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(packed, MAX_BYTES)
            if not unpacker.eof:
                raise UnreadableText(f"more than {MAX_BYTES} bytes, or truncated")
            text = data.decode()
        return json.loads(text, parse_int=strict_json.integer)
    except (binascii.Error, zlib.error, RecursionError, ValueError) as error:
        raise UnreadableText(str(error)) from None
