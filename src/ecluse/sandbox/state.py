"""State of one running sandbox: its vendors, fault rules, rate caps and ledger, and their reset."""

from __future__ import annotations

from ecluse.sandbox.faults import FaultBook
from ecluse.sandbox.ledger import Ledger
from ecluse.sandbox.limits import Limits
from ecluse.sandbox.vendor import Vendor
from ecluse.sandbox.vendors import VENDORS


class Sandbox:
    """The state of one sandbox; `faults` are the rules that are in force from the start and after a reset."""

    ledger: Ledger
    faults: FaultBook
    limits: Limits
    mounts: dict[str, tuple[str, Vendor]]  # first segment of the path -> the vendor's name and the vendor

    def __init__(self, seed: int, faults: object) -> None:
        self.seed = seed
        self._first_faults = faults
        self.reset()

    def reset(self) -> None:
        """Return to the state of the start: no entries and caps, the first fault rules, new vendors. The objects are
        replaced, not emptied: a call in flight keeps those it began with."""
        self.ledger = Ledger()
        self.faults = FaultBook(self.seed, VENDORS)
        self.faults.add(self._first_faults)
        self.limits = Limits(VENDORS)
        self.mounts = {name.replace("_", "-"): (name, vendor(self.seed)) for name, vendor in VENDORS.items()}
