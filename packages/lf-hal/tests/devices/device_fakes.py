"""Installed packages and drivers that behave as those of research go wrong: real files, loaded by the real loader."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import textwrap
import zipfile
from pathlib import Path

GCC = shutil.which("gcc") or shutil.which("cc")

TORCH = """
    from types import SimpleNamespace
    __version__ = "2.12.0"
    version = SimpleNamespace(cuda={cuda!r})
    from . import cuda
    def ones(*a, **k): return SimpleNamespace(add_=lambda n: SimpleNamespace(cpu=lambda: None))
"""
TORCH_CUDA = """
    def is_available(): return {count} > 0
    def device_count(): return {count}
    def current_device(): return 0
"""
WORKS = """
    import os, sys, torch
    class _Npu:
        def device_count(self):
            seen = os.environ.get("{variable}")
            return {count} if seen is None else len([i for i in seen.split(",") if i])
        def get_device_name(self, index): return "{name}"
    torch.{kind} = _Npu()
"""
MISSING_LIBRARY = "extern int HcclInit(void); int npu(void) { return HcclInit(); }"
MISSING_SYMBOL = "extern int aclrtMallocAlign32(int); int npu(void) { return aclrtMallocAlign32(1); }"
LIBCUDA = """
    #include <stdlib.h>
    #include <string.h>
    int cuInit(unsigned f) { const char *v = getenv("CUDA_VISIBLE_DEVICES"), *e = getenv("FAKE_CUINIT");
        if (e) return atoi(e);
        return v && (!*v || *v == '-') ? 100 : 0; }
    int cuDriverGetVersion(int *v) { *v = 12080; return 0; }
    int cuDeviceGetCount(int *n) { *n = 2; return 0; }
    int cuDeviceGet(int *d, int i) { *d = i; return 0; }
    int cuDeviceGetName(char *t, int n, int d) { strncpy(t, "NVIDIA Fake", n); return 0; }
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str | bytes], backend: str = "") -> Path:
    """A wheel that pip can install; backend: an entry point that `import torch` loads by itself."""
    info = f"{name}-{version}.dist-info"
    content = {path: text.encode() if isinstance(text, str) else text for path, text in files.items()}
    content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: fakes\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    if backend:
        content[f"{info}/entry_points.txt"] = f"[torch.backends]\n{name} = {name}:{backend}\n".encode()
    record = ""
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in content.items():
            archive.writestr(member, data)
    return path


def install(folder: Path, name: str, version: str, init: str, backend: str = "", **more: str | bytes) -> None:
    """The package as pip leaves it in `folder`; `more` are further files by name, with __ for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str | bytes] = {f"{name}/__init__.py": textwrap.dedent(init)}
    for file, text in more.items():
        data = textwrap.dedent(text) if isinstance(text, str) else text
        files[f"{name}/{file.replace('__', '.')}"] = data
    made = wheel(folder, name, version, files, backend)
    with zipfile.ZipFile(made) as archive:
        archive.extractall(folder)
    made.unlink()


def install_torch(folder: Path, cuda: str | None = None, count: int = 0, version: str = "2.12.0") -> None:
    """A torch that only says what a probe asks for: loading the real one takes seconds."""
    init = TORCH.format(cuda=cuda).replace("2.12.0", version)
    install(folder, "torch", version, init, cuda__py=TORCH_CUDA.format(count=count))


def works(kind: str, name: str, count: int = 2) -> str:
    """__init__ of a vendor package whose devices can be used."""
    variable = {"npu": "ASCEND_RT_VISIBLE_DEVICES", "mlu": "MLU_VISIBLE_DEVICES"}[kind]
    return textwrap.dedent(WORKS.format(kind=kind, name=name, count=count, variable=variable))


def library(path: Path, code: str, *, needs: str = "", soname: str = "") -> bytes:
    """A shared library; needs: a library it is linked with, which is gone when it is loaded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = path.with_suffix(".c")
    source.write_text(textwrap.dedent(code))
    options = ["-shared", "-fPIC", *([f"-Wl,-soname,{soname}"] if soname else [])]
    if needs:
        stub = path.parent / f"lib{needs}.so"
        stub_source = stub.with_suffix(".c")
        stub_source.write_text("int HcclInit(void) { return 0; }")
        subprocess.run([str(GCC), "-shared", "-fPIC", "-o", stub, stub_source], check=True)
        options += [f"-L{path.parent}", f"-l{needs}", "-Wl,--no-as-needed"]
        subprocess.run([str(GCC), "-o", path, source, *options], check=True)
        stub.unlink()
    else:
        subprocess.run([str(GCC), "-o", path, source, *options], check=True)
    return path.read_bytes()


LOAD = """
    import ctypes, os, torch
    ctypes.CDLL(os.path.join(os.path.dirname(__file__), "libtorch_npu.so"), mode=os.RTLD_NOW)
"""
