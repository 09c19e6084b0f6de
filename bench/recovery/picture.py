"""Draw recoveries under holdfast and under torchrun: training steps over time, as an SVG file.

The two launchers train the same small DDP model on two ranks, one after the other, in steps of 20 ms. In both
runs, rank 1 is killed at the same times, counted from the first step. The script under torchrun saves a
checkpoint every 250 steps (5 s) and resumes from it; torchrun creates a new store at each restart, because
some restarts hang with its default store. The script under holdfast calls holdfast.join and saves nothing.
The picture shows one run of each, unedited.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed, RunningLauncher, holdfast_run, launch, torchrun
from bench.harness.ticks import Tick, newest, redone, regained
from bench.recovery.killing import wait_for_start
from bench.workloads.modes import FRESH_STORE, RANKS, Mode

VICTIM = 1
NEXT_STEP_S = 60.0  # after this time without a new step, the bench fails
POLL_S = 0.02
SCRIPT = ("-m", "bench.workloads.paced")
MODES = (
    Mode("holdfast", "", tuple(holdfast_run(("--nproc-per-node", str(RANKS)), (*SCRIPT, "holdfast"))), True),
    Mode(
        "torchrun",
        "",
        tuple(torchrun((f"--nproc-per-node={RANKS}", "--max-restarts=100"), (*SCRIPT, "torchrun"))),
        False,
        FRESH_STORE,
    ),
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """One kill and its cost."""

    at_s: float
    step: int
    took_s: float  # from the kill to the last rank's next step
    lost: int  # how many steps were redone


@dataclass(frozen=True, slots=True)
class Line:
    """The progress under one launcher: (seconds from the first step, step) for each generation."""

    name: str
    parts: tuple[tuple[tuple[float, int], ...], ...]
    recoveries: tuple[Recovery, ...]


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("picture")
    lines = [_train(mode, options.kill_at, options.seconds) for mode in MODES]
    found["options"] = vars(options)
    found["recoveries"] = {line.name: [asdict(each) for each in line.recoveries] for line in lines}
    results.write(found)
    options.output.write_text(draw(lines, options.seconds))
    say(f"picture: {options.output}")
    return 0


def _train(mode: Mode, kill_at: Sequence[float], seconds: float) -> Line:
    running = launch(f"picture-{mode.name}", mode.argv, mode.environment)
    try:
        wait_for_start(running, mode)
        start_ns = _first_step_ns(running.ticks.ticks)
        recoveries = tuple(_kill(running, start_ns, at_s, mode.name) for at_s in kill_at)
        _sleep_until(start_ns, seconds)
        return Line(mode.name, progress(running.ticks.follow(), start_ns, seconds), recoveries)
    finally:
        running.close()


def _first_step_ns(ticks: Iterable[Tick]) -> int:
    found = regained(ticks, -1, RANKS)
    assert found is not None, "`wait_for_start` has returned"
    return found.all_ns


def _kill(running: RunningLauncher, start_ns: int, at_s: float, name: str) -> Recovery:
    """Kill the victim `at_s` seconds after the first step. Wait until all ranks have completed a new step."""
    _sleep_until(start_ns, at_s)
    victim = newest(running.ticks.follow())[VICTIM]
    killed_ns = time.monotonic_ns()
    os.kill(victim.pid, signal.SIGKILL)
    deadline = time.monotonic() + NEXT_STEP_S
    while (found := regained(running.ticks.follow(), victim.generation, RANKS)) is None:
        if time.monotonic() > deadline or running.ended() is not None:
            raise Failed(f"{name}: no step after the kill\n{running.tail()}")
        time.sleep(POLL_S)
    lost = redone(running.ticks.ticks, victim.generation, found)
    took_s = (found.all_ns - killed_ns) / 1e9
    say(
        f"{name}: rank {VICTIM} killed at {at_s:g} s, step {victim.step}; {took_s:.2f} s, {lost} steps redone"
    )
    return Recovery((killed_ns - start_ns) / 1e9, victim.step, took_s, lost)


def _sleep_until(start_ns: int, at_s: float) -> None:
    time.sleep(max(0.0, at_s - (time.monotonic_ns() - start_ns) / 1e9))


def progress(
    ticks: Iterable[Tick], start_ns: int, seconds: float
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Return, for each generation, when all ranks had completed each step in the first `seconds`."""
    done: dict[int, dict[int, list[int]]] = {}
    for tick in ticks:
        done.setdefault(tick.generation, {}).setdefault(tick.step, []).append(tick.at_ns)
    parts = []
    for generation in sorted(done):
        steps = ((max(at), step + 1) for step, at in sorted(done[generation].items()) if len(at) == RANKS)
        part = [((at_ns - start_ns) / 1e9, step) for at_ns, step in steps]
        parts.append(tuple(point for point in part if point[0] <= seconds))
    return tuple(part for part in parts if part)


# The drawing. Sizes are in units of the SVG's viewBox.
WIDTH, HEIGHT = 880, 430
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 74, 52
NOTE_WIDTH = 210  # the maximum width of the text beside a recovery
EVERY = 10  # every tenth point and the last point of each generation are drawn
COLOURS = {"holdfast": "#1a7f37", "torchrun": "#cf222e"}
FONT = "font-family=\"-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""


def draw(lines: Sequence[Line], seconds: float) -> str:
    """Return an SVG of `lines`: steps over seconds, with each kill and its cost."""
    top = max(step for line in lines for part in line.parts for _, step in part)
    scale = Scale(seconds, _round_up(top))
    body = [*_frame(scale), *_kills(lines, scale)]
    for line in lines:
        body += _curve(line, scale)
    body += _notes(lines, scale)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" {FONT} font-size="13" fill="#1f2328">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
            *body,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True, slots=True)
class Scale:
    seconds: float
    steps: int

    def x(self, at_s: float) -> float:
        return LEFT + at_s / self.seconds * (WIDTH - LEFT - RIGHT)

    def y(self, step: float) -> float:
        return HEIGHT - BOTTOM - step / self.steps * (HEIGHT - TOP - BOTTOM)


def _round_up(steps: int) -> int:
    """Return the next multiple of 250, so that the axis ends at a labelled line."""
    return -(-steps // 250) * 250


def _frame(scale: Scale) -> Iterator[str]:
    yield _text(
        LEFT, 28, "A rank is killed twice: Holdfast and torchrun on the same training", size=17, weight=600
    )
    yield _text(
        LEFT,
        48,
        "One run each: 2 ranks on CPUs, 5 MB of state, steps of 20 ms. "
        "The script under torchrun saves a checkpoint every 5 s.",
        colour="#59636e",
    )
    for step in range(0, scale.steps + 1, 250):
        y = scale.y(step)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eaeef2"/>'
        yield _text(LEFT - 8, y + 4, f"{step:,}", anchor="end", colour="#59636e")
    for second in range(0, int(scale.seconds) + 1, 5):
        yield _text(scale.x(second), HEIGHT - BOTTOM + 20, f"{second} s", anchor="middle", colour="#59636e")
    middle = scale.x(scale.seconds / 2)
    yield _text(middle, HEIGHT - 12, "time since the first step", anchor="middle", colour="#59636e")
    yield (
        f'<text transform="translate(20 {scale.y(scale.steps / 2):.0f}) rotate(-90)" text-anchor="middle" '
        'fill="#59636e">steps done</text>'
    )


def _kills(lines: Sequence[Line], scale: Scale) -> Iterator[str]:
    """Mark the times of the kills, which are the same for all launchers."""
    for each in lines[0].recoveries:
        x = scale.x(each.at_s)
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#59636e" '
            'stroke-dasharray="2 4"/>'
        )
        yield _text(x, TOP - 6, f"SIGKILL of rank {VICTIM}", anchor="middle", weight=600)


def _curve(line: Line, scale: Scale) -> Iterator[str]:
    colour = COLOURS[line.name]
    for part in line.parts:
        points = [*part[::EVERY], part[-1]]
        path = " ".join(f"{scale.x(at_s):.1f},{scale.y(step):.1f}" for at_s, step in points)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="3"/>'
    for before, after in zip(line.parts, line.parts[1:], strict=False):
        (from_s, from_step), (to_s, to_step) = before[-1], after[0]
        x, y, end_x, end_y = scale.x(from_s), scale.y(from_step), scale.x(to_s), scale.y(to_step)
        yield (
            f'<path d="M{x:.1f} {y:.1f}H{end_x:.1f}V{end_y:.1f}" fill="none" stroke="{colour}" '
            'stroke-width="2" stroke-dasharray="3 4"/>'
        )


def _notes(lines: Sequence[Line], scale: Scale) -> Iterator[str]:
    for line in lines:
        colour = COLOURS[line.name]
        at_s, step = line.parts[-1][-1]
        above = line.name == "holdfast"
        name = f"{'Holdfast' if above else 'torchrun'}: {step:,} steps"
        yield _text(scale.x(at_s), scale.y(step) - 10, name, anchor="end", colour=colour, weight=600, size=14)
        for part, each in zip(line.parts[1:], line.recoveries, strict=False):
            lost = f"{each.lost:,} step{'' if each.lost == 1 else 's'} redone"
            note = f"back in {each.took_s:.2g} s, {lost}"
            back_s, back_step = part[0]
            if above:
                yield _text(
                    scale.x(each.at_s) - 8, scale.y(each.step) - 10, note, anchor="end", colour=colour
                )
            else:
                x = min(scale.x(back_s) + 10, WIDTH - RIGHT - NOTE_WIDTH)
                yield _text(x, scale.y(back_step) + 16, note, colour=colour)


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    colour: str = "#1f2328",
    size: int = 13,
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}" '
        f'font-weight="{weight}">{words}</text>'
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("picture", __doc__ or "")
    add = parser.add_argument
    add("--output", type=Path, default=results.ROOT / "docs" / "recovery.svg", metavar="FILE")
    add("--seconds", type=float, default=30.0, metavar="S", help="how long each launcher trains")
    add(
        "--kill-at",
        type=float,
        nargs="+",
        default=[8.0, 20.0],
        metavar="S",
        help="seconds after the first step",
    )
    options = parser.parse_args(argv)
    if (
        sorted(options.kill_at) != options.kill_at
        or not 0 < options.kill_at[0] <= options.kill_at[-1] < options.seconds
    ):
        parser.error("--kill-at: expected ascending numbers above 0 and below --seconds")
    return options
