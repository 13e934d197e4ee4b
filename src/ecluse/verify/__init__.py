"""The auditor: reads a database, and the ledger of the vendors it wrote to, and reports where the stored data violate
the invariants. Read-only, safe beside running servers.

It shares no code with the program it checks, so that a mistake there cannot hide itself here; `database`, `attempts`,
`stuck`, `outbox`, `leases`, `schedules`, `ledger`, `rates`, `spend`, `automation`, `transcriptions`, `pricing`, `jobs`
and `enrichment` hold the invariants, by their numbers (I-01 …).
"""

from ecluse.verify.report import Report, Violation
from ecluse.verify.snapshot import CannotCheck, audit

__all__ = ["CannotCheck", "Report", "Violation", "audit"]
