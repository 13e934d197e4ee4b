"""Each dependency stands in ADR 0005 with its reason, and nothing stands there that we do not depend on."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DECISION = ROOT / "docs" / "adr" / "0005-dependencies.md"


def test_the_decision_lists_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    groups = [project["project"]["dependencies"], *extras, *project["dependency-groups"].values()]
    declared = {re.split(r"[^\w-]", line)[0] for group in groups for line in group if isinstance(line, str)}

    rows = re.findall(r"^\| ([a-z][^|]*) \|", DECISION.read_text(), flags=re.MULTILINE)
    assert {name for row in rows for name in row.split(", ")} == declared
