import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from trainer.options import BadValue
from trainer.vision.images import CLASSES, VALIDATION_SHARE, digits, fake, shifted, split


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # marks the module as missing
    with pytest.raises(BadValue, match="pip install scikit-learn, or use --fake-data"):
        digits()


def test_the_digits_are_small_grey_images_of_ten_kinds() -> None:
    images = digits()
    assert images.pixels.shape == (1797, 1, 8, 8)
    assert images.labels.unique().tolist() == list(range(CLASSES))
    assert (images.pixels.min().item(), images.pixels.max().item()) == (-1, 1)


def test_fake_images_depend_only_on_their_seed_and_their_classes_can_be_distinguished() -> None:
    one, two, other = fake(64, 8, seed=1), fake(64, 8, seed=1), fake(64, 8, seed=2)
    assert torch.equal(one.pixels, two.pixels)
    assert torch.equal(one.labels, two.labels)
    assert not torch.equal(one.pixels, other.pixels)
    assert one.pixels.shape == (64, 3, 8, 8)
    flat = one.pixels.flatten(1)
    near = (F.normalize(flat) @ F.normalize(flat).T).fill_diagonal_(-1).argmax(1)
    assert (one.labels[near] == one.labels).float().mean() > 0.9


def test_splitting_loses_no_image() -> None:
    images = fake(100, 4, seed=0)
    learned, aside = split(images)
    assert (len(learned), len(aside)) == (88, 100 // VALIDATION_SHARE)
    both = torch.cat([learned.pixels, aside.pixels]).flatten(1)
    assert torch.equal(both.unique(dim=0), images.pixels.flatten(1).unique(dim=0))


def test_shifted_images_are_crops_that_the_global_random_state_chooses() -> None:
    pixels = torch.arange(1.0, 1 + 6 * 25).view(6, 1, 5, 5)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    moved = shifted(pixels)
    assert moved.shape == pixels.shape
    steps = {5 * down + right for down in (-1, 0, 1) for right in (-1, 0, 1)}
    assert set((moved - pixels)[:, 0, 2, 2].tolist()) <= steps
    assert not torch.equal(shifted(pixels), moved)
    torch.set_rng_state(state)
    assert torch.equal(shifted(pixels), moved)
