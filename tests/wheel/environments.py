"""Builds a wheel for each Python, repairs it as a release does, and tests it beside each torch, in clean environments.

python tests/wheel/environments.py 3.11:2.13.0 3.12:2.11.0     # Python:torch; run by `make test-wheel`

Every environment is pip's own: its settings say where torch comes from. What could not be checked is told, and fails.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
BUILD = ["scikit-build-core>=0.11", "pybind11>=3.0", "cmake>=3.26", "ninja"]
LARGEST_SDIST = 1_000_000  # bytes


def run(*command: object, **settings: object) -> str:
    """The output of a command; RuntimeError with the end of it where it fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **settings)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("WARNING: ")]
        raise RuntimeError("\n".join([f"{Path(str(command[0])).name} failed", *said[-15:]]))
    return done.stdout


def interpreter(version: str) -> Path:
    """A Python of this version: on PATH, or one that uv knows."""
    found = shutil.which(f"python{version}")
    if found and not subprocess.run([found, "-m", "venv", "-h"], capture_output=True, check=False).returncode:
        return Path(found)
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise RuntimeError(f"no python{version} on PATH, and no uv to find one")
    return Path(run(uv, "python", "find", version).strip())


def environment(folder: Path, version: str, *packages: str) -> Path:
    """The interpreter of a new environment with these packages."""
    run(interpreter(version), "-m", "venv", "--clear", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", *packages)
    return python


def build(version: str, folder: Path) -> Path:
    """The repaired wheel of this Python; kept in dist/ for the next torch."""
    python = interpreter(version)
    tag = "cp" + run(python, "-c", "import sys; print('%d%d' % sys.version_info[:2])").strip()
    kept = [path for path in DIST.glob(f"*-{tag}-{tag}-many*.whl") if platform.machine() in path.name]
    if kept:
        return kept[0]
    # Headers of any torch that is served do; no dependency of it is needed to build.
    python = environment(folder / "build", version, *BUILD)
    run(python, "-m", "pip", "install", "-q", "--no-deps", os.environ.get("WHEEL_BUILD_TORCH", "torch>=2.11"))
    path = {
        **os.environ,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(python.parents[1]),
    }
    options = ["--no-deps", "--no-build-isolation", "-w", folder / "plain"]
    for setting in (f"build-dir={folder}/objects", "cmake.define.SPECENS_CUDA=OFF"):
        options += ["--config-settings", setting]  # -C since pip 23.1, and Python 3.10 brings 23.0
    run(python, "-m", "pip", "wheel", *options, ROOT, env=path)
    shutil.rmtree(folder / "build")
    return repair(next((folder / "plain").glob("*.whl")), tag)


def repair(wheel: Path, tag: str) -> Path:
    """Give it the tag of the oldest C library that it runs with; torch stays outside."""
    if sys.platform != "linux":
        return Path(shutil.copy(wheel, DIST))
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = ["auditwheel", "repair", "--exclude", "libtorch_cpu.so", "-w", DIST, wheel]
    run(sys.executable, "-m", *command, env=tools)
    return next(DIST.glob(f"*-{tag}-{tag}-many*.whl"))


def check(version: str, torch: str, folder: Path) -> str:
    """Install beside this torch, and run the tests of a wheel; what they say."""
    wheel = build(version, folder)
    python = environment(folder / "venv", version, f"torch=={torch}", wheel, "pytest>=8")
    run(python, "-m", "pip", "check")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    tests = Path(shutil.copytree(ROOT / "tests" / "wheel", folder / "tests"))
    said = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, env=clean, cwd=folder)
    return f"{wheel.name.split('-', 3)[-1].removesuffix('.whl')}: {said.strip().splitlines()[-1]}"


def sdist() -> str:
    """Build the source release, and hold its size."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "-q", "--sdist", "--no-isolation", "-o", folder, ROOT)
        file = next(Path(folder).glob("*.tar.gz"))
        if file.stat().st_size > LARGEST_SDIST:
            raise RuntimeError(f"{file.name}: expected at most {LARGEST_SDIST} bytes, got {file.stat().st_size}")
        shutil.copy(file, DIST)
        return f"{file.name}, {file.stat().st_size / 1e6:.2f} MB"


def main(pairs: list[str]) -> int:
    """Check the source release and each pair; print a line of each. 1 where one failed or could not be had."""
    DIST.mkdir(exist_ok=True)
    failed = 0
    for pair in ["sdist", *pairs]:
        start = time.monotonic()
        try:
            if pair == "sdist":
                said = sdist()
            else:
                version, torch = re.fullmatch(r"(3\.\d+):([\d.]+)", pair).groups()  # type: ignore[union-attr]
                with tempfile.TemporaryDirectory(prefix="specens-wheel-") as folder:
                    said = check(version, torch, Path(folder))
        except RuntimeError as error:
            said, failed = f"FAILED: {error}", failed + 1
        print(f"{pair:14} {time.monotonic() - start:5.0f} s  {said}", flush=True)
    print(f"{len(pairs) + 1 - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
