"""Bring what ``nox -s cross`` needs and this machine lacks: qemu-user and a disassembler that know LoongArch's vectors.

qemu-user runs LASX from 8.2 on. Where the distribution's own is older, the backports suite is added: as a copy of the
machine's own apt source with another suite name, so the mirror and its key stay those of the machine. Nothing is
installed, and no root needed, where all is there already.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

APT = Path("/etc/apt")
QEMU_LEAST = (8, 2)
EMULATORS = ("qemu-loongarch64", "qemu-aarch64", "qemu-riscv64", "qemu-x86_64")


def version_of(text: str) -> tuple[int, ...]:
    """The first version number in a text, (0,) if there is none."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else (0,)


def said(*command: str) -> str:
    """What a command prints; nothing if it cannot be run."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def has_emulators() -> bool:
    return all(version_of(said(name, "--version")) >= QEMU_LEAST for name in EMULATORS)


def has_disassembler() -> bool:
    names = ["llvm-objdump", *(f"llvm-objdump-{n}" for n in range(17, 30))]
    return any("loongarch64" in said(name, "--version") for name in names)


def backports_source(sources: Sequence[str], codename: str) -> str:
    """A deb822 stanza for the backports suite, after the machine's own stanza for ``codename``.

    ``sources`` are the texts of deb822 files and of one-line lists. Raises ValueError if none names the suite.
    """
    for stanza in re.split(r"\n\s*\n", "\n\n".join(sources)):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", stanza, re.MULTILINE))
        if "deb" in fields.get("Types", "").split() and codename in fields.get("Suites", "").split():
            fields |= {"Types": "deb", "Suites": f"{codename}-backports", "Components": "main"}
            return "".join(f"{name}: {value}\n" for name, value in fields.items())
        line = re.search(rf"^deb\s+(?:\[(.*?)\]\s+)?(\S+)\s+{codename}\s", stanza, re.MULTILINE)
        if line:
            options = re.findall(r"signed-by=(\S+)", line[1] or "")
            key = f"Signed-By: {options[0]}\n" if options else ""
            return f"Types: deb\nURIs: {line[2]}\nSuites: {codename}-backports\nComponents: main\n{key}"
    raise ValueError(f"no apt source of this machine names the suite {codename!r}")


def run(*command: str) -> None:
    """Run as root, or through sudo."""
    words = [*([] if os.geteuid() == 0 else ["sudo"]), *command]
    print("+", *words, flush=True)
    subprocess.run(words, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})


def install_emulators() -> None:
    """qemu-user of the distribution if it is new enough, of its backports otherwise."""
    candidate = re.search(r"Candidate: (?:\d+:)?(\S+)", said("apt-cache", "policy", "qemu-user"))
    suite: list[str] = []
    if candidate is None or version_of(candidate[1]) < QEMU_LEAST:
        codename = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
        if codename is None:
            sys.exit("cross: /etc/os-release names no release; install qemu-user 8.2 or newer yourself")
        files = [*sorted(APT.glob("sources.list.d/*.sources")), *sorted(APT.glob("sources.list*"))]
        texts = [path.read_text() for path in files if path.is_file()]
        if not any(f"{codename[1]}-backports" in text for text in texts):
            made = Path("lf-backports.sources").resolve()
            made.write_text(backports_source(texts, codename[1]))
            run("install", "-m", "644", str(made), str(APT / "sources.list.d" / made.name))
            made.unlink()
        suite = ["-t", f"{codename[1]}-backports"]
        run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *suite, "qemu-user")


def main() -> None:
    """Install what is missing."""
    emulators, disassembler = has_emulators(), has_disassembler()
    if emulators and disassembler:
        print("cross: emulators and disassembler are here")
        return
    if shutil.which("apt-get") is None:
        sys.exit("cross: no apt here. Install qemu-user 8.2 or newer, and llvm 17 or newer for llvm-objdump")
    run("apt-get", "update", "-qq")
    if not emulators:
        install_emulators()
    if not disassembler:
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "llvm-19")
    if not (has_emulators() and has_disassembler()):
        sys.exit(
            f"cross: still missing after installation: {', '.join(EMULATORS)} >= 8.2 or llvm-objdump >= 17"
        )


if __name__ == "__main__":
    main()
