"""Load batches of a dataset that are the same after a fault. This replaces `DataLoader` and its samplers.

A step's samples, and the random numbers that a dataset augments them with, depend only on (seed, step, rank,
world sizes so far), not on the process that loads them. So there is no position to save. A loop that resumes
at step n begins with the batch of step n, and reloads batches that were prefetched before the fault. If the
number of ranks changes, the epoch continues with the next samples in its order.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.errors import BadInput
from holdfast.training.world_sizes import EpochPlan

if TYPE_CHECKING:
    from holdfast.training.session import Session
    from holdfast.training.state import State

_OWN_OPTIONS = ("sampler", "batch_sampler", "shuffle", "generator")
_SECOND_BATCH = (
    "Batches: a second batch was requested in one step, but each step has one batch. To accumulate gradients "
    "over k batches, use a batch_size k times as large and x.chunk(k); to evaluate, use a DataLoader"
)


class Batches:
    """A rank's batches of a map-style dataset, in a different random order in each epoch.

    `batch_size` is the number of samples per rank and step. `len()` returns the number of steps in an epoch.
    `steps` yields each step with its batch. Iterating over the object yields the batch of the loop's current
    step. Other options, such as `num_workers`, `pin_memory`, `collate_fn` and `worker_init_fn`, are passed to
    torch's `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        session: Session,
        state: State,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        **options: Any,
    ) -> None:
        """Check the options and the size of the dataset.

        With `drop_last`, the last samples of an epoch are dropped if they do not fill a batch on every rank.
        Otherwise, samples from the beginning of the epoch fill the last batches.

        Raises:
            BadInput: the dataset has no length or too few samples for a step, or an option is not allowed.
        """
        self.dataset, self.batch_size = dataset, _positive("batch_size", batch_size)
        self._session, self._state, self.seed, self.shuffle = session, state, seed, shuffle
        self._options = options
        _check_names(options)
        given = [name for name in _OWN_OPTIONS if name in options]
        if given:
            raise BadInput(
                f"Batches({given[0]}=...): Batches determines the order of the samples; omit this option"
            )
        self._samples = _length(dataset)
        whole = self.batch_size * session.world_size
        sizes = session._rank.sizes
        self._plan = EpochPlan(self._samples, self.batch_size, sizes.steps, drop_last=drop_last)
        self._per_epoch = self._plan.per_epoch(whole)
        if not self._per_epoch:
            raise BadInput(
                f"Batches(batch_size={batch_size}): a step needs {whole} samples on {session.world_size} "
                f"ranks, but the dataset has {self._samples}; use smaller batches, or drop_last=False"
            )
        sizes.is_known_to_batches = True
        self._epoch = -1
        self._order: Sequence[int] = ()
        try:  # to let torch refuse invalid options here instead of in the first step
            self._loader(_SamplePlan(self, 0, 0))
        except (TypeError, ValueError) as error:
            raise BadInput(f"Batches({', '.join(f'{name}=...' for name in options)}): {error}") from None

    def __len__(self) -> int:
        """Return the number of steps in an epoch, with the current number of ranks."""
        return self._per_epoch

    def epoch(self, step: int) -> int:
        """Return the number of the epoch that `step` belongs to, from 0."""
        return self._plan.place(step).epoch

    def ends_epoch(self, step: int) -> bool:
        """Return True if `step` is the last step of its epoch."""
        return self.epoch(step + 1) != self.epoch(step)

    def first_step(self, epoch: int) -> int:
        """Return the step at which `epoch` begins: `batches.steps(batches.first_step(3))` trains 3 epochs.

        It depends on the numbers of ranks so far, and is `epoch * len(batches)` if there was only one.
        """
        return self._plan.first_step(epoch)

    def position(self, step: int) -> int:
        """Return the number of samples that all ranks see before `step`, for `state.commit(position=...)`."""
        return self._plan.position(step)

    def indices(self, step: int) -> list[int]:
        """Return the indices of this rank's samples in `step`."""
        place = self._plan.place(step)
        if place.epoch != self._epoch:
            self._epoch, self._order = place.epoch, self._ordered(place.epoch)
        begin = place.offset + self._session.rank * self.batch_size
        return [int(self._order[at % self._samples]) for at in range(begin, begin + self.batch_size)]

    def steps(self, count: int) -> Iterator[tuple[int, Any]]:
        """Yield each step of `state.steps(count)` with its batch.

        If a step was not committed, it is yielded again with the same batch.
        """
        feed = _BatchFeed(self, operator.index(count))
        for step in self._state.steps(count):
            yield step, feed.batch(step)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batch of the current step or, between two steps, the batch of the next step.

        The iterator never ends. Use it in `zip` with `state.steps(n)`, in either order. A step that begins
        again gets the same batch.

        Raises:
            BadInput: the script requested a second batch in one step.
        """
        feed, drawn = _BatchFeed(self, sys.maxsize), -1
        while True:
            if self._state._turn == drawn:
                raise BadInput(_SECOND_BATCH)
            drawn = self._state._turn
            yield feed.batch(self._following(self._state.step))

    def _following(self, step: int) -> int:
        """Return the first step that is not skipped, starting from `step`."""
        while step in self._session._rank.skip:
            step += 1
        return step

    def _ordered(self, epoch: int) -> Sequence[int]:
        import torch

        if not self.shuffle:
            return range(self._samples)
        generator = torch.Generator().manual_seed(_seed_of("order", self.seed, epoch))
        order: Sequence[int] = torch.randperm(self._samples, generator=generator)  # type: ignore[assignment]
        return order

    def _batches_from(self, first: int, count: int) -> Iterator[Any]:
        """Yield the batches of the steps in range(first, count) that are not skipped."""
        return iter(self._loader(_SamplePlan(self, first, count)))

    def _loader(self, plan: _SamplePlan) -> Any:
        import torch
        from torch.utils.data import DataLoader

        options = dict(self._options)
        source = _SeededDataset(self.dataset, options.pop("collate_fn", None), self.seed, self._session.rank)
        return DataLoader(
            source,  # type: ignore[arg-type]  # it has `__getitems__`, and the loader calls nothing else
            batch_sampler=plan,
            collate_fn=_identity,
            # With the default, each iterator would draw from the generator that the training uses.
            generator=torch.Generator(),
            **options,
        )


def _check_names(options: Mapping[str, Any]) -> None:
    """Raise `BadInput` for an option that neither `Batches` nor torch's `DataLoader` has."""
    from torch.utils.data import DataLoader

    known = [*inspect.signature(Batches).parameters, *inspect.signature(DataLoader).parameters]
    for name in options:
        if name not in known:
            meant = "".join(f"; did you mean {each}?" for each in difflib.get_close_matches(name, known, 1))
            raise BadInput(f"Batches({name}=...): not an option of Batches or torch's DataLoader{meant}")


class _BatchFeed:
    """Provides the batches of a loop's steps. Prefetches them in the order of the steps."""

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches, self._count = batches, count
        self._at = -1  # the step whose batch was returned last
        self._batch: Any = None
        self._next = -1  # the step whose batch `_loaded` yields next
        self._loaded: Iterator[Any] = iter(())

    def batch(self, step: int) -> Any:
        if step != self._at:
            if step != self._next:  # this is the first call, or the loop did not use the batch of a step
                self._loaded = self._batches._batches_from(step, self._count)
            self._batch = next(self._loaded)
            self._at, self._next = step, self._batches._following(step + 1)
        return self._batch


class _SamplePlan:
    """Yields the key of each batch in a range of steps: the step and its samples. Omits skipped steps."""

    def __init__(self, batches: Batches, first: int, count: int) -> None:
        self._batches, self._first, self._count = batches, first, count

    def __iter__(self) -> Iterator[list[tuple[int, list[int]]]]:
        for step in range(self._first, self._count):
            if step not in self._batches._session._rank.skip:
                yield [(step, self._batches.indices(step))]


class _SeededDataset:
    """Loads whole batches, and seeds the random generators for each. Each worker of the loader has a copy."""

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int, rank: int
    ) -> None:
        self._dataset, self._collate, self._seed, self._rank = dataset, collate, seed, rank

    def __getitems__(self, keys: list[tuple[int, list[int]]]) -> Any:
        [(step, indices)] = keys
        from torch.utils.data import get_worker_info

        if get_worker_info() is not None:
            self._seed_generators(step)
            return self._load(indices)
        with _RandomStateKept():
            self._seed_generators(step)
            return self._load(indices)

    def _load(self, indices: list[int]) -> Any:
        from torch.utils.data import default_collate

        if hasattr(self._dataset, "__getitems__"):
            samples = self._dataset.__getitems__(indices)
        else:
            samples = [self._dataset[index] for index in indices]
        return (self._collate or default_collate)(samples)

    def _seed_generators(self, step: int) -> None:
        import torch

        seed = _seed_of("batch", self._seed, step, self._rank)
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed & 0xFFFFFFFF)


class _RandomStateKept:
    """A context that restores the states of this process's random generators when it ends."""

    def __enter__(self) -> None:
        import torch

        self._torch, self._python = torch.get_rng_state(), random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def __exit__(self, *_: object) -> None:
        import torch

        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _identity(batch: Any) -> Any:
    return batch


def _seed_of(*what: object) -> int:
    """Return a 63-bit hash of the arguments for use as a seed."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") >> 1


def _positive(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise BadInput(f"Batches({name}={value!r}): expected a whole number of at least 1")
    return number


def _length(dataset: Any) -> int:
    if not hasattr(dataset, "__len__") or not (
        hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    ):
        raise BadInput(
            f"Batches({type(dataset).__name__}): expected a dataset with a length and samples by index. An"
            " iterable dataset must keep track of its position itself: give it state_dict and"
            " load_state_dict, and protect it"
        )
    return len(dataset)
