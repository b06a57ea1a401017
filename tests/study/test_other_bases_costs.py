"""The page on other bases has the numbers of the plan's formulas."""

import re
import runpy
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "other_bases.md"


def test_the_table_of_costs_is_what_its_code_prints(capsys, tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def needs" in block]
    (tmp_path / "code.py").write_text(code)
    runpy.run_path(str(tmp_path / "code.py"))
    lines = capsys.readouterr().out.splitlines()
    table = page.partition("<!-- what separation costs")[2].partition("<!-- end -->")[0].splitlines()
    assert len(lines) == 2 and set(lines) <= set(table)
