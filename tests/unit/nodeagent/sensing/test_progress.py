from __future__ import annotations

from nodeagent.sensing.progress import CallProgress, MarksProgress


def test_the_newest_mark_names_the_call_and_its_device() -> None:
    progress = CallProgress()
    assert progress.newest() == ("", 0.0)
    progress.mark("nvmlInit")
    first, began = progress.newest()
    progress.mark("nvmlDeviceGetUUID", "0000:3b:00.0")
    second, later = progress.newest()
    assert (first, second) == ("nvmlInit", "nvmlDeviceGetUUID of 0000:3b:00.0")
    assert later >= began > 0


def test_a_call_may_be_marked_by_its_function() -> None:
    progress = CallProgress()
    progress.marked = (test_a_call_may_be_marked_by_its_function, "a GPU", 5.0)
    assert progress.newest() == ("test_a_call_may_be_marked_by_its_function of a GPU", 5.0)


def test_a_sensor_marks_its_calls_if_it_has_a_progress() -> None:
    class Marking:
        progress = CallProgress()

    assert isinstance(Marking(), MarksProgress)
    assert not isinstance(object(), MarksProgress)
