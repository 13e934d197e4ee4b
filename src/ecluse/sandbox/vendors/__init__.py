"""The registry of simulated vendors: name to class, mounted at ``/`` + the name with dashes."""

from __future__ import annotations

from ecluse.sandbox.vendor import Vendor
from ecluse.sandbox.vendors.price_list import PriceList

VENDORS: dict[str, type[Vendor]] = {
    "price_list": PriceList,
}
