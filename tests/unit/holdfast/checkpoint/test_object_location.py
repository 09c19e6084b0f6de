"""URLs of object storage are read back as they were written, and other texts are refused."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint import object_location
from holdfast.checkpoint.object_location import ObjectLocation

LETTERS = string.ascii_lowercase + string.digits
SEGMENTS = st.text(string.ascii_letters + string.digits + "._=@+-", min_size=1, max_size=20).filter(
    lambda text: not text.startswith(".")
)
BUCKETS = st.text(LETTERS, min_size=3, max_size=63)


@given(
    st.sampled_from(["s3", "gs", "az"]),
    BUCKETS,
    st.lists(SEGMENTS, min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_a_location_is_read_as_it_is_written(
    scheme: str, bucket: str, segments: list[str], slashes: int
) -> None:
    location = ObjectLocation(scheme, bucket, "/".join(segments))
    assert object_location.is_object_url(str(location))
    assert object_location.parse(str(location) + "/" * slashes) == location


@given(
    st.text(max_size=40)
    | st.builds("{}://{}/{}".format, st.sampled_from(["s3", "gs", "az"]), st.text(), st.text())
)
def test_what_is_read_needs_no_escaping_and_names_the_same_object_in_every_request(text: str) -> None:
    try:
        found = object_location.parse(text)
    except ValueError:
        return
    assert re.fullmatch(r"[a-z0-9._-]{3,222}", found.bucket, re.ASCII)
    assert all(segment not in ("", ".", "..") for segment in found.prefix.split("/"))
    assert re.fullmatch(r"[A-Za-z0-9._=@+/-]{1,512}", found.prefix, re.ASCII)
    assert object_location.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    ["s3://ab/x", "s3://a..b/x", "s3://192.168.0.1/x", "s3://-abc/x", "s3://abc-/x", "az://a.b/x", "az://a_b/x",
     "s3://a_b/x", "s3://bucket/../x", "s3://bucket/.x", "s3://bucket/x y", "s3://bucket/x?y", "s3://bucket/x#y",
     "s3://bucket/\u00e9", "s3://bucket//x", "s3://bucket/x//y", "s3://bucket/%2e",
     "s3://bucket/" + "x" * 513, "s3://user:secret@bucket/x", "file:///x", "s3", "s3:bucket/x",
     "s3://bucket\n/x", "s3://bucket/x\n"],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        object_location.parse(text)
