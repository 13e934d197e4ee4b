"""The text of mails: about an event and its run, or asking an address for a confirmation. Text that a caller or a
vendor may have written is quoted and has no links: the only links are ours."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime, parseaddr
from html import escape
from typing import Any, NamedTuple
from urllib.parse import quote

from ecluse.base.masking import masked, masked_value
from ecluse.base.text import count_of, storable
from ecluse.notify.confirmation_tokens import LINK_LASTS
from ecluse.notify.work import Delivery

COUNTED = ("selected", "successful", "failed", "ignored")
# Also in the forms that programs take for these signs: full-width, ideographic and half-width.
LINK_SIGNS = re.compile(r"(?<=\w)[.\uff0e\u3002\uff61](?=[^\W\d])|[:\uff1a](?=[/\uff0f]{2})|[@\uff20\ufe6b]")
DIRECTIONS = re.compile(r"[\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")  # reorder text, or hide in it
MOST_REASONS = 20
LONGEST_SUBJECT = 150
LONGEST_TEXT = 2_000


class Fact(NamedTuple):
    """A row of a mail; `free`: text that a caller or a vendor may have written; `link`: a URL of ours."""

    name: str
    value: str
    free: bool = False
    link: bool = False

    @property
    def shown(self) -> str:
        return f"“{without_links(self.value)}”" if self.free else self.value

    @property
    def as_html(self) -> str:
        text = escape(self.shown)
        return f'<a href="{text}">{text}</a>' if self.link else text


def page_link(
    delivery: Delivery, run: Mapping[str, Any] | None, pages: Mapping[str, str], public_url: str | None
) -> str | None:
    """Return the URL of the page about the run of an event or, without a run, about the record in its aggregate. None
    if there is no such page, or if the address of the pages, `public_url`, is not known."""
    kind, _, record = (delivery.aggregate or "").partition(":")
    path = pages.get(kind) if run is None else "/ui/runs/{}"
    if path is None or public_url is None:
        return None
    return public_url.rstrip("/") + path.format(quote(record if run is None else str(run["id"]), safe=""))


def compose(
    delivery: Delivery, run: Mapping[str, Any] | None, *, sender: str, at: datetime, look: str | None
) -> EmailMessage:
    """Return the mail about an event and, if there is one, its run; `look`: the URL of the page about it."""
    if run is None:
        subject = delivery.event_type
        data = masked_value(delivery.message["data"])
        rows = [Fact(without_links(name), _one_line(value), free=True) for name, value in data.items()]
    else:
        cancelled = run["state"] == "cancelled"
        status = "cancelled" if cancelled else run["status"]
        subject = f"{run['flow']} run {run['id']}: {status}"
        rows = [Fact("run", str(run["id"])), Fact("flow", str(run["flow"])), Fact("status", str(status))]
        if cancelled:
            rows.append(Fact("cancelled by", _one_line(run["ended_by"]), free=True))
        rows += _counts(run)
        reasons = sorted(run["outcomes"].items(), key=lambda reason: (-reason[1], reason[0]))
        told = [(name, count) for name, count in reasons[:MOST_REASONS] if name != "successful"]
        rows += [Fact(without_links(name), count_of(count, "target")) for name, count in told]
        if run["reason"]:
            rows.append(Fact("reason", _one_line(run["reason"]), free=True))
        if run["selection_incomplete"]:
            rows.append(Fact("selection", _one_line(run["selection_incomplete"]), free=True))
    if look is not None:
        rows.append(Fact("look at it", look, link=True))
    title = f"{delivery.event_type}, {delivery.message['timestamp']}"
    return _mail(delivery, subject, title, rows, sender=sender, at=at)


def request_to_confirm(delivery: Delivery, link: str, *, sender: str, at: datetime) -> EmailMessage:
    """Return the mail with the link that confirms its recipient."""
    rows = [
        Fact("tenant", delivery.tenant_id, free=True),
        Fact("to confirm it", link, link=True),
        Fact("valid for", f"{LINK_LASTS.days} days, once"),
        Fact("otherwise", "ignore this mail: nothing else is sent to this address"),
    ]
    title = "This address was named as a recipient of notifications. They are sent once it is confirmed."
    return _mail(delivery, "please confirm this address", title, rows, sender=sender, at=at)


def _mail(
    delivery: Delivery, subject: str, title: str, rows: Sequence[Fact], *, sender: str, at: datetime
) -> EmailMessage:
    mail = EmailMessage()
    domain = address_of(sender).domain
    # Line breaks in a status or an event type would start another header.
    mail["Subject"] = storable(" ".join(f"Ecluse: {subject}".split()), LONGEST_SUBJECT)
    mail["From"] = sender
    mail["To"] = delivery.recipient
    mail["Date"] = format_datetime(at)
    mail["Message-ID"] = f"<{delivery.name}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content("\n".join([title, *(f"  {one.name}: {one.shown}" for one in rows)]) + "\n")
    mail.add_alternative(_page(title, rows), subtype="html")
    return mail


def without_links(text: str) -> str:
    """Return the text with brackets around the signs by which mail programs recognise URLs, hosts and addresses: none
    of it becomes a link. Invisible characters, and those that change the direction of text, are left out."""
    return LINK_SIGNS.sub(lambda sign: f"[{sign[0]}]", DIRECTIONS.sub("", text))


def _counts(run: Mapping[str, Any]) -> list[Fact]:
    """Return the counters of a run. In the row, `failed` includes cancelled targets; they are listed separately
    here."""
    counts = {name: run[name] for name in COUNTED if run[name] is not None}
    if run["cancelled"]:
        counts |= {"failed": run["failed"] - run["cancelled"], "cancelled": run["cancelled"]}
    return [Fact(name, str(count)) for name, count in counts.items()]


def _page(title: str, rows: Sequence[Fact]) -> str:
    """Return the HTML part of the mail."""
    cells = "".join(f"<tr><th align=left>{escape(one.name)}</th><td>{one.as_html}</td></tr>" for one in rows)
    return f"<p>{escape(title)}</p><table>{cells}</table>\n"


def _one_line(value: Any) -> str:
    """Return a value as one line of at most LONGEST_TEXT characters, with secrets hidden."""
    return storable(masked(" ".join(str(value).split())), LONGEST_TEXT)


def address_of(sender: str) -> Address:
    """Return the address of a sender that may have a name."""
    return Address(addr_spec=parseaddr(sender)[1])
