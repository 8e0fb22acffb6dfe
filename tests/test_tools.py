"""The repository's own scripts."""

import importlib.util
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_count_adds_up_all_pytest_runs_and_treats_errors_as_failures() -> None:
    log = (
        "12 passed in 1.20s\nnoise 3 passed\n\x1b[32m5 passed\x1b[0m, 1 skipped in 0.40s\n"
        "1 failed, 2 passed, 1 error in 3.0s\n"
    )
    assert _load("count_tests").count(log) == {"passed": 19, "failed": 2, "skipped": 1}


def test_readme_blocks_are_found_and_other_languages_left_out() -> None:
    text = "```python\nx = 1\n```\n```bash\nrm x\n```\n```python\ny = 2\n```\n"
    assert _load("run_readme").BLOCK.findall(text) == ["x = 1\n", "y = 2\n"]


def test_the_newest_glibc_is_found_by_number_not_by_spelling() -> None:
    newest = _load("release_wheels").newest_glibc
    listing = (
        "  0x0010: Name: GLIBC_2.9  Flags: none\n  0x0020: Name: GLIBC_2.28\n  0x0030: Name: GLIBC_2.2.5\n"
    )
    assert newest(listing) == (2, 28)
    assert newest("No version information found in this file.") == (0,)
    assert newest("Name: GLIBC_2.34") > (2, 28) > newest("Name: GLIBC_2.2.5")


def _archives(folder: Path, license_in: tuple[bool, bool], named: bool) -> tuple[Path, Path]:
    """A wheel and an sdist with their licenses or without, the metadata naming it or not."""
    wheel, sdist = folder / "lf_x-1.0-py3-none-any.whl", folder / "lf_x-1.0.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        line = "License-File: LICENSE\n" if named else ""
        archive.writestr("lf_x-1.0.dist-info/METADATA", f"Name: lf-x\n{line}Requires-Python: >=3.11\n")
        if license_in[0]:
            archive.write(ROOT / "LICENSE", "lf_x-1.0.dist-info/licenses/LICENSE")
    with tarfile.open(sdist, "w:gz") as tar:
        tar.add(ROOT / ("LICENSE" if license_in[1] else "README.md"), "lf_x-1.0/LICENSE")
    return wheel, sdist


def test_a_wheel_or_sdist_without_its_license_ends_the_check(tmp_path: Path) -> None:
    check = _load("check_wheels").check_license
    check(*_archives(tmp_path, (True, True), named=True))
    for license_in, named, what in [
        ((False, True), True, "licenses/LICENSE"),
        ((True, False), True, "lf_x-1.0/LICENSE"),
        ((True, True), False, "names no license"),
    ]:
        with pytest.raises(SystemExit, match=what):
            check(*_archives(tmp_path, license_in, named))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_a_module_built_for_this_machine_is_read_as_the_release_check_reads_it() -> None:
    module = importlib.util.find_spec("lf_iouring._native")
    if module is None or module.origin is None:
        pytest.skip("no C module")
    listing = subprocess.run(
        ["readelf", "--version-info", module.origin], capture_output=True, text=True, check=True
    ).stdout
    assert _load("release_wheels").newest_glibc(listing) >= (2, 2, 5)
