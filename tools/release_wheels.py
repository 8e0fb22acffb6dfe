"""Build the compiled packages as wheels that run on old systems, with ziglang as cross compiler, into dist/release.

- one abi3 wheel each for x86-64 and aarch64, linked against glibc 2.28 and named manylinux_2_28
- no symbol of a newer glibc in any of them, by readelf
- the x86-64 wheels are installed in an empty environment and run the first example of their READMEs

What is for another machine is not run here; `nox -s cross` runs the C as programs under qemu-user.
Needs build, hatchling, cffi, setuptools, wheel and ziglang in this Python, and readelf.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "dist" / "release"
GLIBC = (2, 28)
MACHINES = ("x86_64", "aarch64")


def newest_glibc(listing: str) -> tuple[int, ...]:
    """The newest glibc version that `readelf --version-info` lists as needed; (0,) for none."""
    return max((tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", listing)), default=(0,))


def compiled_packages() -> list[Path]:
    """Packages with C in them."""
    return sorted(p for p in (ROOT / "packages").iterdir() if (p / "csrc").is_dir())


def run(*command: object, env: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command, echo it, return its output; a failure ends the build."""
    print("+", *(str(c) if "\n" not in str(c) else "<example>" for c in command), flush=True)
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, env=os.environ | (env or {})
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout.strip()


def compiler(folder: Path, target: str) -> Path:
    """A `cc` for another system, as setuptools wants it: one command without arguments."""
    path = folder / f"cc-{target}"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -m ziglang cc -target {target} "$@"\n')
    path.chmod(0o755)
    return path


def build(package: Path, machine: str) -> Path:
    """The wheel of one package for one machine, named for the glibc it needs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # in a copy: the build puts the module beside the sources, and this checkout uses its own
        ignore = shutil.ignore_patterns("*.so", "__pycache__", "dist")
        copy = shutil.copytree(package, folder / package.name, ignore=ignore)
        env = {
            "CC": str(compiler(folder, f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}")),
            "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
            "LOONGFORGE_REQUIRE_NATIVE": "1",
        }
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, copy, env=env)
        (built,) = folder.glob("*.whl")
        tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
        renamed = run(
            sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, built, cwd=folder
        )
        return Path(shutil.move(folder / renamed.splitlines()[-1], OUT))


def check(wheel: Path, machine: str) -> None:
    """The modules in a wheel are of its machine and need no newer glibc than its name says."""
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        modules = sorted(Path(folder).rglob("*.so"))
        if not modules:
            sys.exit(f"{wheel.name}: no compiled module in it")
        for module in modules:
            header = run("readelf", "--file-header", module)
            wanted = {"x86_64": "X86-64", "aarch64": "AArch64"}[machine]
            if wanted not in header:
                sys.exit(f"{wheel.name}: {module.name} is not for {machine}:\n{header}")
            newest = newest_glibc(run("readelf", "--version-info", module))
            if newest > GLIBC:
                sys.exit(f"{wheel.name}: {module.name} needs glibc {'.'.join(map(str, newest))}")
            print(f"{wheel.name}: {module.name} needs glibc {'.'.join(map(str, newest))}")


def install(wheels: list[Path]) -> None:
    """The wheels of this machine in an empty environment, with the examples of their READMEs."""
    from check_wheels import example

    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = f"{folder}/bin/python"
        siblings = [ROOT / "packages" / name for name in ("lf-format", "lf-memory")]
        run(python, "-m", "pip", "install", "--quiet", *siblings, *wheels)
        for wheel in wheels:
            package = wheel.name.split("-")[0].replace("_", "-")
            print(run(python, "-c", example(package), cwd=Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    native = []
    for package in compiled_packages():
        for machine in MACHINES:
            wheel = build(package, machine)
            check(wheel, machine)
            native += [wheel] if machine == os.uname().machine else []
    if native:
        install(native)
    print(f"release wheels: ok, in {OUT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
