"""Compare the pinned packages with known vulnerabilities, without the network: the advisories are a file, the export of
OSV for PyPI (`PyPI/all.zip`), that was fetched before. The exit code is 1 if a package is affected or
the file has no advisories, 2 without a file.

No advisories come with the project: they change daily, and an old copy would miss vulnerabilities.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from tools.pinned import Pinned, read

ROOT = Path(__file__).resolve().parents[1]
FILES = ("requirements.txt", "requirements-dev.txt")


class Affected(NamedTuple):
    package: str
    version: str
    advisory: str
    aliases: list[str]
    summary: str
    fixed: list[str]


def advisories(file: Path) -> Iterator[dict[str, Any]]:
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                yield json.loads(archive.read(name))


def affected(packages: Iterable[Pinned], known: Iterable[dict[str, Any]]) -> list[Affected]:
    pinned: dict[str, set[str]] = {}
    for one in packages:
        pinned.setdefault(one.name, set()).add(one.version)
    found = []
    for advisory in known:
        for part in advisory.get("affected", []) if not advisory.get("withdrawn") else []:
            package = part.get("package", {})
            name = canonicalize_name(package.get("name", ""))
            if package.get("ecosystem") == "PyPI" and name in pinned:
                hit = sorted(version for version in pinned[name] if covers(part, version))
                about = advisory.get("aliases", []), advisory.get("summary", ""), fixes(part)
                found += [Affected(name, version, advisory["id"], *about) for version in hit]
    return sorted(set_of(found))


def set_of(found: list[Affected]) -> list[Affected]:
    return list({(one.package, one.version, one.advisory): one for one in found}.values())


def covers(part: dict[str, Any], version: str) -> bool:
    """Return whether this part of an advisory names the version, or one of its ranges contains it."""
    return version in part.get("versions", []) or any(
        within(one.get("events", []), Version(version))
        for one in part.get("ranges", [])
        if one.get("type") == "ECOSYSTEM"
    )


def within(events: Iterable[dict[str, str]], version: Version) -> bool:
    """Return whether the version is in an affected range. `events` are in the order of versions: `introduced` begins a
    range, `fixed` and `last_affected` end it. Events with a malformed version are ignored."""
    inside = False
    for (kind, text), *_ in (list(event.items()) for event in events):
        try:
            at = Version("0" if text == "0" else text)
        except InvalidVersion:
            continue
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def fixes(part: dict[str, Any]) -> list[str]:
    events = [event for one in part.get("ranges", []) if one.get("type") == "ECOSYSTEM" for event in one["events"]]
    return sorted({event["fixed"] for event in events if "fixed" in event})


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_file():
        sys.stderr.write(
            "Nothing was checked: name the export of OSV for PyPI (all.zip), fetched where there is a network:"
            " make vulnerabilities ADVISORIES=all.zip\n"
        )
        return 2
    known = list(advisories(Path(arguments[0])))
    packages = [one for name in FILES for one in read(ROOT / name)]
    newest = max((one.get("modified", "") for one in known), default="")
    sys.stdout.write(f"{len(known)} advisories, the newest of {newest[:10] or 'no day'}\n")
    hits = affected(packages, known)
    for hit in hits:
        fixed = f"fixed in {', '.join(hit.fixed)}" if hit.fixed else "no fixed version"
        names = ", ".join([hit.advisory, *hit.aliases])
        sys.stdout.write(f"{hit.package} {hit.version}: {names}: {hit.summary} ({fixed})\n")
    sys.stdout.write(f"{len({(one.name, one.version) for one in packages})} packages, {len(hits)} vulnerabilities\n")
    return 1 if hits or not known else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
