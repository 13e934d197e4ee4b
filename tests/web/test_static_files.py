"""Scripts and styles: those that were published, kept for good by browsers, and part of what is installed."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ecluse.web.files import FILES, VERSION
from tests.web.conftest import AXE

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "src" / "ecluse" / "web"
VENDORED = ROOM / "static" / "vendored"
MANIFEST = json.loads((VENDORED / "MANIFEST.json").read_text())


@pytest.mark.parametrize("package", MANIFEST, ids=lambda package: package["name"])
def test_what_others_wrote_is_what_they_published(package):
    folder = VENDORED / package["folder"]
    assert package["version"] in package["folder"]
    assert "LICENSE" in package["sha256"]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    assert digests == package["sha256"]


def test_everything_vendored_is_in_the_manifest():
    assert {entry.name for entry in VENDORED.iterdir()} == {"MANIFEST.json", *(one["folder"] for one in MANIFEST)}
    for line in (AXE.parent / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((AXE.parent / name).read_bytes()).hexdigest() == digest


def test_the_files_of_a_page_may_be_kept_for_good_and_those_of_another_version_not(reader):
    pages = [reader.with_key(None).get(path).body.decode() for path in ("/ui/login", "/docs")]
    addresses = sorted({one for page in pages for one in re.findall(r'(?:src|href)="(/ui/static/[^"]+)"', page)})
    assert {address.split("/", 4)[4] for address in addresses} == set(FILES)
    for address in addresses:
        answer = reader.with_key(None).get(address)
        assert answer.status == 200
        assert "immutable" in answer.headers["Cache-Control"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.body == FILES[address.split("/", 4)[4]].plain
    squeezed = reader.get(address, Accept_Encoding="br, gzip")
    assert squeezed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(squeezed.body) == answer.body
    older = reader.get(address.replace(VERSION, "0" * 12))
    assert (older.status, older.headers["Cache-Control"], older.body) == (200, "no-cache", answer.body)


@pytest.mark.parametrize("name", ["nothing.js", "../login.py", "..%2flogin.py", "vendored/MANIFEST.json", ""])
def test_nothing_else_is_sent(reader, name):
    assert reader.get(f"/ui/static/{VERSION}/{name}").status == 404


def test_templates_and_files_are_part_of_the_wheel(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {file for kind in ("templates", "static") for file in (ROOM / kind).rglob("*") if file.is_file()}
    assert len(wanted) > 15
    assert {str(file.relative_to(ROOT / "src")) for file in wanted} <= packed
