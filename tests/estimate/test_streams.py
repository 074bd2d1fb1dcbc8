"""The simulation of two streams, against steps that were worked out by hand, and what holds of any."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layoutc.estimate.streams import GroupTimes, Task, in_a_row, run, tasks_of


def steps(*groups: tuple[float, ...], optimizer: float = 0.0) -> list[Task]:
    return tasks_of([GroupTimes(*group) for group in groups], optimizer)


def test_one_group_overlaps_nothing() -> None:
    made = run(steps((1, 2, 3, 4, 5), optimizer=6))
    assert (made.total, made.overlapped) == (21, 0)


def test_two_groups_by_hand_where_compute_decides() -> None:
    """gather 0 0-1, forward 0 1-5, gather 1 1-2, forward 1 5-9, gather again 1 9-10, backward 1 10-18, gather again 0
    10-11, reduce 1 18-20, backward 0 18-26, reduce 0 26-28, optimizer 28-31."""
    made = run(steps((1, 4, 1, 8, 2), (1, 4, 1, 8, 2), optimizer=3))
    assert made.spans == {
        "gather 0": (0, 1),
        "forward 0": (1, 5),
        "gather 1": (1, 2),
        "forward 1": (5, 9),
        "gather again 1": (9, 10),
        "backward 1": (10, 18),
        "gather again 0": (10, 11),
        "reduce 1": (18, 20),
        "backward 0": (18, 26),
        "reduce 0": (26, 28),
        "optimizer": (28, 31),
    }
    assert (made.total, made.overlapped) == (31, 1 + 1 + 2)


def test_three_groups_by_hand_where_the_link_decides() -> None:
    """The link never rests between its first gather of backward and its last reduce-scatter: 3 gathers, 3 reduces."""
    made = run(steps(*[(10, 1, 10, 2, 20)] * 3))
    assert made.spans["forward 2"] == (30, 31)
    assert made.spans["gather again 2"] == (31, 41)
    assert made.spans["gather again 1"] == (41, 51)
    assert made.spans["reduce 2"] == (51, 71)  # after the gather that was issued before it
    assert made.spans["backward 1"] == (51, 53)
    assert made.spans["gather again 0"] == (71, 81)
    assert made.spans["reduce 1"] == (81, 101)
    assert made.spans["backward 0"] == (81, 83)
    assert made.total == 121


def test_one_reduce_scatter_is_in_flight() -> None:
    """Backward of group 0 waits for the reduce-scatter of group 2, though its own weights are there at once."""
    made = run(steps((0, 1, 0, 1, 0), (0, 1, 0, 1, 10), (0, 1, 0, 1, 50)))
    assert made.spans["reduce 2"][1] == made.spans["backward 0"][0] == 54


def test_a_gather_waits_for_the_buffers_of_the_one_before_the_last() -> None:
    made = run(steps((1, 10, 0, 0, 0), (1, 10, 0, 0, 0), (1, 10, 0, 0, 0), (1, 10, 0, 0, 0)))
    assert [made.spans[f"gather {i}"][0] for i in range(4)] == [0, 1, 2, 11]


def test_the_host_is_waited_for() -> None:
    made = run(tasks_of([GroupTimes(0, 1, 0, 1, 0, host_forward=5, host_backward=7)] * 2))
    assert [made.spans[name][0] for name in ("forward 0", "forward 1", "backward 1", "backward 0")] == [5, 10, 17, 24]
    assert made.total == 25


def test_interference_by_hand() -> None:
    """Alone 4 and 6. With 1/2: both at 2/3 until the first has done its 4, at 6; the other has 2 left then."""
    made = run([Task("a", "compute", 4), Task("b", "link", 6)], interference=0.5)
    assert made.spans["a"][1] == pytest.approx(6)
    assert made.total == pytest.approx(8)
    assert made.overlapped == pytest.approx(6)


def test_a_link_that_is_not_disturbed_by_hand() -> None:
    """It does its 6 in 6, which slow the other's 4 to 6. Half disturbed, it runs at 4/5 until that is done."""
    tasks = [Task("a", "compute", 4), Task("b", "link", 6)]
    assert run(tasks, 0.5, 0.0).spans == {"a": (0, pytest.approx(6)), "b": (0, pytest.approx(6))}
    assert run(tasks, 0.5, 0.5).spans == {"a": (0, pytest.approx(6)), "b": (0, pytest.approx(6 + (6 - 6 * 0.8)))}


def test_memory_is_not_interfered_with_by_hand() -> None:
    """Half of forward is what memory decides, so that both run at 1 / (1 + 1/2 * 1/2): 4 takes 5 beside the gather."""
    groups = [GroupTimes(0, 4, 0, 0, 0, memory_forward=2), GroupTimes(8, 0, 0, 0, 0)]
    made = run(tasks_of(groups), interference=0.5)
    assert made.spans["forward 0"] == pytest.approx((0, 5))
    assert made.spans["gather 1"] == pytest.approx((0, 9))
    groups[0] = replace(groups[0], memory_forward=4)
    assert run(tasks_of(groups), interference=0.5).spans["gather 1"] == pytest.approx((0, 8))


def test_steps_in_a_row_by_hand() -> None:
    """The host takes 4 of a step: it issues gather 0 at 0, forward 0 at 2, backward and all else at 4; of the next step
    at 4, 6 and 8. gather 0 0-1, forward 0 2-4, backward 0 4-8, reduce 0 8-9, optimizer 9-12; gather 0 12-13, when the
    optimizer is done, forward 0 13-15, backward 0 15-19, reduce 0 19-20, optimizer 20-23."""
    tasks = tasks_of([GroupTimes(1, 2, 0, 4, 1, host_forward=2, host_backward=2)], 3)
    assert run(tasks).total == 12
    made = run(in_a_row(tasks, 2, 4))
    assert made.total == 23
    assert made.spans["gather 0 of step 1"] == (12, 13)
    assert made.spans["forward 0 of step 1"] == (13, 15)


groups_of_whole_seconds = st.lists(
    st.builds(GroupTimes, *[st.integers(0, 9)] * 5, host_forward=st.integers(0, 9), host_backward=st.integers(0, 9)),
    min_size=1,
    max_size=4,
)


@given(groups=groups_of_whole_seconds, optimizer=st.integers(0, 9), steps=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_steps_in_a_row_take_no_more_than_by_themselves(groups: list[GroupTimes], optimizer: int, steps: int) -> None:
    """And no less than the host takes of them, or the card without the host; a single one is as it was."""
    host = sum(group.host_forward + group.host_backward for group in groups)
    alone, row = tasks_of(groups, optimizer), in_a_row(tasks_of(groups, optimizer), steps, host)
    without = run([replace(task, issued=0.0) for task in alone]).total
    assert max(steps * without, steps * host) <= run(row).total <= steps * run(alone).total
    assert run(in_a_row(alone, 1, host)).total == run(alone).total


def test_tasks_that_wait_for_one_another_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wait for one another: \['a', 'b'\]"):
        run([Task("a", "compute", 1, (("b", "end"),)), Task("b", "link", 1, (("a", "end"),))])


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 20)] * 5), min_size=1, max_size=6),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.25, 1.0]),
)
def test_bounds(groups: list[tuple[int, ...]], optimizer: int, interference: float) -> None:
    """All work is done, in order, in no more time than one after another at the slower pace."""
    tasks = steps(*groups, optimizer=optimizer)
    made = run(tasks, interference)
    busy = {stream: sum(task.seconds for task in tasks if task.stream == stream) for stream in ("compute", "link")}
    assert made.total >= max(busy.values()) - 1e-9
    assert made.total <= sum(busy.values()) * (1 + interference) + 1e-9
    assert made.spans.keys() == {task.name for task in tasks}
    for stream in busy:
        spans = [made.spans[task.name] for task in tasks if task.stream == stream]
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for task in tasks:
        for name, edge in task.after:
            assert made.spans[name][edge == "end"] <= made.spans[task.name][0]


@settings(deadline=None)
@given(
    st.tuples(*[st.floats(0, 10)] * 5),
    st.integers(1, 6),
    st.floats(1, 3),
    st.sampled_from([0.0, 0.68, 2.0]),
)
def test_a_slower_link_is_never_faster(
    group: tuple[float, ...], count: int, slower: float, interference: float
) -> None:
    """Of equal groups, as models have them, whatever interference does."""

    def total(by: float) -> float:
        gather, forward, again, backward, reduce = group
        times = GroupTimes(gather * by, forward, again * by, backward, reduce * by)
        return run(tasks_of([times] * count, 1.0), interference).total

    assert total(slower) >= total(1) * (1 - 1e-9)
