"""The repository's own scripts."""

import importlib.util
from pathlib import Path
from types import ModuleType

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
