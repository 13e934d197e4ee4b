"""What a route may ask for and which role has it: permissions are `area.read` and `area.write`, roles are sets of them.

A viewer reads, an operator also acts, an admin also administers who may come in.
"""

from __future__ import annotations

WORKED_ON = (
    "runs",
    "leases",
    "vendors",
    "schedules",
    "fiches",
    "transcriptions",
    "audits",
    "automation",
    "notifications",
    "jobs",
    "requests",
)
ADMINISTERED = ("keys", "tenants")

READS = frozenset({"me.read", *(f"{area}.read" for area in WORKED_ON)})
WRITES = frozenset(f"{area}.write" for area in WORKED_ON)
ADMINISTRATION = frozenset(f"{area}.{verb}" for area in ADMINISTERED for verb in ("read", "write"))

ROLES = {"viewer": READS, "operator": READS | WRITES, "admin": READS | WRITES | ADMINISTRATION}
PERMISSIONS = ROLES["admin"]
