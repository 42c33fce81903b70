"""Find an installed torch without importing it. Printed for CMake, called by the build backend."""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path

OLDEST_TORCH = (2, 11)  # what TORCH_TARGET_VERSION in cmake/torch.cmake names; headers of the stable ABI are older


def torch_folders() -> list[Path]:
    """The folders of installed torches, that which `import torch` would find first.

    pip's build isolation hides site-packages from `sys.path`, but sysconfig still names it.
    """
    folders = [Path(sysconfig.get_path("purelib"), "torch"), Path(sysconfig.get_path("platlib"), "torch")]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        folders.insert(0, Path(spec.origin).parent)
    return [folder for folder in dict.fromkeys(folders) if (folder / "version.py").is_file()]


def torch_version(folder: Path) -> str:
    """As torch's own version.py says it: 2.13.0+cpu."""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", (folder / "version.py").read_text(), re.M)
    return found[1] if found else "0.0"


def torch_folder() -> Path | None:
    """Return the folder of a torch that the extension can be built against, or None."""
    return next((folder for folder in torch_folders() if _is_new_enough(torch_version(folder))), None)


def _is_new_enough(version: str) -> bool:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= OLDEST_TORCH


def missing() -> str:
    """Why there is no torch to build against."""
    needed = ".".join(map(str, OLDEST_TORCH))
    found = "; ".join(f"found {torch_version(folder)} in {folder}" for folder in torch_folders())
    return f"torch: expected {needed} or newer to be installed for this Python, {found or 'found none'}"


if __name__ == "__main__":
    folder = torch_folder()
    if folder is None:
        raise SystemExit(missing())
    print(folder)
