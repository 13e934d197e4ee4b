"""The auditor: looks at a database, and at the ledger of the vendors it wrote to, and says where what is stored breaks
what is promised. Read only, safe beside running servers.

It shares no code with the program it judges, so that a mistake there cannot excuse itself here; `database`,
`stuck`, `outbox`, `leases`, `schedules` and `ledger` hold the invariants, by the numbers under which they are known
(I-01 …).
"""

from ecluse.verify.report import Report, Violation
from ecluse.verify.snapshot import CannotCheck, audit

__all__ = ["CannotCheck", "Report", "Violation", "audit"]
