"""Run `holdfast demo --cluster`: print each part of the demo, and remove everything that the demo created."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import exit_codes
from supervisor.cli import command_options, demo, incidents
from supervisor.cli.on_cluster.connection import ClusterConnection, connected
from supervisor.cli.on_cluster.demo import faults, pods
from supervisor.cli.on_cluster.demo.faults import ClusterFault, FaultMaker
from supervisor.cli.on_cluster.demo.installation import (
    DEMO_LABEL,
    EXAMPLES,
    GONE_S,
    POLL_S,
    Installation,
    find_checkout,
    other_demos,
)
from supervisor.cli.on_cluster.demo.interruption import Interrupted, Interruption
from supervisor.cli.on_cluster.demo.kubectl import Kubectl
from supervisor.cli.on_cluster.demo.training import SUPERVISED, TWIN, NotInTime, PodTraining
from supervisor.cli.on_cluster.doctor import NAMESPACES
from supervisor.display.ansi import Style
from supervisor.display.screen import Unwritable, say, say_all, style_of
from supervisor.kubernetes.errors import ApiError, NotFound
from supervisor.view.model import ENDING_PHASES
from supervisor.wording import number, seconds

END_S = 240.0  # the limit for the remaining steps
_RESTRICTED = "pod-security.kubernetes.io/enforce"


@dataclass(frozen=True, slots=True)
class ClusterScenario:
    """How long both jobs train, and which faults are injected into the supervised one."""

    steps: int
    pace_s: float  # the minimum step time: prevents a fast machine from finishing before the last fault
    apart: int  # steps between a recovery and the next fault, so that each fault has work to destroy
    faults: tuple[ClusterFault, ...]

    @property
    def args(self) -> tuple[str, ...]:
        """The arguments for the script in both jobs."""
        return ("--tiny", f"--steps={self.steps}", f"--pace={self.pace_s}", "--val-every=0", "--log-every=20")


WHOLE = ClusterScenario(900, 0.1, 20, faults.FAULTS)
QUICK = ClusterScenario(300, 0.1, 10, faults.QUICK)


def run(command: command_options.Demo) -> int:
    """Run the demo on a cluster, and return the exit code.

    The exit code is 0 if the job recovered from all faults as expected and the weights are equal, 130 after
    Ctrl-C, and 1 otherwise. Raises `BadInput` if the cluster cannot run the demo. Unless the user wants to
    keep it, everything that the demo created is removed.
    """
    checkout, kubectl = find_checkout(), Kubectl(command.context)
    began = time.monotonic()
    with Interruption() as stop, connected(command) as connection:
        performance = _Performance(connection, kubectl, checkout, stop, QUICK if command.quick else WHOLE)
        code = 1
        try:
            code = 0 if performance.play() else 1
        except NotInTime as error:
            performance.report_failure(str(error))
        except Interrupted:
            code = exit_codes.INTERRUPTED
        finally:
            performance.clear()
            if command.keep and code != exit_codes.INTERRUPTED:
                performance.keep()
            elif not performance.remove():
                code = code or 1
    say(f"The demo took {seconds(time.monotonic() - began)}.")
    return code


class _Performance:
    """Performs one demo in a separate namespace."""

    def __init__(
        self,
        connection: ClusterConnection,
        kubectl: Kubectl,
        checkout: Path,
        stop: Interruption,
        show: ClusterScenario,
    ) -> None:
        self._connection, self._stop, self._show, self._checkout = connection, stop, show, checkout
        self._namespace = f"holdfast-demo-{os.urandom(3).hex()}"
        self._installation = Installation(connection, kubectl, checkout, stop)
        self._training = PodTraining(connection, kubectl, self._namespace, stop)
        self._has_namespace = False
        self._began = time.monotonic()
        self._style: Style = style_of(sys.stdout)

    def play(self) -> bool:
        """Perform every part of the demo except the removal.

        Returns True if the job recovered and the weights are equal. Raises `BadInput`, `NotInTime` or
        `Interrupted`.
        """
        is_installed = self._installation.find()
        self._installation.check_rights(installs=not is_installed)
        # Do not kill the supervisor of an installation that others may use.
        chosen = tuple(each for each in self._show.faults if each.target != "supervisor" or not is_installed)
        what = f"a byte-level GPT in 2 pods, {self._show.steps} steps, broken {len(chosen)} times"
        say(f"{self._bold('holdfast demo --cluster')}: {what}")
        say("", self._bold("1  The installation"))
        image = self._install(is_installed)
        say("", self._bold("2  The jobs"))
        self._start(image)
        say("", self._bold("3  The faults"))
        good = self._break(chosen)
        say("", self._bold("4  What it cost"))
        self._end()
        say("", self._bold("5  The proof"))
        return self._compare() and good

    # -- the parts

    def _install(self, is_installed: bool) -> str:
        for name in other_demos(self._connection):
            removal = f"kubectl delete namespace {name}"
            say(f"  namespace {name} belongs to another demo; if that demo was killed, run `{removal}`")
        if is_installed:
            say("  Holdfast is already installed in this cluster: the demo uses it and does not change it")
        else:
            say("  kubectl apply -k manifests/default")
            self._installation.install()
        began = time.monotonic()
        image = self._installation.wait()
        took = "" if is_installed else f" after {seconds(time.monotonic() - began)}"
        say(f"  the webhook and the supervisor are ready{took} (image {image})")
        return image

    def _start(self, image: str) -> None:
        labels = {DEMO_LABEL: "true", _RESTRICTED: "restricted"}
        space = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": self._namespace, "labels": labels},
        }
        self._has_namespace = True  # set before the request, because the response may be lost
        self._connection.ask(lambda server: server.create(NAMESPACES, space))
        self._installation.wait_for_injection(self._namespace)
        self._training.start(self._checkout / EXAMPLES, self._show.args, image)
        say(f"  namespace {self._namespace}, pod security profile restricted")
        say(f"  job {SUPERVISED}: examples/kubernetes/job.yaml, whose pods have one annotation for Holdfast")
        say(f"  job {TWIN}: the same job under torchrun, without Holdfast and without faults")
        self._training.wait_for_start(self._live)
        self.clear()
        for name in (SUPERVISED, TWIN):
            say(f"  {pods.places(self._training.pods_of(name))}")

    def _break(self, chosen: Sequence[ClusterFault]) -> bool:
        breaker, good = FaultMaker(self._connection, self._training), True
        step = 0
        for fault in chosen:
            step = self._calm_step(step + self._show.apart)
            say(f"  {_clock(time.monotonic() - self._began)}  {self._bold(fault.words)}")
            found = breaker.cause(fault, lambda incident: demo.describe(incident, self._style))
            calm = self._style.paint("no step lost, no incident", "32")
            say(f"        {found.text}{'' if found.incident else f': {calm}' if found.good else ''}")
            say(f"        {self._style.paint(found.pods, *(() if found.good else ('31',)))}")
            good = good and found.good
            step = self._training.observe().step
        if len(chosen) < len(self._show.faults):
            say("  omitted: killing the supervisor's pod, because the demo did not install this Holdfast")
        return good

    def _calm_step(self, step: int) -> int:
        """Wait until the job trains undisturbed at `step` or later, and return the current step."""

        def poll() -> int | None:
            view = self._training.view()
            self._progress(view.get("step"), view.get("loss"))
            if view.get("phase") in ENDING_PHASES:
                raise NotInTime(
                    f"the job was too fast: it ended before step {step}, where the next fault was due"
                )
            return int(view["step"]) if self._training.is_calm(step) else None

        found = self._training.until(poll, f"the job trains at step {step}", END_S)
        self.clear()
        return found

    def _end(self) -> None:
        """Wait until the job has ended, and print its incidents and its ledger."""

        def poll() -> bool | None:
            job = self._training.job()
            if job is None:
                raise NotInTime("the Supervision of the job was deleted")
            view = job.status() or {}
            self._progress(view.get("step"), view.get("loss"))
            return True if view.get("phase") == "ended" and not job.check_in_use() else None

        self._training.until(poll, "the job ends", END_S)
        self.clear()
        job = self._training.job()
        assert job is not None  # the job has just been seen to end
        view = job.status() or {}
        if view.get("exit_code") != 0:
            raise NotInTime(f"the job ended with exit code {view.get('exit_code')}: {view.get('message')}")
        say_all(f"  {line}" for line in incidents.lines(job.incidents()))
        say("")
        demo.show_ledger(view, self._style)
        say(f"  {in_place(job.incidents())}")

    def _compare(self) -> bool:
        """Print the digests of both jobs. Return True if they are equal."""

        def poll() -> tuple[str, str] | None:
            found = self._training.digest(SUPERVISED), self._training.digest(TWIN)
            return found if all(found) else None

        self._live("waiting for the undisturbed job to end")
        broken, calm = self._training.until(poll, "both jobs print the digest of their state", END_S)
        self.clear()
        width = max(len(SUPERVISED), len(TWIN))
        say(f"  {TWIN:{width}s}  undisturbed, torchrun  {calm[:40]}")
        mark = self._style.paint("equal", "32") if broken == calm else self._style.paint("DIFFERENT", "31")
        say(f"  {SUPERVISED:{width}s}  broken, Holdfast       {broken[:40]}  {mark}")
        if broken == calm:
            say("  Parameters, optimizer, buffers and random states of rank 0 are equal, bit for bit.")
        return broken == calm

    # -- the end

    def report_failure(self, why: str) -> None:
        """Print why the demo failed, and the state of the pods."""
        self.clear()
        say(f"  {self._style.paint(f'failed: {why}', '31')}")
        with suppress(ApiError, OSError):
            for name in (SUPERVISED, TWIN):
                listed = self._training.pods_of(name)
                say(f"  pods of {name}: {pods.waiting_for(listed) or pods.places(listed) or 'none'}")
            view = self._training.view()
            say(f"  job {SUPERVISED}: {view.get('phase')}, step {view.get('step')}, {view.get('message')}")

    def keep(self) -> None:
        """Print what is kept, and how to remove it."""
        say("", f"Everything is kept: try `holdfast explain last --job {self._namespace}/{SUPERVISED}`")
        say(f"To remove it: kubectl delete namespace {self._namespace}")
        if self._installation.is_ours:
            say("              kubectl delete -k manifests/default")

    def remove(self) -> bool:
        """Remove everything that the demo created. Return True if all of it is gone. Never raises."""
        if not self._has_namespace and not self._installation.is_ours:
            return True
        began = time.monotonic()
        _say("", "Removing everything that the demo created ...")
        not_deleted, removal = self._delete_namespace(), self._installation.remove(self._namespace)
        still_there = not_deleted or self._await_gone()
        problems = [each for each in (still_there, removal.text if removal.is_problem else "") if each]
        notes = [removal.text] if removal.text and not removal.is_problem else []
        for each in (*problems, *notes):
            _say(f"  {each}")
        if not problems:
            _say(f"  everything{' else' if notes else ''} was removed in {seconds(time.monotonic() - began)}")
        return not problems

    def _delete_namespace(self) -> str:
        if not self._has_namespace:
            return ""
        try:
            self._connection.ask(lambda server: server.delete(NAMESPACES, self._namespace))
        except NotFound:
            self._has_namespace = False
        except (ApiError, OSError) as error:
            return f"namespace {self._namespace} was not deleted ({error}): {self._by_hand}"
        return ""

    def _await_gone(self) -> str:
        deadline = time.monotonic() + GONE_S
        why: object = "its pods have not ended"
        while self._has_namespace and time.monotonic() < deadline:
            try:
                self._connection.ask(lambda server: server.get(NAMESPACES, self._namespace))
            except NotFound:
                self._has_namespace = False
            except (ApiError, OSError) as error:
                why = error
            time.sleep(POLL_S)
        if not self._has_namespace:
            return ""
        return f"namespace {self._namespace} was not removed within {GONE_S:g} s: {why}; {self._by_hand}"

    @property
    def _by_hand(self) -> str:
        return f"`kubectl delete namespace {self._namespace}`"

    # -- the terminal

    def _bold(self, text: str) -> str:
        return self._style.paint(text, "1")

    def _progress(self, step: int | None, loss: float | None) -> None:
        if step is not None:
            self._live(
                f"step {step} of {self._show.steps}" + (f"  loss {number(loss)}" if loss is not None else "")
            )

    def _live(self, text: object) -> None:
        """On a terminal, show a line that the next line replaces."""
        if sys.stdout.isatty() and text:
            sys.stdout.write(f"\r\x1b[K  {str(text)[:100]}")
            sys.stdout.flush()

    def clear(self) -> None:
        """Remove the live line."""
        with suppress(OSError):
            if sys.stdout.isatty():
                sys.stdout.write("\r\x1b[K")
                sys.stdout.flush()


def in_place(found: Sequence[Mapping[str, Any]]) -> str:
    """Describe the total time of the recoveries that needed no new pod from Kubernetes. Pure."""
    times = [
        float(each["recovered_s"])
        for each in found
        if each["kind"] != "member_lost" and each.get("recovered_s")
    ]
    return f"the {len(times)} recoveries without a new pod took {seconds(sum(times))} in total"


def _clock(spent_s: float) -> str:
    """Return a time since the start of the demo in minutes and seconds, such as 1:05."""
    return f"{int(spent_s) // 60:d}:{int(spent_s) % 60:02d}"


def _say(*texts: str) -> None:
    """Print `texts`. If the reader has exited, do nothing, because the removal must continue."""
    with suppress(BrokenPipeError, Unwritable):
        say(*texts)
