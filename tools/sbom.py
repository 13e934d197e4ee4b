"""Print the software bill of materials of a release, in CycloneDX 1.5 JSON, from requirements.txt: the packages
of an installation, with their versions and dependencies. The same input gives the same output."""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from ecluse.base.version import release
from tools.pinned import Pinned, read

INDEX = "pypi"  # the type of a package URL
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"


def purl(name: str, version: str) -> str:
    return f"pkg:{INDEX}/{name}@{version}"


def bill(packages: list[Pinned], version: str) -> dict[str, Any]:
    own = purl("ecluse", version)
    needs = {ref: set[str]() for ref in (own, *(purl(one.name, one.version) for one in packages))}
    by_name = {one.name: purl(one.name, one.version) for one in packages}
    for one in packages:
        for other in one.needed_by:
            needs[by_name.get(canonicalize_name(other), own)].add(purl(one.name, one.version))
    found = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "application", "bom-ref": own, "name": "ecluse", "version": version, "purl": own}
        },
        "components": [
            {"type": "library", "bom-ref": ref, "name": name, "version": number, "purl": ref}
            for ref, name, number in dict.fromkeys((purl(p.name, p.version), p.name, p.version) for p in packages)
        ],
        "dependencies": [{"ref": ref, "dependsOn": sorted(others)} for ref, others in needs.items()],
    }
    digest = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(found, sort_keys=True))
    return {**found, "serialNumber": digest.urn}


if __name__ == "__main__":
    json.dump(bill(read(REQUIREMENTS), release()), sys.stdout, indent=2)
    sys.stdout.write("\n")
