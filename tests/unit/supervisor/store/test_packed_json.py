"""JSON in a field of an object that others can write."""

from __future__ import annotations

import base64
import zlib

import pytest

from supervisor.store.packed_json import UnreadableText, pack, unpack


@pytest.mark.parametrize("plain_bytes", [0, 1000])
def test_a_value_is_read_again_whether_it_was_compressed_or_not(plain_bytes: int) -> None:
    value = {"epoch": 2**64 - 1, "at_s": 1.5, "words": ["a", None]}
    assert unpack(pack(value, plain_bytes)) == value


@pytest.mark.parametrize("digits", [21, 400, 5000])
def test_an_integer_that_fits_no_number_is_refused(digits: int) -> None:
    text = f'{{"step": {"9" * digits}}}'
    for each in (text, "zlib:" + base64.b64encode(zlib.compress(text.encode())).decode()):
        with pytest.raises(UnreadableText, match="integer of"):
            unpack(each)
