"""Two habits that are easily lost: no test doubles, and no handlers that swallow unexpected errors."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Broad handlers per source file: exact, so that one more is a decision and one less is seen.
BROAD_HANDLERS = {
    "src/ecluse/access/envelope.py": 1,
    "src/ecluse/db/groups.py": 1,
    "src/ecluse/engine/work/completion.py": 3,
    "src/ecluse/engine/work/committer.py": 1,
    "src/ecluse/engine/outbox/publisher.py": 1,
    "src/ecluse/engine/cluster/heartbeat.py": 1,
    "src/ecluse/engine/lead/story.py": 1,
    "src/ecluse/engine/schedule/ticks.py": 1,
    "src/ecluse/engine/work/execution.py": 1,
    "src/ecluse/realtime/room.py": 1,
    "src/ecluse/web/authentication.py": 1,
}
BROAD = {"Exception", "BaseException"}
# A bare "noqa" silences a tool; it does not say why.
NOQA = re.compile(r"noqa:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*")


def names_caught(handler: ast.ExceptHandler) -> set[str]:
    """Every exception name of a handler; a bare `except:` counts as BaseException."""
    if handler.type is None:
        return {"BaseException"}
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(name) for name in caught}


def swallows(handler: ast.ExceptHandler) -> bool:
    """Return True unless the handler ends with a bare `raise`, which hides nothing."""
    last = handler.body[-1]
    return not (isinstance(last, ast.Raise) and last.exc is None)


def broad_handlers(file: Path) -> list[ast.ExceptHandler]:
    nodes = ast.walk(ast.parse(file.read_text(), str(file)))
    handlers = [node for node in nodes if isinstance(node, ast.ExceptHandler)]
    return [handler for handler in handlers if names_caught(handler) & BROAD and swallows(handler)]


def test_broad_handlers_are_counted() -> None:
    counts = {str(file.relative_to(ROOT)): len(broad_handlers(file)) for file in (ROOT / "src").rglob("*.py")}
    assert {name: count for name, count in counts.items() if count} == BROAD_HANDLERS


def test_broad_handlers_say_why() -> None:
    silent = []
    for file in (ROOT / "src").rglob("*.py"):
        lines = file.read_text().splitlines()
        for handler in broad_handlers(file):
            same, previous = lines[handler.lineno - 1].partition("#")[2], lines[handler.lineno - 2].strip()
            if not re.search(r"\w", NOQA.sub("", same)) and not previous.startswith("#"):
                silent.append(f"{file.relative_to(ROOT)}:{handler.lineno}")
    assert silent == []


def test_no_test_imports_unittest() -> None:
    importers = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(), str(file)))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("unittest"))
        or (isinstance(node, ast.Import) and any(alias.name.startswith("unittest") for alias in node.names))
    ]
    assert importers == []
