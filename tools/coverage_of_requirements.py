"""Print the requirements that no test cites.

Reads the ids of docs/requirements.md and the `pytest.mark.req(...)` markers of tests/. The tests are parsed, not
imported, so that no database and no working code is needed. A marker that cites an unknown id is an error: it would
look like coverage without being any.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"^- \*\*(?P<id>[A-Z]+-\d+)", re.MULTILINE)


class Citation(NamedTuple):
    id: str
    where: str


def requirement_ids(document: str) -> list[str]:
    return ENTRY.findall(document)


def citations_in(source: str, name: str) -> Iterator[Citation]:
    for node in ast.walk(ast.parse(source, name)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="mark"), attr="req"), args=args):
                for arg in args:
                    # An argument that is not a string literal is reported as its source code, an unknown id.
                    cited = arg.value if isinstance(arg, ast.Constant) else ast.unparse(arg)
                    yield Citation(str(cited), f"{name}:{arg.lineno}")


def citations(root: Path = ROOT) -> list[Citation]:
    files = sorted((root / "tests").rglob("*.py"))
    return [cited for file in files for cited in citations_in(file.read_text(), str(file.relative_to(root)))]


def group(requirement: str) -> str:
    return requirement.split("-")[0]


def report(ids: list[str], cited: set[str]) -> Iterator[str]:
    groups = list(dict.fromkeys(map(group, ids)))
    for name in groups:
        if missing := [id_ for id_ in ids if group(id_) == name and id_ not in cited]:
            yield f"{name} without a test: {' '.join(missing)}\n"
    for name in [*groups, ""]:
        of_group = [id_ for id_ in ids if group(id_) == name or not name]
        yield f"{name or 'all':4} {sum(id_ in cited for id_ in of_group):4} of {len(of_group):4} cited"


def main() -> int:
    ids = requirement_ids((ROOT / "docs" / "requirements.md").read_text())
    cited = citations()
    unknown = [citation for citation in cited if citation.id not in set(ids)]
    for citation in unknown:
        print(f"{citation.where}: there is no requirement {citation.id}", file=sys.stderr)
    print("\n".join(report(ids, {citation.id for citation in cited})))
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
