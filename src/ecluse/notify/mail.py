"""Mail deliveries: writes of class C4. A mail server cannot be asked whether it accepted a message, and recipients must
not get the same mail twice. So `sending_at` is committed before the text is handed over, and a mail whose answer got
lost is not retried but fails with MAY_HAVE_BEEN_SENT."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP as ON_THE_WIRE

import aiosmtplib
from aiosmtplib.protocol import PERIOD_REGEX, SMTPProtocol, normalize_message_line_endings

from ecluse.base.errors import NotFound, NotSentError, PermanentError, TransientError, VendorError
from ecluse.base.text import storable
from ecluse.db.connect import Connection, Pool
from ecluse.engine import VENDOR_DOWN, Done, Item, Result, WorkContext
from ecluse.insight import run_queries
from ecluse.notify import confirmation_tokens
from ecluse.notify.mail_text import LONGEST_TEXT, address_of, compose, page_link, request_to_confirm
from ecluse.notify.rules import CONFIRM
from ecluse.notify.work import Delivery, Resources, Setup, Smtp, load
from ecluse.vendors.hiding import HiddenKeys

# The breaker counts outages of the mail server, which concern every mail. Only mails that were never handed over fail
# with UNREACHABLE, so a retry cannot send them twice. The codes in `silent` are not answers of the server.
UNREACHABLE = "VENDOR_UNREACHABLE"
DOWN = replace(
    VENDOR_DOWN,
    codes=frozenset({UNREACHABLE}),
    silent=frozenset(
        {"MAY_HAVE_BEEN_SENT", "MAIL_NOT_CONFIGURED", "MAIL_LIMIT", "NOT_CONFIRMED", "NO_DELIVERY", "ENDPOINT_OFF"}
    ),
)

BEGIN = """
UPDATE deliveries SET sending_at = ecluse_now() WHERE run_id = %s AND sending_at IS NULL AND EXISTS (
    SELECT FROM runs WHERE runs.id = run_id AND ended_at IS NULL)
"""
# Nothing is returned once the tenant has had its mails of the day.
COUNT = """
INSERT INTO mail_counts AS c (tenant_id, day, sent)
SELECT %(tenant)s, (ecluse_now() AT TIME ZONE 'UTC')::date, 1 FROM clock_offset WHERE %(most)s > 0
ON CONFLICT (tenant_id) DO UPDATE SET day = excluded.day,
    sent = CASE c.day WHEN excluded.day THEN c.sent + 1 ELSE 1 END
WHERE c.day <> excluded.day OR c.sent < %(most)s RETURNING 1
"""
REFUSED = "UPDATE deliveries SET sending_at = NULL WHERE run_id = %s AND sent_at IS NULL"
SENT = "UPDATE deliveries SET sent_at = ecluse_now() WHERE run_id = %s"


class Uncertain(PermanentError):
    """The mail may have been sent, so it is not retried."""

    code = "MAY_HAVE_BEEN_SENT"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"The mail may have been sent, so it is not sent again by itself: {why}", code=self.code, ambiguous=True
        )


async def send(context: WorkContext, item: Item) -> Result:
    """Send the mail of a delivery: the work of the stage `mail`. A mail that may have been sent before raises Uncertain
    and is not sent again."""
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
        if delivery.event_type == CONFIRM:
            mail = await _request_to_confirm(connection, own.setup, smtp, delivery, context.now())
        elif delivery.confirmed:
            run = None
            if delivery.about_run is not None:
                with suppress(NotFound):
                    run = await run_queries.show_run(connection, delivery.tenant_id, delivery.about_run)
            look = page_link(delivery, run, own.setup.pages, own.setup.public_url)
            mail = compose(delivery, run, sender=smtp.sender, at=context.now(), look=look)
        else:
            raise PermanentError("The address is not confirmed: its link was not followed", code="NOT_CONFIRMED")
    if mail is None:
        return Done({"answer": "the address is confirmed already"})
    return Done({"answer": await hand_over(smtp, own.pool, delivery, mail, own.setup.mails_per_day)})


async def _request_to_confirm(
    connection: Connection, setup: Setup, smtp: Smtp, delivery: Delivery, now: datetime
) -> EmailMessage | None:
    """Return the mail with the link that confirms its recipient; None if the recipient is confirmed already. Raise
    TransientError if ECLUSE_PUBLIC_URL, which the link needs, is not set."""
    if setup.public_url is None:
        raise TransientError("Addresses are confirmed by a link: set ECLUSE_PUBLIC_URL", code="MAIL_NOT_CONFIGURED")
    token = await confirmation_tokens.issue(connection, delivery.tenant_id, delivery.recipient)
    if token is None:
        return None
    link = confirmation_tokens.link(setup.public_url, token)
    return request_to_confirm(delivery, link, sender=smtp.sender, at=now)


async def hand_over(smtp: Smtp, pool: Pool, delivery: Delivery, mail: EmailMessage, per_day: int) -> str:
    """Send the mail to the server, and return the server's answer when it accepted the mail. `sending_at` of the
    delivery is set before the text is sent, `sent_at` after it was accepted. Raise NotSentError if it could not be
    handed over, PermanentError or TransientError if the server refuses it, Uncertain if it cannot be known whether it
    was sent, and TransientError if `per_day` mails were sent for the tenant today."""
    hidden = HiddenKeys(smtp.password)
    client = aiosmtplib.SMTP(
        hostname=smtp.host,
        port=smtp.port,
        username=smtp.username,
        password=smtp.password,
        use_tls=smtp.tls,
        start_tls=False if smtp.tls else smtp.starttls,
        timeout=smtp.timeout,
        local_hostname=address_of(smtp.sender).domain,
    )
    try:
        try:
            await client.connect()
        except (aiosmtplib.SMTPException, OSError) as error:
            raise _not_sent(hidden, error) from error
        protocol = await _announce(client, smtp, delivery, hidden)
        await _begin(pool, delivery, per_day)
        try:
            # The rest of `client.data()`, which does not report whether the text had been sent.
            protocol.write(PERIOD_REGEX.sub(b"..", normalize_message_line_endings(mail.as_bytes(policy=ON_THE_WIRE))))
            protocol.write(b".\r\n")
            answer = await protocol.read_response(timeout=smtp.timeout)
        except (aiosmtplib.SMTPException, OSError) as error:
            raise Uncertain(_failure(hidden, "no answer to its text", error)) from error
        if answer.code == 250:
            await _did(pool, SENT, delivery)
            return storable(hidden.in_text(answer.message), LONGEST_TEXT)
        if not 400 <= answer.code < 600:
            raise Uncertain(f"the server answered {answer.code}")
        await _did(pool, REFUSED, delivery)
        raise _refusal(hidden, answer.code, answer.message)
    finally:
        client.close()


async def _announce(client: aiosmtplib.SMTP, smtp: Smtp, delivery: Delivery, hidden: HiddenKeys) -> SMTPProtocol:
    """Send MAIL, RCPT and DATA, up to the point where the server waits for the text; return the protocol to send it
    with."""
    try:
        await client.mail(address_of(smtp.sender).addr_spec)
        await client.rcpt(delivery.recipient)
        answer = await client.execute_command(b"DATA")
    except aiosmtplib.SMTPResponseException as error:
        raise _refusal(hidden, error.code, error.message) from error
    except (aiosmtplib.SMTPException, OSError) as error:
        raise _not_sent(hidden, error) from error
    if answer.code != 354 or client.protocol is None:
        raise _refusal(hidden, answer.code, answer.message)
    return client.protocol


def _refusal(hidden: HiddenKeys, code: int, answer: str) -> VendorError:
    """Return the error for an answer of the server that refuses the mail: permanent for codes from 500 on, otherwise
    transient."""
    message = storable(hidden.in_text(f"the mail server: {code} {answer}"))
    if code >= 500:
        return PermanentError(message, code="MAIL_REFUSED")
    return TransientError(message, code="MAIL_DEFERRED", ambiguous=False)


def _not_sent(hidden: HiddenKeys, error: Exception) -> NotSentError:
    """Return the error for a mail that was not handed over. No connection, no answer or a 4xx answer is an outage
    of the server. A refusal (of the password, for example) is not an outage, but is retried: the operator may correct
    it, and the mail itself is not at fault."""
    answered = error.code if isinstance(error, aiosmtplib.SMTPResponseException) else None
    outage = isinstance(error, OSError) if answered is None else 400 <= answered < 500
    return NotSentError(_failure(hidden, "the mail server", error), code=UNREACHABLE if outage else "MAIL_SERVER")


def _failure(hidden: HiddenKeys, subject: str, error: Exception) -> str:
    """Return a message about an error, with secrets hidden."""
    return storable(hidden.in_text(f"{subject}: {type(error).__name__}: {error}"))


async def _begin(pool: Pool, delivery: Delivery, per_day: int) -> None:
    """Count the mail for its tenant and set `sending_at` of the delivery, in one transaction. Raise TransientError if
    `per_day` mails were sent for the tenant today, Uncertain if another worker has begun to send it."""
    async with pool.connection() as connection, connection.transaction():
        counted = await connection.execute(COUNT, {"tenant": delivery.tenant_id, "most": per_day})
        if not counted.rowcount:
            why = f"Tenant {delivery.tenant_id} has had its {per_day} mails of today (ECLUSE_MAILS_PER_DAY)"
            raise TransientError(why, code="MAIL_LIMIT", ambiguous=False)
        if not (await connection.execute(BEGIN, (delivery.run_id,))).rowcount:
            raise Uncertain("another worker has begun to send it")


async def _did(pool: Pool, statement: str, delivery: Delivery) -> bool:
    """Execute a statement about the delivery's row, in a transaction of its own; return True if it changed the row."""
    async with pool.connection() as connection:
        return bool((await connection.execute(statement, (delivery.run_id,))).rowcount)
