"""JSON lines: files of one object a line, which stay readable whatever ends the program that writes them."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from pathlib import Path
from types import TracebackType


def parse_lines(path: Path, data: bytes) -> list[dict]:
    """The objects of a file's content, blank lines aside. Raises ValueError naming the line that is none."""
    found = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name_of(path)}, line {number}: expected JSON, got {line[:80]!r} ({error})") from None
        if not isinstance(value, dict):
            raise ValueError(f"{name_of(path)}, line {number}: expected a JSON object, got {line[:80]!r}")
        found.append(value)
    return found


STANDARD = Path("-")  # standard input or output


def is_stream(path: Path) -> bool:
    """Whether a path is standard input or output, a pipe or a device, which lines pass through and do not stay in."""
    return path == STANDARD or path.parts[:2] in (("/", "dev"), ("/", "proc")) or path.is_fifo() or path.is_socket()


def check_index(option: str, path: Path) -> None:
    """Raise ValueError where no file can be written at a path."""
    if is_stream(path):
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option}: expected a file in a folder that there is, got {path}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: expected a place that can be written to, got {path}")


def name_of(path: Path) -> str:
    """What messages call a file that is read."""
    return "standard input" if path == STANDARD else str(path)


def read_bytes(path: Path) -> bytes:
    """All that a file, a pipe or standard input holds."""
    return sys.stdin.buffer.read() if path == STANDARD else path.read_bytes()


def open_lines(path: Path, *, durable: bool = False) -> JsonLines | StreamLines:
    """Lines to append to, in a file or through a stream. Raises as `JsonLines`."""
    return StreamLines(path) if is_stream(path) else JsonLines(path, durable=durable)


class StreamLines:
    """Lines that somebody else reads as they come; of those before nothing is known."""

    is_new = True

    def __init__(self, path: Path = STANDARD) -> None:
        self.path = path
        self.kept: list[dict] = []
        self._file = sys.stdout.buffer if path == STANDARD else path.open("ab")

    def append(self, values: dict) -> None:
        """Write one line."""
        self._file.write(_line(values))
        self._file.flush()

    def clear(self) -> None:
        """What was written is gone already."""

    def close(self) -> None:
        """Let go of the stream; standard output is not ours."""
        if self.path != STANDARD:
            self._file.close()


class JsonLines:
    """A file that lines are appended to, by one process at a time.

    A last line without its end is not kept, and is cut off as soon as another is written; until then nothing changes.
    durable: every line is on the disk before the next one is begun. kept: the lines that were there already.
    is_new: whether there was nothing in the file.
    Raises ValueError where another process writes the file, or where one of its lines is no JSON object.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path = path
        self._durable = durable
        self._torn: int | None = None  # where a line without its end begins
        self._file = path.open("a+b")
        try:
            self._lock()
            self.kept = self._read()
        except BaseException:
            self._file.close()
            raise

    def append(self, values: dict) -> None:
        """Write one line."""
        if self._torn is not None:
            self._file.truncate(self._torn)
            self._torn = None
        self._file.write(_line(values))
        self._file.flush()
        if self._durable:
            os.fsync(self._file.fileno())

    def clear(self) -> None:
        """Forget all lines."""
        self._file.truncate(0)
        self.kept, self._torn = [], None

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{self.path}: expected a file that no other process writes") from None

    def _read(self) -> list[dict]:
        self._file.seek(0)
        data = self._file.read()
        self.is_new = not data
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._torn = len(whole)
        return parse_lines(self.path, whole)


def _line(values: dict) -> bytes:
    text = json.dumps(values, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"  # half a surrogate pair, as JSON writes it


def write_whole(path: Path, values: dict) -> None:
    """Put one object into a file of its own, on the disk, so that the file is never seen half written."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(values, file, ensure_ascii=False, indent=1)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
