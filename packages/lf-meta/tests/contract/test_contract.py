"""All packages on a simulated device, once named npu and once mlu. Evidence: contract-only.

The suites (`suite_*.py`) hold the packages to what any accelerator may ask: every copy waited for, every stream ordered
behind what it needs, no call of torch.cuda. What torch_npu, torch_mlu or a chip answers is not proved here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import runner

SUITES = sorted(Path(__file__).parent.glob("suite_*.py"))


@pytest.mark.parametrize("name", ["npu", "mlu"])
@pytest.mark.parametrize("suite", SUITES, ids=lambda path: path.stem)
def test_the_suite_holds_on_a_simulated_device(suite: Path, name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = runner.run(suite, name, out)
    said = out.read_text()
    assert code == 0, said
    assert "skipped" not in said, said
