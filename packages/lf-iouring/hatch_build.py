"""Build hook: compile C sources into one abi3 module next to the Python code.

Configured in pyproject.toml, under [tool.hatch.build.targets.wheel.hooks.custom]:

    package = "src/lf_x"             where the module goes
    module = "_native"               its name
    cdef = "csrc/lf_x.cdef"          declarations, as cffi and C both read them
    header = "lf_x.h"                what the wrapper includes
    sources = ["csrc/a.c"]           what is compiled
    libraries = []                   what is linked
    optional = true                  build a pure wheel when there is no compiler

With LOONGFORGE_REQUIRE_NATIVE=1 a missing compiler is an error even when optional. The file is the same in
every compiled package.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ABI3 = (3, 11)  # the oldest Python the wheel runs on


class NativeBuildHook(BuildHookInterface):
    """Adds the compiled module to a wheel, or says why it is missing."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        target = self._target()
        try:
            built = self._compile(target.name)
        except Exception as error:  # cffi, setuptools and the compiler each raise their own kind
            target.unlink(missing_ok=True)  # a stale module must not end up in a pure wheel
            self._without_native(error)
            return
        self._install(built, target)
        build_data["pure_python"] = False
        build_data["tag"] = _tag()

    def clean(self, versions: list[str]) -> None:
        """Called by `hatch clean`."""
        self._target().unlink(missing_ok=True)

    def _target(self) -> Path:
        suffix = ".abi3.so" if _limited_api() else sysconfig.get_config_var("EXT_SUFFIX")
        return Path(self.root) / self.config["package"] / (self.config["module"] + suffix)

    def _compile(self, file_name: str) -> bytes:
        from cffi import FFI

        root = Path(self.root)
        macros = [("Py_LIMITED_API", f"0x{ABI3[0]:02X}{ABI3[1]:02X}0000")] if _limited_api() else []
        ffi = FFI()
        ffi.cdef((root / self.config["cdef"]).read_text())
        ffi.set_source(
            self.config["module"],
            f'#include "{self.config["header"]}"',
            sources=[str(root / source) for source in self.config["sources"]],
            include_dirs=[str((root / self.config["cdef"]).parent)],
            libraries=list(self.config.get("libraries", [])),
            define_macros=macros,
            extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden"],
        )
        with tempfile.TemporaryDirectory() as folder:
            return Path(ffi.compile(tmpdir=folder, target=file_name)).read_bytes()

    def _install(self, built: bytes, target: Path) -> None:
        # By rename: a process that runs from this checkout has the old file mapped.
        fresh = target.with_suffix(".new")
        fresh.write_bytes(built)
        fresh.replace(target)

    def _without_native(self, error: Exception) -> None:
        if not self.config.get("optional") or os.environ.get("LOONGFORGE_REQUIRE_NATIVE", "0") != "0":
            raise error
        self.app.display_warning(
            f"{self.metadata.name}: the C module was not built ({type(error).__name__}: {error}). "
            "The package works with its pure Python engine, slower. Install a C compiler (for Debian: "
            "apt install build-essential) and reinstall to have the fast one."
        )


def _limited_api() -> bool:
    return sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")


def _tag() -> str:
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    if _limited_api():
        return f"cp{ABI3[0]}{ABI3[1]}-abi3-{platform}"
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return f"{python}-{python}t-{platform}"
