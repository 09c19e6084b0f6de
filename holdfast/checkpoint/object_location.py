"""Parse the URL of checkpoints in object storage: `s3://BUCKET/PREFIX`, `gs://...` or `az://...`. Pure.

A name is allowed only if all three kinds of storage accept it unescaped, so a key looks the same in a URL, in
a request and in a listing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EXPECTED = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
MAX_PREFIX_BYTES = 512  # a key may have 1024 bytes, and its part after the prefix needs fewer than 300

_S3 = re.compile(r"(?=.{3,63}\Z)[a-z0-9](?:[a-z0-9-]|\.(?!\.))*[a-z0-9]", re.ASCII)
_GS = re.compile(r"(?=.{3,222}\Z)[a-z0-9](?:[a-z0-9_-]|\.(?!\.))*[a-z0-9]", re.ASCII)
_AZ = re.compile(r"(?=.{3,63}\Z)[a-z0-9](?:[a-z0-9]|-(?!-))*[a-z0-9]", re.ASCII)
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+", re.ASCII)  # no bucket may look like an IPv4 address
_SEGMENT = re.compile(r"[A-Za-z0-9_=@+-][A-Za-z0-9._=@+-]*", re.ASCII)

BUCKETS = {  # by scheme: the pattern of a valid name, and its description for error messages
    "s3": (_S3, "a bucket of 3-63 lower-case letters, digits, dots and dashes"),
    "gs": (_GS, "a bucket of 3-222 lower-case letters, digits, dots, dashes and underscores"),
    "az": (_AZ, "a container of 3-63 lower-case letters, digits and single dashes"),
}


@dataclass(frozen=True, slots=True)
class ObjectLocation:
    """The location of one job's checkpoints. `prefix` is not empty and has no slash at either end."""

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}"


def is_object_url(text: str) -> bool:
    """Return whether `text` begins with the scheme of an object store. The rest may be invalid."""
    return text.partition("://")[0] in BUCKETS and "://" in text


def parse(text: str) -> ObjectLocation:
    """Return the location that `text` names. Trailing slashes are ignored.

    Raises:
        ValueError: `text` is not a valid location. The message describes what was expected; the caller adds
            the value.
    """
    scheme, separator, place = text.partition("://")
    if not separator or scheme not in BUCKETS:
        raise ValueError(EXPECTED)
    bucket, _, prefix = place.partition("/")
    pattern, rule = BUCKETS[scheme]
    if not pattern.fullmatch(bucket) or _ADDRESS.fullmatch(bucket):
        raise ValueError(f"{scheme}:// followed by {rule}")
    prefix = prefix.rstrip("/")
    if not prefix:
        raise ValueError(f"{scheme}://{bucket}/PREFIX: each job needs its own prefix")
    if len(prefix) > MAX_PREFIX_BYTES or not all(map(_SEGMENT.fullmatch, prefix.split("/"))):
        raise ValueError(
            f"a prefix of at most {MAX_PREFIX_BYTES} letters, digits and . _ = @ + -, in parts that are"
            " separated by single slashes and do not begin with a dot"
        )
    return ObjectLocation(scheme, bucket, prefix)
