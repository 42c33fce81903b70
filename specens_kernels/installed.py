"""Where the C library lies that this package installs: what engines in other languages link."""

from __future__ import annotations

from pathlib import Path

from specens_kernels import __path__ as package_folders


def get_include() -> str:
    """The folder of specens.h, for a compiler's -I. Raises RuntimeError where the extension is not built."""
    return _folder("include", "specens.h")


def get_library() -> str:
    """The folder of libspecens, shared and static, for a linker's -L. Raises RuntimeError where they are not built.

    Below it lie cmake/specens (find_package(specens CONFIG)) and pkgconfig/specens.pc.
    """
    return _folder("lib", "libspecens.a")


def _folder(name: str, of_file: str) -> str:
    for package in package_folders:
        if (folder := Path(package, name)).joinpath(of_file).is_file():
            return str(folder)
    raise RuntimeError(f"not built: the package has no {name}/{of_file}")
