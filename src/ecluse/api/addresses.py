"""Routes of the mail addresses of the tenant: which of them are confirmed, and a new request to confirm one."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from ecluse.access.commands import Command
from ecluse.access.envelope import Refused
from ecluse.access.listing import Filters, Listing
from ecluse.access.surface import Act, Surface
from ecluse.access.wire import Body, Shape
from ecluse.api.endpoints import READ, WRITE
from ecluse.db.query import Row
from ecluse.notify import confirmation_requests
from ecluse.notify.rules import MailAddress
from ecluse.notify.work import Setup

surface = Surface("notifications")
AddressState = Literal["asked", "confirmed"]


class AddressRow(Shape):
    tenant_id: str
    address: str = Field(description="In lower case.", examples=["ops@example.com"])
    state: AddressState = Field(description="No notification is sent to an address that is not confirmed.")
    asked_at: datetime
    link_expires_at: datetime | None = Field(description="null: no link was sent yet, or it was used.")
    confirmed_at: datetime | None


class AddressFilters(Filters):
    state: AddressState | None = None


class NewAddress(Body):
    address: MailAddress = Field(examples=["ops@example.com"])


ADDRESSES = Listing("addresses", AddressRow, "mail_address_list", READ, filters=AddressFilters, order=("address",))

surface.listing(
    "/api/notifications/addresses",
    ADDRESSES,
    list_addresses="List the mail addresses that endpoints and schedules name or that were sent a link, by address.",
    command=Command(
        "notifications addresses list",
        columns=("address", "state", "asked_at", "link_expires_at", "confirmed_at"),
        empty="no mail addresses",
    ),
)


@surface.operation(
    "POST",
    "/api/notifications/addresses",
    needs=WRITE,
    answer=AddressRow,
    action="address.ask",
    subject="address:{address}",
    refuses=("MAIL_NOT_CONFIGURED", "ASKED_ALREADY", "LIMIT_REACHED"),
    command=Command("notifications addresses confirm", arguments=("address",)),
)
async def ask_address(act: Act, body: NewAddress) -> Row:
    """Send a mail address a link that confirms it, also one that no endpoint or schedule names yet; its former link
    becomes invalid. A confirmed address is sent none. Refused if the last link was sent less than an hour ago."""
    setup: Setup = act.state.notify
    async with act.room_kept("mail_addresses", True):
        row, asked = await confirmation_requests.ask_again(act.connection, act.tenant, body.address)
    if not asked:
        act.changes_nothing()
    elif setup.smtp is None or setup.public_url is None:
        unset = "SMTP_HOST, MAIL_FROM and ECLUSE_PUBLIC_URL"
        raise Refused(409, "MAIL_NOT_CONFIGURED", f"This server sends no links to addresses: set {unset} first.")
    return row
