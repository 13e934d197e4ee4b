"""The bill of materials, and the check against known vulnerabilities."""

from __future__ import annotations

import json
import re
import zipfile

import pytest

from tests.support.fork_server import ROOT
from tools import sbom, vulnerabilities
from tools.pinned import Pinned, read

OWN = sbom.purl("ecluse", "1.2.3")
REQUIREMENTS = ROOT / "requirements.txt"


def test_the_bill_has_every_pinned_package_and_what_needs_it():
    made = sbom.bill(read(REQUIREMENTS), "1.2.3")
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.5")
    pins = set(re.findall(r"^([\w.-]+)(?:\[.*\])?==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE))
    assert {(one["name"], one["version"]) for one in made["components"]} == {(name.lower(), v) for name, v in pins}
    refs = [one["bom-ref"] for one in made["components"]]
    assert len(refs) == len(set(refs))
    needs = {one["ref"]: one["dependsOn"] for one in made["dependencies"]}
    assert needs.keys() == {*refs, OWN}
    fastapi, starlette = (next(ref for ref in refs if f"/{name}@" in ref) for name in ("fastapi", "starlette"))
    assert fastapi in needs[OWN]
    assert starlette in needs[fastapi]
    assert starlette not in needs[OWN]
    assert sbom.bill(read(REQUIREMENTS), "1.2.3") == made


def advisory(name="jinja2", ecosystem="PyPI", versions=(), events=(), kind="ECOSYSTEM", **more):
    ranges = [{"type": kind, "events": list(events)}]
    package = {"ecosystem": ecosystem, "name": name}
    return {"id": "GHSA-1", "affected": [{"package": package, "versions": list(versions), "ranges": ranges}], **more}


FROM_2 = [{"introduced": "2.0"}, {"fixed": "3.1.5"}]


@pytest.mark.parametrize(
    ("known", "version", "hit"),
    [
        (advisory(versions=["3.1.4"]), "3.1.4", True),
        (advisory(versions=["3.1.4"]), "3.1.5", False),
        (advisory(events=FROM_2), "3.1.4", True),
        (advisory(events=FROM_2), "3.1.5", False),
        (advisory(events=FROM_2), "1.9", False),
        (advisory(events=[{"introduced": "0"}]), "3.1.4", True),
        (advisory(events=[{"introduced": "0"}, {"last_affected": "3.1.4"}]), "3.1.4", True),
        (advisory(events=[{"introduced": "0"}, {"last_affected": "3.1.4"}]), "3.1.5", False),
        (advisory(events=[*FROM_2, {"introduced": "3.2"}, {"fixed": "3.3"}]), "3.2.1", True),
        (advisory(name="Jinja2", events=FROM_2), "3.1.4", True),
        (advisory(name="jinja", events=FROM_2), "3.1.4", False),
        (advisory(ecosystem="npm", events=FROM_2), "3.1.4", False),
        (advisory(kind="GIT", events=FROM_2), "3.1.4", False),
        (advisory(events=FROM_2, withdrawn="2026-01-01T00:00:00Z"), "3.1.4", False),
    ],
)
def test_a_version_is_affected_as_its_advisory_says(known, version, hit):
    found = vulnerabilities.affected([Pinned("jinja2", version, [])], [known])
    assert [one.advisory for one in found] == (["GHSA-1"] if hit else [])


@pytest.mark.parametrize(("name", "code"), [("fastapi", 1), ("django", 0)])
def test_the_check_needs_no_network(tmp_path, capsys, name, code):
    file = tmp_path / "all.zip"
    with zipfile.ZipFile(file, "w") as archive:
        given = advisory(name, events=[{"introduced": "0"}], modified="2026-11-01T00:00:00Z", summary="bad")
        archive.writestr("GHSA-1.json", json.dumps(given))
    assert vulnerabilities.main([str(file)]) == code
    said = capsys.readouterr().out
    assert "1 advisories, the newest of 2026-11-01" in said
    assert ("GHSA-1: bad (no fixed version)" in said) == bool(code)


@pytest.mark.parametrize("arguments", [[], ["nowhere.zip"]])
def test_without_advisories_nothing_is_said_to_be_well(capsys, arguments):
    assert vulnerabilities.main(arguments) == 2
    assert "Nothing was checked" in capsys.readouterr().err


def test_an_empty_export_is_not_well_either(tmp_path):
    with zipfile.ZipFile(tmp_path / "all.zip", "w"):
        pass
    assert vulnerabilities.main([str(tmp_path / "all.zip")]) == 1
