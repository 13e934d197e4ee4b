"""docs/sandbox.md lists every kind of fault, every field of a rule and every field of a cap."""

from pathlib import Path

from ecluse.sandbox import faults, limits
from ecluse.sandbox.vendors import VENDORS

TEXT = (Path(__file__).resolve().parents[2] / "docs/sandbox.md").read_text()


def test_every_fault_field_and_vendor_is_documented() -> None:
    details = {name for fields in faults.KINDS.values() for name in fields}
    names = {*faults.KINDS, *faults.COMMON, *details, *limits.FIELDS, *VENDORS}
    assert [name for name in sorted(names) if f"`{name}`" not in TEXT] == []
