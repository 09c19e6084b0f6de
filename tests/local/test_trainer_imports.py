"""The digits come from scikit-learn, which takes a second to import."""

from __future__ import annotations

from trainer.vision.images import CLASSES, digits


def test_the_digits_are_small_grey_images_of_ten_kinds() -> None:
    images = digits()
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.labels.unique().tolist() == list(range(CLASSES))
    assert (images.pixels.min().item(), images.pixels.max().item()) == (-1, 1)
