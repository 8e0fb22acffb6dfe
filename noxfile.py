"""Development commands: ``nox`` runs every test, lint and type check; ``nox -s train`` runs the default job.

Sessions that need torch share one environment (``.nox/shared-torch``), and the others one without torch
(``.nox/shared-base``), which also proves that those packages do not need it. An environment is built anew when
a pyproject, the constraints or a C source changes.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import sys
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = ["lf-format", "lf-memory", "lf-iouring", "lf-graph", "lf-comm", "lf-ckpt", "lf-hal", "lf-meta"]
BASE = ["lf-format", "lf-memory", "lf-iouring"]  # usable without torch, and tested without it
DEV = ["pytest>=8", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil"]
# lf-graph's check, partition and recipes are tested on its models, and gr00t_n16_vla against its blocks
TORCH_DEV = ["torch==2.13.0", "transformers>=5", "diffusers>=0.30"]
LINT = ["ruff", "mypy", "types-PyYAML"]
BUILD = ["build", "hatchling>=1.27", "cffi>=1.17", "setuptools>=70"]
GPU_WHEELS = [
    "cffi",
    "pycparser",
    "zstandard",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "annotated-types",
]
GPU_WHEELS += ["typing-inspection", "hypothesis", "xxhash"]
INSTALL = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
# Tests start hundreds of processes. Without byte code each of them compiles all that it imports.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# every optional feature is tested, except that the torch-free packages stay torch-free
WITHOUT = {"torch"}
# Each test on one thread, two at a time: lf-meta's mostly wait for processes they start (those that share a trained
# model stay together), the others take half the time (ranks are started, and graphs traced, once for a file; lf-graph's
# long files, of kernels, begin). Tests of lf-memory's host half change kernel settings for a moment (huge pages), so
# they run one after another.
PARALLEL = {
    "lf-format": ["-n", "2"],
    "lf-iouring": ["-n", "2"],
    "lf-graph": ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"],
    "lf-comm": ["-n", "2", "--dist", "loadfile"],
    "lf-ckpt": ["-n", "2", "--dist", "loadfile"],
    "lf-hal": ["-n", "2", "--dist", "loadfile"],
    "lf-meta": ["-n", "2", "--dist", "loadgroup"],
}

SLOWEST = ["--durations=15", "--durations-min=3"]  # what a log says about where the time went

# Tests of torch-free packages that run once more, or only, where torch is: lf-memory's gradient half, which starts
# ranks once for a file; and of lf-iouring what speaks of torch, or makes loaders itself, which deliver tensors then.
WITH_TORCH = {
    "lf-iouring": ("test_*.py", r"torch|LoongDataLoader\(", ["-n", "2"]),
    "lf-memory": ("*/test_*.py", "", ["-n", "2", "--dist", "loadfile"]),
}

# The floors of metadata that are older than what the other sessions use.
OLDEST = {"lf-ckpt": "torch==2.6.0"}

# Packages with tests that need other machines' compilers and emulators, which nox -s cross brings.
CROSS = ["lf-iouring", "lf-hal"]

nox.options.sessions = ["lint", "types", "tests", "repo", "docs_examples", "wheels"]
nox.options.error_on_missing_interpreters = True
nox.needs_version = ">=2024.4"
# Two busy cores: spinning OpenMP threads cost 14-27x; has to be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell's background jobs inherit an ignored SIGINT, and tests of Ctrl-C would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _fingerprint(packages: list[str]) -> str:
    sources = [ROOT / "constraints.txt", ROOT / "noxfile.py"]
    for name in packages:
        folder = ROOT / "packages" / name
        sources += [folder / "pyproject.toml", *folder.glob("hatch_build.py"), *sorted(folder.glob("csrc/*"))]
        sources += sorted(folder.glob("src/*/_build_ffi.py"))
    digest = hashlib.sha256(sys.version.encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _extras(package: str) -> str:
    """``[a,b]`` with every extra of a package, or nothing."""
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    names = [name for name in project.get("optional-dependencies", {}) if name not in WITHOUT]
    return f"[{','.join(names)}]" if names else ""


def _environment(session: nox.Session, name: str, packages: list[str], tools: list[str]) -> str:
    """Python of a shared environment that holds ``packages`` editable; built on first use."""
    folder = ROOT / ".nox" / f"shared-{name}"
    python = str(folder / "bin" / "python")
    stamp = folder / "fingerprint"
    wanted = _fingerprint(packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    session.run(sys.executable, "-m", "venv", str(folder), external=True)
    pip = [python, *INSTALL]
    editable = [a for p in packages for a in ("-e", f"packages/{p}{_extras(p)}")]
    session.run(*pip, "-c", "constraints.txt", *tools, *editable, external=True)
    stamp.write_text(wanted)
    return python


def _torch_python(session: nox.Session) -> str:
    return _environment(session, "torch", PACKAGES, [*TORCH_DEV, *DEV, *LINT, *BUILD])


def _base_python(session: nox.Session) -> str:
    return _environment(session, "base", BASE, DEV)


def _python_for(session: nox.Session, package: str) -> str:
    return _base_python(session) if package in BASE else _torch_python(session)


def _peers_python(session: nox.Session, package: str) -> dict[str, str]:
    """LF_PEERS_PYTHON: an environment with the libraries a package is measured against; empty if there is none."""
    requirements = ROOT / "packages" / package / "benchmarks" / "peers" / "requirements.txt"
    if not requirements.exists():
        return {}
    digest = hashlib.sha256(sys.version.encode() + requirements.read_bytes()).hexdigest()[:12]
    folder = ROOT / ".nox" / f"peers-{package}-{digest}"
    stamp, python = folder / "complete", str(folder / "bin" / "python")
    if not stamp.exists():
        shutil.rmtree(folder, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(folder), external=True)
        try:
            session.run(python, *INSTALL, "-r", str(requirements), external=True)
        except nox.command.CommandFailed:
            session.warn(f"{requirements} could not be installed: rows of these libraries are SKIPPED")
            return {}
        stamp.touch()
    return {"LF_PEERS_PYTHON": python}


@nox.session(venv_backend="none")
def train(session: nox.Session) -> None:
    """The default run: pack real text, train, checkpoint, plot, sample. Extra arguments go to the command."""
    python = _torch_python(session)
    session.run(python, "-m", "lf_meta.cli", "train", *session.posargs, external=True)


@nox.session(venv_backend="none")
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """The tests of one package."""
    python = _python_for(session, package)
    parallel = PARALLEL.get(package, [])
    threads = {"OMP_NUM_THREADS": "1"} if parallel else {}
    without = ["-m", "not cross"] if package in CROSS else []
    session.run(
        python,
        *("-m", "pytest", f"packages/{package}/tests", *parallel, *without, *SLOWEST, *session.posargs),
        env=threads,
        external=True,
    )
    if package in WITH_TORCH:
        pattern, text, parallel = WITH_TORCH[package]
        found = sorted((ROOT / "packages" / package / "tests").glob(pattern))
        files = [str(path.relative_to(ROOT)) for path in found if re.search(text, path.read_text())]
        command = ["-m", "pytest", *files, *parallel, *without, *SLOWEST, *session.posargs]
        session.run(_torch_python(session), *command, env={"OMP_NUM_THREADS": "1"}, external=True)


@nox.session(venv_backend="none")
def cross(session: nox.Session) -> None:
    """Same bits on eight instruction sets, C tests on other machines: builds by gcc and zig, runs under qemu-user."""
    python = _torch_python(session)
    session.run(python, "tools/cross_tools.py", external=True)
    folders = [f"packages/{package}/tests" for package in CROSS]
    command = ["-m", "pytest", *folders, "-m", "cross", "-n", "2", "--dist", "loadgroup", *SLOWEST]
    command += ["-o", "timeout=1200"]  # zig builds musl once for each machine that a program is linked for
    session.run(python, *command, *session.posargs, env={"OMP_NUM_THREADS": "1"}, external=True)


@nox.session
@nox.parametrize("package", list(OLDEST), ids=list(OLDEST))
def oldest(session: nox.Session, package: str) -> None:
    """The tests of a package with the oldest torch that its metadata allows: 3 GB from the index, so not by default."""
    session.install(OLDEST[package], *DEV, "setuptools")
    session.install(f"packages/{package}{_extras(package)}", *(f"packages/{s}" for s in BASE))
    session.run("python", "-m", "pytest", f"packages/{package}/tests", *PARALLEL[package], *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def bench(session: nox.Session, package: str) -> None:
    """The benchmarks of one package against their peers; JSON lands in bench-out/."""
    python = _torch_python(session)
    peers = _peers_python(session, package)
    out = ROOT / "bench-out"
    out.mkdir(exist_ok=True)
    for script in sorted((ROOT / "packages" / package / "benchmarks").glob("bench_*.py")):
        command = [python, str(script), "--json", str(out / f"{script.stem}.json"), *session.posargs]
        session.run(*command, env=peers, external=True)


@nox.session(venv_backend="none")
def repo(session: nox.Session) -> None:
    """Tests of the repository as a whole: import rules, versions, copies that must agree."""
    session.run(_torch_python(session), "-m", "pytest", "tests", *session.posargs, external=True)


@nox.session(venv_backend="none")
def docs_examples(session: nox.Session) -> None:
    """Execute every Python example of every README."""
    session.run(_torch_python(session), "tools/run_readme.py", *session.posargs, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """ruff: lint and format."""
    python = _torch_python(session)
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """mypy --strict on all packages."""
    python = _torch_python(session)
    session.run(python, "-m", "mypy", *[f"packages/{p}/src" for p in PACKAGES], external=True)


@nox.session(venv_backend="none")
def gpu_bundle(session: nox.Session) -> None:
    """Fill .whl/ with our wheels and the dependencies a bare GPU machine lacks (CPython 3.12, torch there).

    On that machine: ``python3 -m pip install --no-index --no-deps --target site .whl/*.whl``, then
    ``PYTHONPATH=site python3 packages/lf-x/benchmarks/bench_x.py --json OUT``.
    """
    python = _torch_python(session)
    out = ROOT / ".whl"
    shutil.rmtree(out, ignore_errors=True)
    build = [python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out)]
    session.run(*build, *[f"./packages/{p}" for p in PACKAGES], external=True)
    foreign = ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:", "--no-deps"]
    for tag in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"):
        foreign += ["--platform", tag]
    session.run(
        python, "-m", "pip", "download", "--quiet", *foreign, "-d", str(out), *GPU_WHEELS, external=True
    )
    session.log(f"{out}: {sum(f.stat().st_size for f in out.iterdir()) / 2**20:.0f} MiB")


@nox.session(venv_backend="none")
def wheels(session: nox.Session) -> None:
    """Build wheel and sdist of every package into dist/; install the torch-free wheels alone and try them."""
    python = _torch_python(session)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run(python, "tools/check_wheels.py", *session.posargs, external=True)


@nox.session
def release_wheels(session: nox.Session) -> None:
    """Wheels of the compiled packages for x86-64 and aarch64 with glibc 2.28, into dist/release; see the tool."""
    session.install(*BUILD, "wheel", "ziglang")
    session.run("python", "tools/release_wheels.py", *session.posargs)
