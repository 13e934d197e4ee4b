"""Mail deliveries: writes of class C4. A mail server cannot be asked whether it accepted a message, and recipients must
not get the same mail twice. So `sending_at` is committed before the text is handed over, and a mail whose answer got
lost is not retried but fails with MAY_HAVE_BEEN_SENT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.policy import SMTP as ON_THE_WIRE
from email.utils import format_datetime, parseaddr
from html import escape
from typing import Any

import aiosmtplib
from aiosmtplib.protocol import PERIOD_REGEX, SMTPProtocol, normalize_message_line_endings

from ecluse.base.errors import NotFound, NotSentError, PermanentError, TransientError, VendorError
from ecluse.base.masking import masked, plain
from ecluse.base.text import storable
from ecluse.db.connect import Pool
from ecluse.engine import VENDOR_DOWN, Done, Item, Result, WorkContext
from ecluse.insight import run_queries
from ecluse.notify.work import Delivery, Resources, Smtp, load

COUNTED = ("selected", "successful", "failed", "ignored")
MOST_REASONS = 20
LONGEST_SUBJECT = 150
LONGEST_TEXT = 2_000

# The breaker counts outages of the mail server, which concern every mail. Only mails that were never handed over fail
# with UNREACHABLE, so a retry cannot send them twice. The codes in `silent` are not answers of the server.
UNREACHABLE = "VENDOR_UNREACHABLE"
DOWN = replace(
    VENDOR_DOWN,
    codes=frozenset({UNREACHABLE}),
    silent=frozenset({"MAY_HAVE_BEEN_SENT", "MAIL_NOT_CONFIGURED", "NO_DELIVERY", "ENDPOINT_OFF"}),
)

BEGIN = """
UPDATE deliveries SET sending_at = ecluse_now() WHERE run_id = %s AND sending_at IS NULL AND EXISTS (
    SELECT FROM runs WHERE runs.id = run_id AND ended_at IS NULL)
"""
REFUSED = "UPDATE deliveries SET sending_at = NULL WHERE run_id = %s AND sent_at IS NULL"
SENT = "UPDATE deliveries SET sent_at = ecluse_now() WHERE run_id = %s"


class Uncertain(PermanentError):
    """The mail may have been sent, so it is not sent again."""

    code = "MAY_HAVE_BEEN_SENT"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The mail may have been sent, so it is not sent again by itself: {why}", code=self.code, ambiguous=True
        )


async def send(context: WorkContext, item: Item) -> Result:
    """Send the mail of a delivery. The work of the stage `mail`."""
    own: Resources = context.vendors
    smtp = own.setup.smtp
    if smtp is None:
        raise TransientError("Mail is not configured: set SMTP_HOST and MAIL_FROM", code="MAIL_NOT_CONFIGURED")
    async with own.pool.connection() as connection:
        delivery = await load(connection, item.run_id)
        if delivery.sent:
            return Done({"answer": "sent before a crash"})
        if delivery.begun:
            raise Uncertain("its worker was interrupted while the server had it")
        run = None
        if delivery.about_run is not None:
            with suppress(NotFound):
                run = await run_queries.show_run(connection, delivery.tenant_id, delivery.about_run)
    mail = compose(delivery, run, sender=smtp.sender, at=context.now(), public_url=own.setup.public_url)
    return Done({"answer": await hand_over(smtp, own.pool, delivery, mail)})


async def hand_over(smtp: Smtp, pool: Pool, delivery: Delivery, mail: EmailMessage) -> str:
    """Send the mail to the mail server, and return the server's answer once it has accepted the mail. `sending_at` of
    the delivery is set before the text is sent, `sent_at` after it was accepted. Raise Uncertain if it cannot be known
    whether the mail was sent."""
    client = aiosmtplib.SMTP(
        hostname=smtp.host,
        port=smtp.port,
        username=smtp.username,
        password=smtp.password,
        use_tls=smtp.tls,
        start_tls=False if smtp.tls else smtp.starttls,
        timeout=smtp.timeout,
        local_hostname=_address(smtp.sender).domain,
    )
    try:
        try:
            await client.connect()
        except (aiosmtplib.SMTPException, OSError) as error:
            raise _not_sent(error) from error
        protocol = await _announce(client, smtp, delivery)
        if not await _did(pool, BEGIN, delivery):
            raise Uncertain("another worker has begun to send it")
        try:
            # The rest of `client.data()`, which does not report whether the text had been sent.
            protocol.write(PERIOD_REGEX.sub(b"..", normalize_message_line_endings(mail.as_bytes(policy=ON_THE_WIRE))))
            protocol.write(b".\r\n")
            answer = await protocol.read_response(timeout=smtp.timeout)
        except (aiosmtplib.SMTPException, OSError) as error:
            raise Uncertain(_failure("no answer to its text", error)) from error
        if answer.code == 250:
            await _did(pool, SENT, delivery)
            return storable(masked(answer.message), LONGEST_TEXT)
        if not 400 <= answer.code < 600:
            raise Uncertain(f"the server answered {answer.code}")
        await _did(pool, REFUSED, delivery)
        raise _refusal(answer.code, answer.message)
    finally:
        client.close()


async def _announce(client: aiosmtplib.SMTP, smtp: Smtp, delivery: Delivery) -> SMTPProtocol:
    """Send MAIL, RCPT and DATA, up to the point where the server waits for the text; return the protocol to send it
    with."""
    try:
        await client.mail(_address(smtp.sender).addr_spec)
        await client.rcpt(delivery.recipient)
        answer = await client.execute_command(b"DATA")
    except aiosmtplib.SMTPResponseException as error:
        raise _refusal(error.code, error.message) from error
    except (aiosmtplib.SMTPException, OSError) as error:
        raise _not_sent(error) from error
    if answer.code != 354 or client.protocol is None:
        raise _refusal(answer.code, answer.message)
    return client.protocol


def compose(
    delivery: Delivery, run: Mapping[str, Any] | None, *, sender: str, at: datetime, public_url: str | None
) -> EmailMessage:
    """Compose the mail about an event and, if there is one, its run. `public_url` is the address of the pages, for a
    link."""
    lines, rows = [f"{delivery.event_type}, {delivery.message['timestamp']}"], []
    if run is None:
        subject = delivery.event_type
        rows = [(name, _one_line(value)) for name, value in plain(delivery.message["data"]).items()]
    else:
        cancelled = run["state"] == "cancelled"
        status = "cancelled" if cancelled else run["status"]
        subject = f"{run['flow']} run {run['id']}: {status}"
        rows = [("run", str(run["id"])), ("flow", str(run["flow"])), ("status", str(status))]
        if cancelled:
            rows.append(("cancelled by", _one_line(run["ended_by"])))
        rows += _counts(run)
        reasons = sorted(run["outcomes"].items(), key=lambda reason: (-reason[1], reason[0]))
        rows += [(name, f"{count} targets") for name, count in reasons[:MOST_REASONS] if name != "successful"]
        if run["reason"]:
            rows.append(("reason", _one_line(run["reason"])))
        if run["selection_incomplete"]:
            rows.append(("selection", _one_line(run["selection_incomplete"])))
        if public_url:
            rows.append(("look at it", f"{public_url.rstrip('/')}/runs/{run['id']}"))
    lines += [f"  {name}: {value}" for name, value in rows]
    mail = EmailMessage()
    domain = _address(sender).domain
    # Line breaks in a status or an event type would start another header.
    mail["Subject"] = storable(" ".join(f"Ecluse: {subject}".split()), LONGEST_SUBJECT)
    mail["From"] = sender
    mail["To"] = delivery.recipient
    mail["Date"] = format_datetime(at)
    mail["Message-ID"] = f"<{delivery.name}@{domain}>"
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content("\n".join(lines) + "\n")
    mail.add_alternative(_page(lines[0], rows), subtype="html")
    return mail


def _counts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the counters of a run as rows for the mail. In the run, `failed` includes cancelled targets; here they are
    listed separately."""
    counts = {name: run[name] for name in COUNTED if run[name] is not None}
    if run["cancelled"]:
        counts |= {"failed": run["failed"] - run["cancelled"], "cancelled": run["cancelled"]}
    return [(name, str(count)) for name, count in counts.items()]


def _page(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """Return the HTML part of the mail."""
    cells = "".join(f"<tr><th align=left>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<p>{escape(title)}</p><table>{cells}</table>\n"


def _one_line(value: Any) -> str:
    """Return the value as one line of text for the mail, with secrets hidden."""
    return storable(masked(" ".join(str(value).split())), LONGEST_TEXT)


def _address(sender: str) -> Address:
    return Address(addr_spec=parseaddr(sender)[1])


def _refusal(code: int, answer: str) -> VendorError:
    """Return the error for an answer of the server that refuses the mail: permanent from 500 on."""
    message = storable(masked(f"the mail server: {code} {answer}"))
    if code >= 500:
        return PermanentError(message, code="MAIL_REFUSED")
    return TransientError(message, code="MAIL_DEFERRED", ambiguous=False)


def _not_sent(error: Exception) -> NotSentError:
    """Return the error for a mail that was not handed over. No connection, no answer or a 4xx at connect is an outage
    of the server. A refusal (of the password, for example) is not an outage, but is retried: the operator may correct
    it, and the mail itself is not at fault."""
    answered = error.code if isinstance(error, aiosmtplib.SMTPResponseException) else None
    outage = isinstance(error, OSError) if answered is None else 400 <= answered < 500
    return NotSentError(_failure("the mail server", error), code=UNREACHABLE if outage else "MAIL_SERVER")


def _failure(subject: str, error: Exception) -> str:
    """Return a message about an error, with secrets hidden."""
    return storable(masked(f"{subject}: {type(error).__name__}: {error}"))


async def _did(pool: Pool, statement: str, delivery: Delivery) -> bool:
    """Execute a statement about the delivery's row; return True if it changed the row."""
    async with pool.connection() as connection:
        return bool((await connection.execute(statement, (delivery.run_id,))).rowcount)
