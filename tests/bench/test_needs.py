from __future__ import annotations

from dataclasses import replace

from bench import needs
from bench.measure import Memory
from bench.needs import CROWDING, MEMORY_MARGIN, Needs
from bench.systems import ANCHOR
from tests.bench import make

FREE = 1000


def test_without_anything_known_a_system_takes_a_quarter():
    assert Needs().num_that_fit("abcdef", FREE, 6) == 4
    assert Needs().num_that_fit("abcdef", FREE, 3) == 3
    assert Needs().num_that_fit("ab", None, 6) == 2  # no memory to run out of


def test_who_is_not_known_takes_as_much_as_the_largest():
    known = Needs(reserved_bytes={"a": 100, "b": 200})
    assert MEMORY_MARGIN * (100 + 3 * 200) <= FREE < MEMORY_MARGIN * (100 + 4 * 200)
    assert known.num_that_fit("abcde", FREE, 9) == 4
    assert known.num_that_fit("a", 10, 9) == 0


def test_time_is_that_of_the_slowest_or_of_the_anchor():
    known = Needs(build_s={ANCHOR: 10.0, "slow": 30.0})
    assert Needs().time_s(["a"], 20.0) == 20.0
    assert known.time_s(["a"], 20.0) == 10.0
    assert known.time_s(["slow", "a"], 20.0) == CROWDING * 30.0


def test_rows_of_other_machines_and_workloads_say_nothing():
    memory = Memory(allocated_bytes=1, reserved_bytes=7)
    row = make.measurement("a", workload="w", facts=make.facts(memory=memory, cold_compile_s=3.0))
    other = replace(row, facts=make.facts(memory=None, cold_compile_s=None))
    found = needs.on_record([row, other, make.ceilings()], "w", row.run.machine.device)
    assert (found.reserved_bytes, found.build_s) == ({"a": 7}, {"a": 3.0})
    assert needs.on_record([row], "w", "another") == needs.on_record([row], "v", row.run.machine.device) == Needs()
