"""Write the agent as one zip file that a bare Python runs: ``python -m tools.agent_zip dist/ecluse-agent.pyz``."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
SHEBANG = b"#!/usr/bin/env -S python3 -I\n"
MAIN = "import sys\nfrom ecluse.agent.__main__ import main\nsys.exit(main())\n"


def write(target: Path) -> None:
    """Write the zip file; the same sources give the same bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    files = {"__main__.py": MAIN, "ecluse/__init__.py": ""}
    files |= {str(one.relative_to(SOURCE)): one.read_text() for one in (SOURCE / "ecluse" / "agent").glob("*.py")}
    with target.open("wb") as file:
        file.write(SHEBANG)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in sorted(files.items()):
                archive.writestr(zipfile.ZipInfo(name), text)
    target.chmod(0o755)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
