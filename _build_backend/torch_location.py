"""Find an installed torch without importing it. Printed for CMake, called by the build backend."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

STABLE_HEADER = Path("include", "torch", "csrc", "stable", "library.h")


def torch_folder() -> Path | None:
    """Return the folder of a torch that carries the stable ABI headers, or None.

    pip's build isolation hides site-packages from `sys.path`, but sysconfig still names it.
    """
    candidates = [Path(sysconfig.get_path("purelib"), "torch"), Path(sysconfig.get_path("platlib"), "torch")]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        candidates.insert(0, Path(spec.origin).parent)
    return next((folder for folder in candidates if (folder / STABLE_HEADER).is_file()), None)


if __name__ == "__main__":
    folder = torch_folder()
    if folder is None:
        raise SystemExit("no torch with the stable ABI headers (torch >= 2.11) is installed for this Python")
    print(folder)
