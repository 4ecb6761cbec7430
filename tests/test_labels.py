"""A label shows whether the process that created it has ended."""

from __future__ import annotations

import os

from lightning_zero.io.labels import is_left_over, new_label


def test_a_label_counts_as_living_until_its_process_has_ended(tmp_path):
    own = new_label()
    assert not is_left_over(own, tmp_path) and new_label() != own
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        is_living = not is_left_over(new_label(), tmp_path) and not is_left_over(own, tmp_path)
        os.write(writer, new_label().encode() if is_living else b"-")
        os._exit(0)
    label = os.read(reader, 1000).decode()
    assert not is_left_over(label, tmp_path)  # its number is not reused before it is waited for
    os.waitpid(child, 0)
    assert is_left_over(label, tmp_path)


def test_a_label_of_an_earlier_process_with_the_same_number_counts_as_dead(tmp_path):
    """As in a container that was killed and started again."""
    process, _, number = new_label().rpartition("-")
    earlier = f"{process}-{int(number, 16) - 3600 * 10**9:x}"
    assert is_left_over(earlier, tmp_path)


def test_a_label_of_another_machine_counts_as_living_while_its_file_is_new(tmp_path):
    assert not is_left_over(f"elsewhere.1-{os.getpid()}-18a0", tmp_path)
