"""Permissions that a route may require, and the roles that have them: a permission is `area.read` or `area.write`, a
role is a set of permissions.

The permissions in `OF_SERVER` concern the whole server, so only admins of the tenant `default` can use them.

A viewer reads, an operator also acts, an admin also administers keys, tenants and budgets, reads the audit trail and
erases. An agent, which has the credential of a host instead of an API key, executes the jobs of that host and does
nothing else; no other role can execute jobs.
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
    "pricing",
    "notifications",
    "jobs",
    "requests",
)
ADMINISTERED = ("keys", "tenants", "erasure", "retention")

READS = frozenset({"me.read", "budgets.read", *(f"{area}.read" for area in WORKED_ON)})
WRITES = frozenset(f"{area}.write" for area in WORKED_ON)
ADMINISTRATION = frozenset(
    {
        "trail.read",
        "doctor.read",
        "budgets.write",
        *(f"{area}.{verb}" for area in ADMINISTERED for verb in ("read", "write")),
    }
)

OF_SERVER = frozenset(
    {"doctor.read", *(f"{area}.{verb}" for area in ("tenants", "retention") for verb in ("read", "write"))}
)

AGENT, EXECUTE = "agent", "agent.execute"
ROLES = {"viewer": set(READS), "operator": set(READS | WRITES), "admin": set(READS | WRITES | ADMINISTRATION)}
PERMISSIONS = ROLES["admin"]  # of people and programs


def permissions_of(role: str) -> set[str]:
    return {EXECUTE} if role == AGENT else ROLES[role]


def add_area(area: str) -> None:
    """Add an area of permissions for a package: viewers get its read permission, operators and admins read and
    write."""
    for role, granted in ROLES.items():
        granted |= {f"{area}.read"} if role == "viewer" else {f"{area}.read", f"{area}.write"}
