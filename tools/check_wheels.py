"""Build every package into dist/, and prove that the wheels are what a user needs.

- one wheel per package: abi3 when it has C, py3-none-any otherwise, and an sdist beside it
- every wheel holds its py.typed; wheel and sdist hold the license
- the torch-free wheels, installed in an empty environment with their dependencies, run their README's example
- lf-graph's wheel does so with torch and none of its siblings, and without Triton
- the torch-free ones also on Python 3.12 and 3.13 where they are installed
- lf-iouring's sdist without a compiler still installs, with its Python engine
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"

# No byte code: torch alone takes 15 s to compile, and little of it is imported.
INSTALL = ["-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
TORCH_FREE = ["lf-format", "lf-memory", "lf-iouring"]


def run(*command: str, env: dict[str, str] | None = None, cwd: str | Path = DIST) -> str:
    """Run a command, echo it, return its output; a failure ends the check."""
    print("+", " ".join(c if "\n" not in c else "<example>" for c in command), flush=True)
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=env)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout.strip()


def two_at_a_time(calls: Iterable[Callable[[], object]]) -> None:
    """Call all; the first that fails ends the check once what runs beside it has ended."""
    with ThreadPoolExecutor(2) as pool:
        for made in [pool.submit(call) for call in calls]:
            made.result()


def build_all() -> None:
    """Wheel and sdist of every package, in this environment (its build requirements are there)."""
    DIST.mkdir(exist_ok=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST)]
    two_at_a_time(partial(run, *build, str(p)) for p in sorted((ROOT / "packages").iterdir()))


def check_names() -> None:
    """Compiled packages give one abi3 wheel, pure ones a universal wheel; all of them are typed."""
    for package in sorted((ROOT / "packages").iterdir()):
        wheels = list(DIST.glob(f"{package.name.replace('-', '_')}-*.whl"))
        kind = "-cp311-abi3-linux_" if (package / "csrc").exists() else "-py3-none-any"
        if len(wheels) != 1 or kind not in wheels[0].name:
            sys.exit(f"{package.name}: expected one {kind} wheel, found {[w.name for w in wheels]}")
        marker = f"{package.name.replace('-', '_')}/py.typed"
        if marker not in zipfile.ZipFile(wheels[0]).namelist():
            sys.exit(f"{wheels[0].name}: no {marker}")
        (sdist,) = DIST.glob(f"{package.name.replace('-', '_')}-*.tar.gz")
        check_license(wheels[0], sdist)


def check_license(wheel: Path, sdist: Path) -> None:
    """Both hold the repository's license, and the wheel's metadata names it; a failure ends the check."""
    text = (ROOT / "LICENSE").read_bytes()
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        held = f"{info}/licenses/LICENSE"
        if held not in names or archive.read(held) != text:
            sys.exit(f"{wheel.name}: no {held} with the text of this repository")
        if b"\nLicense-File: LICENSE\n" not in archive.read(f"{info}/METADATA"):
            sys.exit(f"{wheel.name}: its metadata names no license file")
    with tarfile.open(sdist) as archive:
        name = sdist.name.removesuffix(".tar.gz") + "/LICENSE"
        if name not in archive.getnames() or archive.extractfile(name).read() != text:
            sys.exit(f"{sdist.name}: no {name} with the text of this repository")


def example(package: str) -> str:
    """The first Python example of a package's README."""
    found = re.search(
        r"^```python\n(.*?)^```", (ROOT / "packages" / package / "README.md").read_text(), re.M | re.S
    )
    if found is None:
        sys.exit(f"{package}: its README has no Python example")
    return found[1]


def install_alone() -> None:
    """The torch-free wheels in an empty environment; each README's first example runs there."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = f"{folder}/bin/python"
        run(python, *INSTALL, "--find-links", str(DIST), *TORCH_FREE)
        for package in TORCH_FREE:
            print(run(python, "-c", example(package), cwd=folder))
        run(
            python,
            "-c",
            "import lf_iouring._native, importlib.util; assert importlib.util.find_spec('torch') is None",
        )
        run(f"{folder}/bin/lf-format", "--help")


def install_with_torch() -> None:
    """lf-graph in an empty environment with the torch of constraints.txt alone: no sibling, and no Triton."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = f"{folder}/bin/python"
        constraints = str(ROOT / "constraints.txt")
        run(python, *INSTALL, "--find-links", str(DIST), "-c", constraints, "lf-graph", "torch")
        # -I: neither this checkout nor PYTHONPATH may lend what the wheel lacks
        print(run(python, "-I", "-c", example("lf-graph"), cwd=folder))
        run(
            python,
            "-I",
            "-c",
            "import sys, lf_graph, importlib.metadata as m; assert lf_graph.__file__.startswith(sys.prefix)\n"
            "found = {d.name.lower() for d in m.distributions()}\n"
            "assert {n for n in found if n.startswith('lf-')} == {'lf-graph'}, found\n"
            "assert 'triton' not in sys.modules",
        )


def install_on_newer_pythons() -> None:
    """The same wheels on every later interpreter that is installed here: one abi3 build serves them all."""
    for name in ("python3.12", "python3.13"):
        python = shutil.which(name)
        if python is None or subprocess.run([python, "-c", ""], capture_output=True).returncode:
            print(f"{name}: not installed here, not tried")
            continue
        with tempfile.TemporaryDirectory() as folder:
            run(python, "-m", "venv", folder)
            run(f"{folder}/bin/python", *INSTALL, "--find-links", str(DIST), *TORCH_FREE)
            print(run(f"{folder}/bin/python", "-c", example("lf-iouring"), cwd=folder))


def install_without_compiler() -> None:
    """An sdist where there is no C compiler: the Python engine, which says why it was taken."""
    sdist = next(DIST.glob("lf_iouring-*.tar.gz"))
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = f"{folder}/bin/python"
        env = {**os.environ, "CC": "/nonexistent/cc"}
        run(python, *INSTALL, "--find-links", str(DIST), str(sdist), env=env)
        printed = run(python, "-c", example("lf-iouring"), cwd=folder)
        if "name='python'" not in printed:
            sys.exit(f"without a compiler the engine should be the Python one: {printed}")


if __name__ == "__main__":
    build_all()
    check_names()
    two_at_a_time([install_with_torch, install_alone, install_on_newer_pythons, install_without_compiler])
    print("wheels: ok")
