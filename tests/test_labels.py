"""A label shows whether the process that created it has ended."""

from __future__ import annotations

import os

from lightning_zero.io.labels import is_of_the_dead, new_label


def test_a_label_counts_as_living_until_its_process_has_ended():
    own = new_label()
    assert is_of_the_dead(own) is False and new_label() != own
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        is_own = is_of_the_dead(new_label()) is False and is_of_the_dead(own) is False
        os.write(writer, new_label().encode() if is_own else b"-")
        os._exit(0)
    label = os.read(reader, 1000).decode()
    assert is_of_the_dead(label) is False  # the child has ended, but its number is not reused before it is waited for
    os.waitpid(child, 0)
    assert is_of_the_dead(label) is True


def test_a_label_of_an_earlier_process_with_the_same_number_counts_as_dead():
    """As in a container that was killed and started again."""
    process, _, number = new_label().rpartition("-")
    earlier = f"{process}-{int(number, 16) - 3600 * 10**9:x}"
    assert is_of_the_dead(earlier) is True


def test_whether_a_process_of_another_machine_has_ended_is_unknown():
    assert is_of_the_dead(f"elsewhere.1-{os.getpid()}-18a0") is None
