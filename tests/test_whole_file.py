"""A result's file is whole, or as it was."""

import errno
from pathlib import Path
from typing import NoReturn

import pytest

from ep_overlap.report.whole_file import CannotWriteError, write_whole


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "result.json"
    for content in ("first", b"second", "dritter äöü"):
        write_whole(target, content)
        read = target.read_bytes()
        assert read == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("was_there", [True, False])
def test_a_disk_that_fills_up_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, was_there: bool
) -> None:
    target = tmp_path / "steps.png"
    if was_there:
        target.write_text("before")
    write_bytes = Path.write_bytes

    def fills_up(path: Path, data: bytes) -> NoReturn:
        write_bytes(path, data[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fills_up)
    with pytest.raises(CannotWriteError, match=r"steps\.png: No space left on device$"):
        write_whole(target, "after")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"] * was_there


def test_a_device_is_written_to_as_it_is() -> None:
    write_whole(Path("/dev/null"), "all of it")
    assert not Path("/dev/null").is_file()
