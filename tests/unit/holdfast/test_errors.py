from __future__ import annotations

import pytest

from holdfast.errors import type_with_article, with_article


@pytest.mark.parametrize(
    ("name", "said"),
    [("Linear", "a Linear"), ("AdamW", "an AdamW"), ("int64", "an int64"), ("SGD", "an SGD"),
     ("uint8", "a uint8"), ("LBFGS", "an LBFGS"), ("set", "a set"), ("CUDA", "a CUDA")],
)  # fmt: skip
def test_a_type_name_gets_the_right_article(name: str, said: str) -> None:
    assert with_article(name) == said


def test_the_type_of_a_value_is_named() -> None:
    assert (type_with_article(1), type_with_article("")) == ("an int", "a str")
