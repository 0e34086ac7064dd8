import pytest

from tools.ci import durations
from tools.ci.durations import Duration


def test_the_limit_follows_the_speed_of_the_machine():
    slow = [Duration("//:a", 320.0, 310.0)]
    assert durations.too_slow(slow, 1.0) == slow
    assert durations.too_slow(slow, 3.0) == []


def test_a_target_fails_only_where_it_is_clearly_over_by_the_clock_and_in_cpu_time():
    fine = [
        Duration("//:waited", 400.0, 60.0),
        Duration("//:processes", 70.0, 200.0),
        Duration("//:close", 120.0, 120.0),
    ]
    over = [Duration("//:over", 230.0, 240.0), Duration("//:unreported", 300.0, None)]
    assert durations.too_slow(fine + over, 1.0) == [over[1], over[0]]


def test_table_lists_the_slowest_and_the_sums():
    lines = durations.table(
        [Duration("//:a", 1.0, 2.0), Duration("//:b", 3.0, None), Duration("//:c", 2.0, 1.5)], 2.0, 2
    )
    assert lines[:4] == [
        " seconds      CPU",
        "     3.0          //:b",
        "     2.0      1.5 //:c",
        "     6.0      3.5 all 3 targets",
    ]
    assert "100 x 2.00 x 2.0 = 400 seconds" in lines[4]


def test_slowness_is_that_of_a_fixed_piece_of_work():
    assert durations.slowness(0.6) == pytest.approx(3.0)
    assert durations.slowness(0.0) == 1.0  # a faster machine has the same limit
    assert durations.workload_seconds(1) > 0
